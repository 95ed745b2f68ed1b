"""Prompts through ``datasets``, from folders as the hub has them; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_lab.bench.prompts import Prompt, load_prompts
from specdec_lab.errors import InputError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")


def folder_of(tmp_path: Path, rows: list[dict], split: str = "test") -> str:
    folder = tmp_path / "questions"
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_known_shape_needs_no_column(tmp_path: Path):
    """Ids, categories and turns as a file of that shape has them."""
    rows = [
        {"question_id": 7, "category": "qa", "turns": ["a", "b"]},
        {"question_id": 9, "category": "x", "turns": ["c"]},
    ]
    found = load_prompts(dataset=folder_of(tmp_path, rows), split="test")
    assert found.prompts == (Prompt(7, "qa", ("a", "b")), Prompt(9, "x", ("c",)))
    assert found.source.endswith("questions/test")


@pytest.mark.parametrize(
    ("value", "turns"),
    [
        ("Why?", ("Why?",)),
        (["one", "two"], ("one", "two")),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], ("q",)),
        ([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "r"}], ("q", "r")),
    ],
)
def test_shapes_of_a_column(tmp_path: Path, value, turns: tuple[str, ...]):
    """A text, turns, or messages of either naming; answers are no prompts."""
    folder = folder_of(tmp_path, [{"text": value, "kind": "easy"}], "train")
    (found,) = load_prompts(dataset=folder, split="train", column="text", category="kind").prompts
    assert found == Prompt(1, "easy", turns)
    assert load_prompts(dataset=folder, split="train", column="text").prompts[0].category == "questions"
    assert load_prompts(dataset=folder, split="train", column="text", category="hard").prompts[0].category == "hard"


def test_limit_and_categories(tmp_path: Path):
    """Chosen as from a file, and in the fingerprint."""
    rows = [{"text": f"t{n}", "kind": "ab"[n % 2]} for n in range(6)]
    folder = folder_of(tmp_path, rows)
    found = load_prompts(dataset=folder, column="text", category="kind", categories=["b"], limit=2)
    assert [prompt.turns[0] for prompt in found.prompts] == ["t1", "t3"]
    assert found.sha256 != load_prompts(dataset=folder, column="text", category="kind").sha256


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, r"prompts.column=None: name the column of the prompts; there are text, kind"),
        ({"column": "body"}, r"prompts.column='body': there is no such column; there are text, kind"),
        ({"column": "text", "split": "validation"}, r"prompts.dataset=.*cannot be loaded"),
        ({"column": "kind"}, r"row 1, kind='7': give a text"),
        ({"column": "text", "path": "x.jsonl"}, r"prompts.path='x.jsonl': .*give one of the two"),
        ({"dataset": "???"}, r"prompts.dataset=None: give a hub id"),
        ({"dataset": "no-such-owner/no-such-set"}, r"prompts.dataset='no-such-owner/no-such-set': it cannot be loaded"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, sentence: str):
    """Before a model is loaded; the field, the value and the remedy."""
    from datasets import config

    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    folder = folder_of(tmp_path, [{"text": "t", "kind": 7}])
    with pytest.raises(InputError, match=sentence) as refused:
        load_prompts(**{"dataset": folder, **changes})
    assert "\n" not in str(refused.value)
