"""Answer files of Spec-Bench, read as that project's speed script reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compared_runs import BASELINE, QUICK, made_row, made_rows, made_run, write_run
from script_runs import run_script

from specdec_lab.bench.records import read_rows
from specdec_lab.compare.spec_bench import spec_bench_numbers
from specdec_lab.export.spec_bench import answer_lines, incomplete_questions

ROOT = Path(__file__).parents[2]
TWO = {"autoregressive": BASELINE, "ngram": QUICK}


def their_speed(lines: list[str]) -> tuple[float, float]:
    """Return tokens/s and mean accepted tokens as that script computes them from a method's file."""
    speeds, lengths = [], []
    for line in lines:
        choice = json.loads(line)["choices"][0]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths += choice["accept_lengths"]
    return sum(speeds) / len(speeds), sum(lengths) / len(lengths)


def test_their_numbers_are_those_that_the_report_names_as_theirs(tmp_path: Path):
    """The export, read back by their formulas, gives what the comparison says they would compute."""
    rows = read_rows(made_run(tmp_path / "run", TWO) / "requests.jsonl")
    lines = answer_lines(rows, "ngram")
    rate, length = their_speed(lines)
    by_name = {name: [row for row in rows if row["strategy"] == name] for name in TWO}
    numbers = spec_bench_numbers(by_name["ngram"], by_name["autoregressive"])
    assert rate == pytest.approx(numbers["tokens_per_second"])
    assert length == pytest.approx(numbers["mean_accepted_tokens"])
    assert their_speed(answer_lines(rows, "autoregressive"))[1] == 1.0


def test_turns_and_repeats_have_their_places():
    """Turns in order within a choice, a choice for each repeat, tokens with the one that the prefill gave."""
    rows = made_rows({"ngram": QUICK}, prompts=1, repeats=2)
    (line,) = answer_lines(list(reversed(rows)), "ngram")
    document = json.loads(line)
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    for choice in document["choices"]:
        assert len(choice["turns"]) == len(choice["wall_time"]) == len(choice["decoding_steps"]) == 2
        assert choice["new_tokens"] == [41, 41]
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
        assert sum(choice["accept_lengths"]) == 80


def test_a_question_with_a_failed_turn_is_left_out_of_all_files():
    """Half a conversation would count as a whole one, and means would be over different questions."""
    import numpy as np

    rng = np.random.default_rng(0)
    rows = [made_row("ngram", QUICK, 1, rng), made_row("ngram", QUICK, 1, rng, turn=1, status="failed")]
    rows.append(made_row("ngram", QUICK, 2, rng))
    rows += [made_row("autoregressive", BASELINE, question, rng) for question in (1, 2)]
    for strategy in TWO:
        assert [json.loads(line)["question_id"] for line in answer_lines(rows, strategy)] == [2]
    assert incomplete_questions(rows) == {1}


def test_the_command(tmp_path: Path):
    """A file for each strategy; a folder without a run is refused in one sentence."""
    write_run(tmp_path / "run", TWO, made_rows(TWO, prompts=3))
    for run, code in (("run", 0), ("absent", 1)):
        done = run_script(tmp_path, "export.py", "format=spec_bench", "hydra.run.dir=answers", f"run={run}")
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "answers").iterdir()} == {"autoregressive.jsonl", "ngram.jsonl"}
    assert len((tmp_path / "answers" / "ngram.jsonl").read_text().splitlines()) == 3
