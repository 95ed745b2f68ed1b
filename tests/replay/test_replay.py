"""Replays against texts whose every token is known, and against the engine."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script_runs import run_script

from specdec_lab.replay.scoring import Replayed, calibration, disagreement, nodes_on_text, numbers
from specdec_lab.tree import DraftTree, chain

ROOT = Path(__file__).parents[2]
TREE = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 2, 2, 4), confidence=(1.0, 0.3, 0.6, 0.1, 0.4, 0.2))
"""Root 9; children 1 and 2; below 2: 3 and 4; below 4: 5."""


@pytest.mark.parametrize(
    ("following", "nodes"),
    [
        ((7, 4), {0}),
        ((1, 3), {0, 1}),
        ((2, 4, 5, 6), {0, 2, 4, 5}),
        ((2, 4), {0, 2, 4}),
        ((2, 7, 5), {0, 2}),
        ((), {0}),
    ],
)
def test_nodes_on_the_text(following: tuple[int, ...], nodes: set[int]):
    """A path ends at the first token that is another, and at the end of the text."""
    assert nodes_on_text(TREE, following) == nodes


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), max_size=8))
def test_a_chain_is_accepted_as_far_as_it_agrees(drafts: list[int], following: list[int]):
    """Against the plain definition."""
    agreed = 0
    while agreed < min(len(drafts), len(following)) and drafts[agreed] == following[agreed]:
        agreed += 1
    assert len(nodes_on_text(chain(0, drafts), following)) == agreed + 1


def test_numbers_by_hand():
    """Two positions: 2 -> 4 is right and 5 is not, then nothing is."""
    found = Replayed()
    found.add(TREE, (2, 4, 8), "qa")
    found.add(TREE, (8,), "rag")
    made = numbers(found)
    assert made["positions"] == 2
    assert made["mean_accepted_drafts"] == 1.0
    assert made["mean_nodes"] == 5
    assert made["acceptance_by_depth"] == {
        "offered": [2, 2, 2],
        "joint": [0.5, 0.5, 0.0],
        "conditional": [0.5, 1.0, 0.0],
    }
    assert made["acceptance_by_rank"] == [[0.0, 0.5], [0.0, 1.0], [0.0]]
    assert made["by_category"] == {"qa": 2.0, "rag": 0.0}


def test_calibration_by_hand():
    """Of two nodes at 0.9 one is right; one at 0.1 is wrong; 1.0 belongs to the last bin."""
    found = calibration([(0.92, True), (0.94, False), (0.11, False), (1.0, True)])
    assert [(one["nodes"], one["share_right"]) for one in found] == [(1, 0.0), (3, pytest.approx(2 / 3))]
    assert found[1]["mean_confidence"] == pytest.approx(0.95333, abs=1e-4)


def test_disagreement_by_hand():
    """Of four positions a has the next token at two, b at one of them and at another one, and none at the last."""
    a = Replayed(accepted=[2, 1, 0, 0])
    b = Replayed(accepted=[1, 0, 3, 0])
    found = disagreement({"a": a, "b": b})
    assert found["first_right_alone"] == {"a": {"b": 0.25}, "b": {"a": 0.25}}
    assert (found["any_right"], found["none_right"], found["best_of_all"]) == (0.75, 0.25, 1.5)


TINY = ("target=tiny", "target.device=cpu", "prompts.limit=3", "max_new_tokens=24", "hydra.run.dir=run")


@pytest.mark.slow
def test_from_a_run_to_a_replay(tmp_path: Path):
    """Both commands; a draft model that is the target is always right; what a recording lacks is named."""
    from specdec_lab.targets.tiny import load_tiny

    target = load_tiny(device="cpu")
    target.model.save_pretrained(tmp_path / "same")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(tmp_path / "same")
    done = run_script(tmp_path, "benchmark.py", *TINY, "strategies=[ngram]")
    assert done.returncode == 0, done.stderr
    done = run_script(tmp_path, "record.py", "run=run", "strategies=[ngram]", "hydra.run.dir=recording")
    assert done.returncode == 0, done.stderr
    assert "4 texts" in done.stdout  # the first prompt has two turns
    words = ("recording=recording", "strategies=[ngram,recycling,draft_model]", "drafter.draft_model.model=same")
    done = run_script(tmp_path, "replay.py", *words, "drafter.draft_model.k=3", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out" / "replay.json").read_text())
    found = document["strategies"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    answers = [row["output_ids"] for row in rows if row["strategy"] == "autoregressive"]
    assert {one["positions"] for one in found.values()} == {sum(len(ids) - 1 for ids in answers)}
    assert set(found["draft_model"]["acceptance_by_depth"]["conditional"]) == {1.0}
    assert document["disagreement"]["none_right"] == 0
    lines = list(csv.DictReader((tmp_path / "out" / "replay.csv").open()))
    assert [float(line["mean_accepted_drafts"]) for line in lines] == [
        one["mean_accepted_drafts"] for one in found.values()
    ]
    assert "<svg" in (tmp_path / "out" / "replay.svg").read_text()
    done = run_script(tmp_path, "replay.py", "recording=recording", "stride=3", "limit=2", "hydra.run.dir=all")
    assert done.returncode == 0, done.stderr  # every strategy whose needs are met, hybrid with its measured costs too
    found = json.loads((tmp_path / "all" / "replay.json").read_text())["strategies"]
    assert {"ngram", "lookahead", "recycling", "hybrid"} <= set(found)
    assert {one["positions"] for one in found.values()} == {sum(-(-(len(ids) - 1) // 3) for ids in answers[:2])}
    done = run_script(tmp_path, "record.py", "run=run", "layers=[99]", "hydra.run.dir=recording", "overwrite=true")
    assert done.returncode == 1
    assert "layers=99" in done.stderr
    done = run_script(tmp_path, "record.py", "run=run", "strategies=[ngram]", "hydra.run.dir=recording")
    assert done.returncode == 1
    assert "overwrite=true" in done.stderr
    for words, sentence in (
        (("recording=run",), "holds no recording.json"),
        (("recording=recording", "strategies=[autoregressive]"), "name at least one that drafts"),
        ((), "recording=None"),
    ):
        done = run_script(tmp_path, "replay.py", *words, "hydra.run.dir=other")
        assert done.returncode == 1
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
