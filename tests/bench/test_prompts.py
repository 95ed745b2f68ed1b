"""Prompt files: the package's own set, the known shapes, and refusals that name file, line and field."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from specdec_lab.bench.prompts import Prompt, load_prompts
from specdec_lab.errors import InputError

KINDS = ("multi_turn_conversation", "translation", "summarization", "qa", "math_reasoning", "rag")
GOOD = {"question_id": 1, "category": "qa", "turns": ["Why?"]}


def write(folder: Path, *lines: Any) -> str:
    """Write lines, given as they are or as objects, and return the path."""
    path = folder / "prompts.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(texts))
    return str(path)


# --- the package's own ------------------------------------------------------------------------------------------------


def test_the_packages_own_prompts_cover_six_kinds_of_task() -> None:
    prompts = load_prompts()
    assert prompts.source == "builtin"
    assert [prompt.question_id for prompt in prompts.prompts] == list(range(1, 61))
    assert Counter(prompt.category for prompt in prompts.prompts) == dict.fromkeys(KINDS, 10)
    assert (prompts.count, prompts.turns) == (60, 70)
    assert all(len(prompt.turns) == 1 + (prompt.category == KINDS[0]) for prompt in prompts.prompts)
    assert len({turn for prompt in prompts.prompts for turn in prompt.turns}) == prompts.turns


@pytest.mark.parametrize("limit", [1, 6, 7, 24, 59])
def test_any_start_of_the_packages_own_prompts_is_balanced(limit: int) -> None:
    """A demo on the first 24 prompts must speak of all six kinds of task alike."""
    counts = Counter(prompt.category for prompt in load_prompts(limit=limit).prompts)
    assert max(counts.values()) - min(counts[kind] for kind in KINDS) <= 1
    assert counts.total() == limit


def test_the_packages_own_long_prompts_have_their_length() -> None:
    """Summaries and retrieved passages are the long contexts of the set."""
    for prompt in load_prompts(categories=["summarization", "rag"]).prompts:
        assert 180 <= len(prompt.turns[0].split()) <= 350, prompt.question_id


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_the_native_shape_keeps_ids_and_turns_and_ignores_the_rest(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {**GOOD, "reference": None, "task_id": 7},
        {"turns": ["a", "b\n"], "category": "Übersetzung", "question_id": "x-2", "question": []},
    )
    assert load_prompts(path).prompts == (Prompt(1, "qa", ("Why?",)), Prompt("x-2", "Übersetzung", ("a", "b\n")))
    assert load_prompts(path).source == path


def test_humaneval_becomes_one_turn_of_code(tmp_path: Path) -> None:
    path = write(tmp_path, {"task_id": "Own/0", "prompt": "def f():\n", "test": "assert f()", "entry_point": "f"})
    assert load_prompts(path).prompts == (Prompt("Own/0", "code", ("def f():\n",)),)


def test_gsm8k_becomes_one_turn_numbered_by_line(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "1 + 1?", "answer": "2"}, b"", {"question": "2 + 2?", "answer": "4"})
    assert load_prompts(path).prompts == (
        Prompt(1, "math_reasoning", ("1 + 1?",)),
        Prompt(3, "math_reasoning", ("2 + 2?",)),
    )


def test_the_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    """Guards TD-11: no type is guessed from the lines before, be they null, empty, or of another shape."""
    rows: list[dict[str, Any]] = [
        {"question_id": number, "category": "qa", "turns": [f"q{number}"]} for number in range(6)
    ]
    rows[0]["reference"] = None
    rows[1]["reference"] = []
    rows[2]["reference"] = [{"deep": "object"}]
    rows[3]["question_id"] = "three"
    rows[4] = {"task_id": "four", "prompt": "def g():"}
    expected = {str(prompt) for prompt in load_prompts(write(tmp_path, *rows)).prompts}
    for seed in range(6):
        random.Random(seed).shuffle(rows)
        assert {str(prompt) for prompt in load_prompts(write(tmp_path, *rows)).prompts} == expected


def test_a_mark_at_the_start_and_windows_line_ends_are_no_fault(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r", b"  \r", b"")
    assert load_prompts(path).prompts == (Prompt(1, "qa", ("Why?",)),)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "field", "reason"),
    [
        (b'{"question_id": 2,', "", "not JSON"),
        (b"[" * 100_000, "", "not JSON"),
        (b'{"question_id": ' + b"9" * 5000 + b"}", "", "not JSON"),
        (b'["question_id", 2]', "", "JSON object"),
        (b"null", "", "JSON object"),
        ('{"question_id": 2, "category": "é"}'.encode("latin-1"), "", "UTF-8"),
        ({}, ", question_id", "missing"),
        ({"text": "Hi"}, ", question_id", "missing; the line has text"),
        ({"category": "qa", "turns": ["a"]}, ", question_id", "missing"),
        ({"question_id": 2, "turns": ["a"]}, ", category", "missing"),
        ({"question_id": 2, "category": "qa"}, ", turns", "missing"),
        ({"task_id": "a/1"}, ", prompt", "missing"),
        ({"question": "1 + 1?"}, ", answer", "missing"),
        ({**GOOD, "question_id": None}, ", question_id", "whole number or text"),
        ({**GOOD, "question_id": True}, ", question_id", "whole number or text"),
        ({**GOOD, "question_id": 2.0}, ", question_id", "whole number or text"),
        ({**GOOD, "question_id": " "}, ", question_id", "blank"),
        ({**GOOD, "question_id": 2, "category": 3}, ", category", "give text"),
        ({**GOOD, "question_id": 2, "category": ""}, ", category", "blank"),
        ({**GOOD, "question_id": 2, "turns": "Why?"}, ", turns", "list"),
        ({**GOOD, "question_id": 2, "turns": None}, ", turns", "list"),
        ({**GOOD, "question_id": 2, "turns": []}, ", turns", "at least one"),
        ({**GOOD, "question_id": 2, "turns": ["a", None]}, r", turns[1]", "give text"),
        ({**GOOD, "question_id": 2, "turns": ["a", " \n\t"]}, r", turns[1]", "blank"),
        (b'{"question_id": 2, "category": "qa", "turns": ["\\ud83d"]}', r", turns[0]", "whole characters"),
        (GOOD, ", question_id", "line 1 has this id already"),
    ],
)
def test_a_bad_line_is_refused_by_file_line_and_field(line: Any, field: str, reason: str, tmp_path: Path) -> None:
    """Guards TD-11: one sentence that names file, line and field, and no traceback of a parser."""
    path = write(tmp_path, GOOD, b"", line)
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    assert caught.value.field == f"{path}, line 3{field}"
    assert reason in caught.value.remedy
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    cases = {str(tmp_path / "absent.jsonl"): "no such file", str(tmp_path): "folder", "a\0b": "cannot be read"}
    for path, reason in cases.items():
        with pytest.raises(InputError, match=r"^prompts[.]path=") as caught:
            load_prompts(path)
        assert reason in caught.value.remedy


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no prompt"):
        load_prompts(write(tmp_path, content))


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_categories_are_chosen_before_the_limit() -> None:
    prompts = load_prompts(limit=3, categories=["rag", "qa"])
    assert [(prompt.question_id, prompt.category) for prompt in prompts.prompts] == [(4, "qa"), (6, "rag"), (10, "qa")]
    assert load_prompts(limit=1000).count == 60


@pytest.mark.parametrize("name", ["limit", "per_task", "turns"])
@pytest.mark.parametrize("number", [0, -1, True, 1.5, "3"])
def test_an_unusable_number_is_refused(name: str, number: Any) -> None:
    with pytest.raises(InputError, match=rf"^prompts[.]{name}="):
        load_prompts(**{name: number})


def test_a_sorted_file_gives_every_task_its_share(tmp_path: Path) -> None:
    """A limit of a file that is sorted by category, as Spec-Bench is, takes the first categories alone."""
    names = ["writing"] * 3 + ["coding"] * 3 + ["qa"] * 4 + ["rag"] * 1 + ["own"] * 2
    path = write(tmp_path, *({**GOOD, "question_id": at, "category": name} for at, name in enumerate(names)))
    chosen = [(prompt.question_id, prompt.category) for prompt in load_prompts(path, per_task=3).prompts]
    assert chosen == [
        (0, "writing"), (6, "qa"), (10, "rag"), (11, "own"),
        (3, "coding"), (7, "qa"), (12, "own"),
        (1, "writing"), (8, "qa"),
    ]  # fmt: skip
    fewer = {prompt.question_id for prompt in load_prompts(path, per_task=2).prompts}
    assert fewer == {0, 3, 6, 7, 10, 11, 12}
    assert [prompt.question_id for prompt in load_prompts(path, limit=2, per_task=3).prompts] == [0, 6]


def test_later_turns_can_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "turns": ["a", "b", "c"]})
    assert [load_prompts(path, turns=most).prompts[0].turns for most in (1, 2, None)] == [
        ("a",), ("a", "b"), ("a", "b", "c")
    ]  # fmt: skip
    assert load_prompts(path, turns=1).sha256 != load_prompts(path).sha256


def test_an_unknown_category_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        InputError, match=r"^prompts[.]categories='QA': builtin has no such category; it has "
    ) as caught:
        load_prompts(categories=["qa", "QA"])
    assert all(kind in caught.value.remedy for kind in KINDS)


def test_one_category_needs_no_brackets() -> None:
    """A bare name must not be taken letter by letter; no name at all is a mistake."""
    assert load_prompts(categories="qa") == load_prompts(categories=["qa"])
    with pytest.raises(InputError, match=r"^prompts[.]categories=\[\]"):
        load_prompts(categories=[])


def test_the_fingerprint_is_of_what_was_chosen(tmp_path: Path) -> None:
    path = write(tmp_path, {"turns": ["Wärme?"], "category": "qa", "question_id": 1})
    text = '[{"category":"qa","question_id":1,"turns":["Wärme?"]}]'
    assert load_prompts(path).sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert load_prompts(write(tmp_path, {**GOOD, "turns": ["Wärme?"], "extra": 1})).sha256 == load_prompts(path).sha256
    fingerprints = [
        load_prompts(limit=limit, categories=categories).sha256
        for limit, categories in [(None, None), (59, None), (10, ["qa"]), (10, ["rag"]), (10, ["qa", "rag"])]
    ]
    assert len(set(fingerprints)) == len(fingerprints)


# --- configuration ----------------------------------------------------------------------------------------------------


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        group = compose(overrides=[f"+prompts={overrides[0]}", *overrides[1:]])["prompts"]
    plain = OmegaConf.to_container(group)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


@pytest.mark.parametrize("option", ["default", "spec_bench", "humaneval", "gsm8k", "jsonl"])
def test_a_given_path_wins_with_every_option(option: str, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, {**GOOD, "question_id": 2})
    prompts = load_prompts(**composed(option, f"prompts.path='{path}'", "prompts.limit=1", "prompts.categories=[qa]"))
    assert (prompts.source, prompts.count) == (path, 1)


@pytest.mark.parametrize("option", ["spec_bench", "humaneval", "gsm8k", "jsonl"])
def test_an_option_that_needs_a_path_says_so(option: str) -> None:
    """The package's own prompts must not be run in place of a file that was not named."""
    with pytest.raises(InputError, match=r"^prompts[.]path="):
        load_prompts(**composed(option))


def test_the_default_option_is_the_packages_own_set() -> None:
    assert load_prompts(**composed("default")) == load_prompts()
