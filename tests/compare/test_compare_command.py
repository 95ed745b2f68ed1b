"""The command line of a comparison, from real runs and made ones to files and exit codes."""

from __future__ import annotations

import csv
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from compared_runs import QUICK, THREE, made_run
from rich.console import Console

from specdec_lab.bench.benchmark import check_run, run_benchmark
from specdec_lab.bench.columns import scalars
from specdec_lab.bench.settings import plan_run
from specdec_lab.compare.command import compare_main
from specdec_lab.compare.comparison import COMPARISON_VERSION, compare
from specdec_lab.errors import InputError

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare.py"


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, expect exit code 1, and return its last line."""
    capsys.readouterr()
    assert compare_main(list(words)) == 1
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    return shown.err.strip().splitlines()[-1]


def test_real_runs_from_the_benchmark_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two real runs of the tiny target, compared by the script from its first line: every file, every entry."""
    prompts = tmp_path / "prompts.jsonl"
    questions = [{"question_id": n, "category": "talk", "turns": [f"{n} and {n} and {n}"]} for n in range(4)]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in questions))
    for name, k in (("one", 2), ("two", 4)):
        drafter = {"_target_": "specdec_lab.drafters.ngram.NgramDrafter", "k": k, "min_ngram": 1}
        plain = {"_target_": "specdec_lab.drafters.autoregressive.AutoregressiveDrafter"}
        config = {
            "strategies": None,
            "drafter": {"autoregressive": plain, "ngram": drafter},
            "target": {"_target_": "specdec_lab.targets.tiny.load_tiny", "device": "cpu"},
            "prompts": {"path": str(prompts), "limit": None, "categories": None},
            "sampling": {"temperature": 0},
            "tracking": {},
            "max_new_tokens": 8,
        }
        plan, folder = plan_run(config), tmp_path / name
        folder.mkdir()
        check_run(plan, folder)
        with (tmp_path / "shown").open("a") as shown:
            run_benchmark(plan, folder, Console(file=shown), Console(file=shown))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "one", "two", "--out", "compared"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    assert "results: compared" in out
    assert {path.name for path in (tmp_path / "compared").iterdir()} == {
        "comparison.json", "comparison.csv", "report.html",
    }  # fmt: skip
    document = json.loads((tmp_path / "compared" / "comparison.json").read_text("utf-8"))
    labels = [entry["label"] for entry in document["entries"]]
    assert labels == ["autoregressive [run 1]", "ngram k=2", "autoregressive [run 2]", "ngram k=4"]
    assert len(document["pairs"]) == 3  # each over its own baseline, and one with the other
    for label in labels:  # square brackets are no markup
        assert label in out


def test_files_hold_the_numbers_of_the_summary(tmp_path: Path):
    """summary.json, comparison.json, comparison.csv and the function say the same, to the last digit."""
    folder = made_run(tmp_path / "run", THREE)
    assert compare_main([str(folder), "--out", str(tmp_path / "out")]) == 0
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    document = json.loads((tmp_path / "out" / "comparison.json").read_text("utf-8"))
    assert [entry["numbers"] for entry in document["entries"]] == summary["strategies"]
    assert document["runs"][0]["machine"] == summary["machine"]
    called = json.loads(json.dumps(compare([folder]).document()))
    assert {**called, "created": ""} == {**document, "created": ""}
    with (tmp_path / "out" / "comparison.csv").open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    assert [line["label"] for line in lines] == list(THREE)
    for line, strategy, entry in zip(lines, summary["strategies"], document["entries"], strict=True):
        expected = {name: "" if value is None else str(value) for name, value in scalars(strategy)}
        assert {name: line[name] for name in expected} == expected
        even = entry["ledger"]["break_even_acceptance_length"]
        assert line["ledger.break_even_acceptance_length"] == str(even)
        assert line["spec_bench.speedup"] == str(entry["spec_bench"]["speedup"])


def test_tables_show_verdicts_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What a terminal shows: verdict, interval and number of prompts, what runs differ in, and why more is slower."""
    one, two = made_run(tmp_path / "one", THREE), made_run(tmp_path / "two", THREE, acceptance="block")
    assert compare_main([str(one), str(two), "--allow", "acceptance", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "faster than" in out
    assert "cannot tell" in out
    assert "The runs differ in acceptance: another rule accepts other drafts" in out
    assert "emits more per round than ngram" in out


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Refused before anything is written: exit code 1, the folder or the option, and the remedy."""
    folder, out = str(made_run(tmp_path / "run", THREE)), str(tmp_path / "out")
    assert "no such folder" in refused([str(tmp_path / "absent"), "--out", out], capsys)
    assert "required: RUN_DIR" in refused([], capsys)
    assert "--allow='colour'" in refused([folder, "--allow", "colour", "--out", out], capsys)
    assert "--equal='nodes'" in refused([folder, "--equal", "nodes", "--out", out], capsys)
    assert "this is a file" in refused([folder, "--out", str(Path(folder) / "config.yaml")], capsys)
    assert not Path(out).exists()


def test_an_earlier_comparison_is_replaced_only_when_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing is lost by repeating a command; what else lies in the folder stays in any case."""
    folder, out = str(made_run(tmp_path / "run", THREE)), tmp_path / "out"
    out.mkdir()
    for name in ("comparison.json", "notes.txt"):
        (out / name).write_text("mine")
    assert "add --overwrite" in refused([folder, "--out", str(out)], capsys)
    assert (out / "comparison.json").read_text() == "mine"
    assert compare_main([folder, "--out", str(out), "--overwrite"]) == 0
    assert json.loads((out / "comparison.json").read_text())["comparison_version"] == COMPARISON_VERSION
    assert (out / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A path through a file."""
    folder = made_run(tmp_path / "run", THREE)
    last = refused([str(folder), "--out", str(folder / "summary.json" / "deep")], capsys)
    assert "writing failed" in last


def test_a_run_without_the_baseline_is_refused(tmp_path: Path):
    """Rows that no benchmark writes: there would be nothing that a speed could be relative to."""
    with pytest.raises(InputError, match="no autoregressive to compare with"):
        compare([made_run(tmp_path / "run", {"ngram": QUICK})])
