"""Evaluation prompts stay out of training data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_lab.bench.prompts import Prompt
from specdec_lab.distill.leak import Evaluation, read_evaluation, runs_of, without_leaks, words_of
from specdec_lab.errors import InputError

WORDS = [f"word{number}" for number in range(60)]


def text(start: int, end: int) -> str:
    return " ".join(WORDS[start:end])


def prompt(*turns: str, number: int = 7) -> Prompt:
    return Prompt(number, "talk", turns)


def evaluation(*turns: str) -> Evaluation:
    made = Evaluation()
    made.add("bench.jsonl", [Prompt(81, "writing", turns)])
    return made


def test_equal_words_leak_whatever_surrounds_them():
    """Letters of another case or width, punctuation and spaces do not hide an evaluation prompt."""
    held = evaluation("Name three colours, please.")
    leak = held.leak(prompt("  name THREE\ncolours please\uff01"))
    assert leak is not None
    assert (leak.question_id, leak.evaluation, leak.evaluation_id, leak.share) == (7, "bench.jsonl", 81, 1.0)
    assert held.leak(prompt("Name four colours, please.")) is None


def test_every_turn_is_compared_with_every_turn():
    held = evaluation("first", "Rewrite your previous response.")
    assert held.leak(prompt("something", "rewrite your previous response")) is not None
    assert held.leak(prompt("something", "else")) is None


def test_an_evaluation_question_inside_a_longer_prompt_leaks():
    """The share is taken of the text with fewer runs, so that padding does not thin it out."""
    leak = evaluation(text(0, 20)).leak(prompt(" ".join(f"other{n}" for n in range(200)) + " " + text(0, 20)))
    assert leak is not None
    assert leak.share == 1.0


def test_a_prompt_cut_out_of_an_evaluation_text_leaks():
    assert evaluation(text(0, 60)).leak(prompt(text(10, 30))) is not None


@pytest.mark.parametrize(("common", "leaks"), [(18, False), (19, True)])
def test_half_of_the_runs_is_the_limit(common: int, leaks: bool):
    """25 words have 13 runs; 18 common words hold 6 of them, 19 hold 7."""
    own = " ".join(f"mine{n}" for n in range(25 - common))
    assert len(runs_of(words_of(text(0, 25)))) == 13
    assert (evaluation(text(0, 25)).leak(prompt(f"{text(0, common)} {own}")) is not None) == leaks


def test_short_texts_leak_only_if_they_are_equal():
    held = evaluation(text(0, 12))
    assert held.leak(prompt(text(0, 11))) is None
    assert held.leak(prompt(text(0, 12) + " more")) is None
    assert held.leak(prompt(text(0, 12))) is not None


def test_leaks_are_refused_by_name_or_dropped():
    """At most 20 are named; with ``drop`` the others go on."""
    held = evaluation(*(f"question {number}" for number in range(30)))
    prompts = [prompt(f"Question {number}?", number=number) for number in range(30)]
    prompts.append(prompt("another one", number=99))
    with pytest.raises(
        InputError, match=r"prompts.paths='30 of 31 prompts': .*by question: 0 \(bench.jsonl 81"
    ) as refused:
        without_leaks(prompts, held, drop=False, where="prompts.paths")
    assert "19 (bench" in str(refused.value)
    assert "20 (bench" not in str(refused.value)
    assert "and 10 more" in str(refused.value)
    assert "drop_leaks=true" in str(refused.value)
    kept, leaks = without_leaks(prompts, held, drop=True, where="prompts.paths")
    assert [one.question_id for one in kept] == [99]
    assert len(leaks) == 30


def test_files_of_all_evaluation_shapes_are_read(tmp_path: Path):
    """Spec-Bench's turns, HumanEval's prompt and GSM8K's question."""
    rows = {
        "spec.jsonl": {"question_id": 1, "category": "qa", "turns": ["first of spec", "second of spec"]},
        "human.jsonl": {"task_id": "HumanEval/0", "prompt": "def add(a, b):"},
        "gsm.jsonl": {"question": "How many eggs?", "answer": "3 #### 3"},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    held = read_evaluation([str(tmp_path / name) for name in rows], "evaluation")
    for turn in ("second of spec", "def add(a,b)", "how many eggs"):
        assert held.leak(prompt(turn)) is not None
    assert held.leak(prompt("3 #### 3")) is None
    with pytest.raises(InputError, match=r"evaluation='absent.jsonl': there is no such file"):
        read_evaluation(["absent.jsonl"], "evaluation")
