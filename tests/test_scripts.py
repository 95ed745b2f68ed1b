"""The command line of the benchmark as a user meets it: arguments, exit codes, signals, files."""

from __future__ import annotations

import json
import os
import resource
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec_lab.bench.records import read_rows
from specdec_lab.config import available_strategies
from specdec_lab.targets.tiny import load_tiny

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "benchmark.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


FILES = {"config.yaml", "requests.jsonl", "comparison.json", "comparison.csv", "report.html"}

TWO_STRATEGIES = ("target=tiny", "target.device=cpu", "strategies=[autoregressive,ngram]")
"""Unless a test says otherwise: the rest of the strategies have their tests elsewhere."""


def arguments(*overrides: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *TWO_STRATEGIES, *overrides]


def run_script(folder: Path, *overrides: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own, launched from ``folder``."""
    return subprocess.run(
        arguments(*overrides), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=180, **options
    )


def prompts(folder: Path, count: int = 4, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    rows = [{"question_id": n, "category": "talk", "turns": [f"{n} and {n} and {n}", "again"]} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text("utf-8").splitlines()]


def ids(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[int]]:
    found = {
        tuple(row[name] for name in ("strategy", "question_id", "turn", "repeat")): row["output_ids"] for row in rows
    }
    assert len(found) == len(rows)
    return found


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return ``(overrides) -> (exit code, stdout, stderr)``: the script from its first line, in this process."""

    def call(*overrides: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        monkeypatch.setattr(sys, "argv", arguments(*overrides)[1:])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        shown = capfd.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return call


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["strategies=[eagel]"],
            [
                "strategies='eagel'",
                "autoregressive, draft_model, eagle, eagle3, hybrid, hybrid_eagle, lookahead, medusa, ngram",
            ],
        ),
        (["drafter.ngram.kk=3"], ["drafter.ngram.kk"]),
        (["drafter.ngram.k=0"], ["drafter.ngram.k=0", "greater than or equal to 1"]),
        (["strategies=[autoregressive]", "drafter.ngram.k=0"], ["drafter.ngram.k=0", "greater than or equal to 1"]),
        (["drafter.nothing.k=1"], ["drafter.nothing: there is no field", "choose from autoregressive"]),
        (["max_new_tokens=none"], ["max_new_tokens='none'", "integer"]),
        (["colour=red"], ["colour"]),
        (["target=huge"], ["target/huge", "tiny"]),
        (["target.dtype=int3"], ["target.dtype='int3'"]),
        (["target.device=cuda:99"], ["target.device='cuda:99'"]),
        (["prompts.path=absent.jsonl"], ["prompts.path='absent.jsonl'", "no such file"]),
        (["prompts.path=malformed.jsonl"], ["malformed.jsonl", "line 2"]),
        (["prompts.path=blank.jsonl"], ["blank.jsonl", "line 1"]),
        (["prompts.path=empty.jsonl"], ["empty.jsonl", "no prompt"]),
        (["acceptance=lucky"], ["acceptance='lucky'", "'rejection'"]),
        (["sampling.bad_words=['<user>', '</s>']"], ["sampling.bad_words='</s>'", "end-of-sequence"]),
        (["hydra.run.dir=used"], ["hydra.run.dir=", "holds notes.txt; give another folder"]),
        (["hydra.run.dir=used", "overwrite=true"], ["overwrite=True", "notes.txt"]),
        (["hydra.run.dir=prompts.jsonl/run"], ["hydra.run.dir="]),
        (["a=[1"], ["[1"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(command, tmp_path: Path, overrides: list[str], words: list[str]):
    """Refused before anything is decoded: the field, the value and the remedy; no traceback, no result file."""
    good = prompts(tmp_path).read_text()
    (tmp_path / "malformed.jsonl").write_text(good.splitlines()[0] + '\n{"question_id": 2, "category"\n')
    (tmp_path / "blank.jsonl").write_text('{"question_id": 1, "category": "talk", "turns": ["  "]}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    code, out, err = command("prompts.path=prompts.jsonl", *overrides)
    assert code == 1
    assert "Traceback" not in out + err
    assert all(word in err for word in words), err
    if not overrides[0].startswith("--"):  # for flags, argparse also prints the usage
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: ")
        assert all(word in last for word in words)
    assert not list(tmp_path.rglob("requests.jsonl"))
    assert not list(tmp_path.glob("outputs/benchmark/*"))  # an empty run folder would look like a run


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path):
    """The same through a real shell: exit code and stderr of the process, and nothing on stdout."""
    done = run_script(tmp_path, "strategies=[autoregressive,nope]")
    assert done.returncode == 1
    assert done.stderr == (
        "error: strategies='nope': there is no strategy of that name; "
        f"choose from {', '.join(available_strategies())}\n"
    )
    assert done.stdout == ""


def test_a_damaged_weight_file_is_refused_by_name(command, tmp_path: Path):
    """Pickles and cut files where safetensors belong end in a sentence, and nothing is run."""
    target = load_tiny(device="cpu")
    folder = tmp_path / "model"
    target.model.save_pretrained(folder)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    prompts(tmp_path)
    code, out, err = command("target=hf", "target.model=model", "prompts.path=prompts.jsonl", "hydra.run.dir=run")
    assert code == 1
    assert "Traceback" not in out + err
    assert "model" in err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_failed_row_is_exit_code_3(command, tmp_path: Path):
    """The others are there, and the summary says that it is not complete."""
    path = prompts(tmp_path, 2)
    with path.open("a") as file:
        file.write(json.dumps({"question_id": "long", "category": "talk", "turns": ["word " * 200]}) + "\n")
    options = ("prompts.path=prompts.jsonl", "max_new_tokens=4", "target.max_positions=128", "hydra.run.dir=run")
    code, out, err = command(*options)
    assert code == 3
    assert "2 rows failed (question long: the prompt has" in err
    assert "Traceback" not in out + err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["complete"] is False
    assert [row["question_id"] for row in rows_of(tmp_path / "run") if row["status"] == "failed"] == ["long"] * 2
    code, _, _ = command(*options, "resume=true")
    assert code == 3


def test_answers_of_one_token_have_no_rate_and_are_no_failure(command, tmp_path: Path):
    """Nothing to compare, for several strategies at once: the run succeeds, and its page says why it is empty."""
    prompts(tmp_path, 2)
    options = ("prompts.path=prompts.jsonl", "max_new_tokens=1", "strategies=[ngram,recycling]", "hydra.run.dir=run")
    code, out, err = command(*options)
    assert code == 0, err
    assert "Traceback" not in out + err
    compared = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert any("No prompt can be compared" in notice for notice in compared["notices"])


def test_overwrite_leaves_a_folder_that_no_run_made(command, tmp_path: Path):
    """A file of a run's name alone does not make a folder a run's."""
    prompts(tmp_path, 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "requests.jsonl").write_text("mine")
    code, _, err = command("prompts.path=prompts.jsonl", "hydra.run.dir=mine", "overwrite=true")
    assert code == 1
    assert "no config.yaml of an earlier run" in err
    assert (tmp_path / "mine" / "requests.jsonl").read_text() == "mine"


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_paths_start_at_the_folder_of_the_launch(command, tmp_path: Path, chdir: str):
    """Guards CL-04: inputs against the launch folder, outputs against the run folder, whatever Hydra's chdir says."""
    prompts(tmp_path)
    common = ("prompts.path=prompts.jsonl", "max_new_tokens=2", f"hydra.job.chdir={chdir}", "strategies=[]")
    code, _, err = command(*common, "hydra.run.dir=single")
    assert code == 0, err
    code, _, err = command(*common, "-m", "hydra.sweep.dir=sweep", "seed=0,1")
    assert code == 0, err
    for folder in ("single", "sweep/0", "sweep/1"):
        found = {path.name for path in (tmp_path / folder).iterdir()}
        assert found == {*FILES, "summary.json", "summary.csv"}
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "single", "sweep"}


def test_tracking_logs_each_strategy_into_the_run_folder(command, tmp_path: Path):
    """The benchmark hands its finished summary to the tracker, and tells how to send the runs."""
    prompts(tmp_path, 1)
    code, out, err = command(
        "prompts.path=prompts.jsonl", "max_new_tokens=2", "hydra.run.dir=run", "tracking=wandb", "tracking.mode=offline"
    )
    assert code == 0, err
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 2
    assert "wandb sync" in err
    assert "[HYDRA]" not in out + err


def test_a_sweep_through_a_shell(tmp_path: Path):
    """Guards CL-01: a comma sweeps where it should and nowhere else; a failing job does not stop the others."""
    prompts(tmp_path, 1, "a, b.jsonl")
    words = arguments("-m", "max_new_tokens=4", "strategies=[autoregressive,ngram]", "drafter.ngram.k=4,0,8")
    line = f"""{shlex.join(words)} hydra.sweep.dir=sweep 'prompts.path="a, b.jsonl"'"""
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "Launching 3 jobs" in done.stdout
    assert "error: drafter.ngram.k=0: input should be greater than or equal to 1" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "speed-up" in done.stdout
    assert "4/4 rows" in done.stderr
    for job, k in ((0, 4), (2, 8)):
        summary = json.loads((tmp_path / "sweep" / str(job) / "summary.json").read_text())
        assert summary["strategies"][1]["config"]["k"] == k
        assert summary["prompts"]["source"] == "a, b.jsonl"
        assert summary["complete"]
    assert not (tmp_path / "sweep" / "1").exists()


# --- interruptions ---------------------------------------------------------------------------------------------------


def interrupt(folder: Path, overrides: list[str], number: signal.Signals, after_rows: int) -> tuple[int, str]:
    """Start the script, send it a signal once some rows are on disk, and return exit code and stderr."""
    with subprocess.Popen(
        arguments(*overrides), cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        path, deadline = folder / "run" / "requests.jsonl", time.monotonic() + 120
        while not (path.exists() and path.read_bytes().count(b"\n") >= after_rows):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    return process.returncode, err


def test_a_killed_run_goes_on_to_the_same_rows(command, tmp_path: Path):
    """After kill -9 in the middle, resume gives the rows of an uninterrupted run: none lost, none doubled, same ids."""
    prompts(tmp_path, 8)
    options = ["prompts.path=prompts.jsonl", "max_new_tokens=48"]
    code, _ = interrupt(tmp_path, [*options, "hydra.run.dir=run"], signal.SIGKILL, after_rows=5)
    assert code == -signal.SIGKILL
    assert not (tmp_path / "run" / "summary.json").exists()
    kept = rows_of(tmp_path / "run")
    assert 5 <= len(kept) < 32
    with (tmp_path / "run" / "requests.jsonl").open("a") as file:
        file.write('{"strategy": "ngram", "question_')
    code, _, err = command(*options, "hydra.run.dir=run")
    assert code == 1
    assert "resume=true" in err
    code, _, err = command(*options, "hydra.run.dir=run", "resume=true")
    assert code == 0, err
    code, _, err = command(*options, "hydra.run.dir=whole")
    assert code == 0, err
    resumed, whole = rows_of(tmp_path / "run"), rows_of(tmp_path / "whole")
    assert ids(resumed) == ids(whole)
    assert len(resumed) == 32
    for before, after in zip(kept, resumed, strict=False):
        assert after["time_seconds"] == before["time_seconds"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["complete"]


def test_ctrl_c_keeps_the_rows_and_says_how_to_go_on(command, tmp_path: Path):
    """Exit code 130, no traceback, complete lines; the options that it names go on as they stand."""
    prompts(tmp_path, 12)
    options = ["prompts.path=prompts.jsonl", "max_new_tokens=64", "hydra.run.dir=run"]
    code, err = interrupt(tmp_path, options, signal.SIGINT, after_rows=2)
    assert code == 130
    assert "Traceback" not in err
    kept = ids(rows_of(tmp_path / "run"))
    assert len(kept) >= 2
    (hint,) = (line for line in err.splitlines() if "go on with: " in line)
    code, _, err = command(*shlex.split(hint.partition("go on with: ")[2]))
    assert code == 0, err
    assert len(ids(rows_of(tmp_path / "run"))) == 48


def test_a_full_disk_is_one_sentence_and_keeps_the_rows(command, tmp_path: Path):
    """What was computed stays, in complete lines or with a torn last one that resume drops."""
    prompts(tmp_path, 8)
    options = ("prompts.path=prompts.jsonl", "max_new_tokens=32", "hydra.run.dir=run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # no file larger: a stand-in for a full disk
    try:
        code, out, err = command(*options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert "Traceback" not in out + err
    assert err.strip().splitlines()[-1].startswith("error: hydra.run.dir=")
    assert "resume=true" in err
    kept = read_rows(tmp_path / "run" / "requests.jsonl")
    assert kept
    assert command(*options, "resume=true")[0] == 0
    assert rows_of(tmp_path / "run")[len(kept) - 1]["time_seconds"] == kept[-1]["time_seconds"]
