"""Where a round's time goes, and Spec-Bench's numbers, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compared_runs import THREE, made_run

from specdec_lab.compare.comparison import compare
from specdec_lab.compare.ledger import budget, explanations, ledger
from specdec_lab.compare.spec_bench import spec_bench_numbers


def numbers(rounds: int, nodes: int, tau: float, **seconds: float) -> dict[str, Any]:
    times = {"prefill": 9.0, **dict.fromkeys(("draft", "verify", "accept", "commit", "other"), 0.0), **seconds}
    return {
        "rounds": rounds,
        "proposed_nodes": nodes,
        "mean_acceptance_length": tau,
        "time_seconds": {**times, "total": sum(times.values())},
    }


def test_ledger_by_hand():
    """Guards BM-07: 100 rounds of 60 ms with 4 extra nodes against 200 rounds of 40 ms.

    Break-even is 60 / 40 = 1.5 tokens; the forward takes 10 ms more for 4 nodes; 1.8 tokens a round give 1.2 times.
    The prefill is in no round.
    """
    base = numbers(200, 0, 1.0, verify=7.0, other=1.0)
    found = ledger(numbers(100, 400, 1.8, draft=0.5, verify=4.5, accept=0.5, commit=0.2, other=0.3), base)
    assert found["round_parts_ms"] == pytest.approx({"draft": 5, "verify": 45, "accept": 5, "commit": 2, "other": 3})
    assert found["cycle_ms"] == pytest.approx(60)
    assert found["baseline_cycle_ms"] == pytest.approx(40)
    assert found["nodes_per_round"] == pytest.approx(5)
    assert found["extra_verify_ms"] == pytest.approx(10)
    assert found["extra_node_ms"] == pytest.approx(2.5)
    assert found["break_even_acceptance_length"] == pytest.approx(1.5)
    assert found["predicted_speedup"] == pytest.approx(1.2)


def test_the_baseline_breaks_even_at_one_token():
    """And it has no extra node, whose cost is therefore undefined, not 0."""
    base = numbers(200, 0, 1.0, verify=7.0, other=1.0)
    found = ledger(base, base)
    assert found["break_even_acceptance_length"] == 1.0
    assert found["predicted_speedup"] == 1.0
    assert found["extra_node_ms"] is None


def test_without_a_round_nothing_is_defined():
    """A strategy all of whose requests failed: null throughout, but for what a round of the baseline takes."""
    nothing = {"rounds": 0, "proposed_nodes": 0, "mean_acceptance_length": None, "time_seconds": None}
    found = ledger(nothing, numbers(200, 0, 1.0, verify=7.0))
    assert found.pop("baseline_cycle_ms") == pytest.approx(35.0)
    assert set(found.values()) == {None}


def test_prediction_is_the_measured_ratio_where_nothing_failed(tmp_path: Path):
    """Acceptance length times the baseline's round over the round: the same times, so the same number."""
    for entry in compare([made_run(tmp_path / "run", THREE)]).entries:
        measured = entry["numbers"]["speedup"]["ratio_of_totals"]
        assert entry["ledger"]["predicted_speedup"] == pytest.approx(measured, rel=1e-9)


def test_more_accepted_yet_slower_is_explained(tmp_path: Path):
    """Guards BM-07: the sentence names both lengths, both rounds and the dearest parts; other pairs get none."""
    comparison = compare([made_run(tmp_path / "run", THREE)])
    by_label = {entry["label"]: entry for entry in comparison.entries}
    deep, ngram = (by_label[name]["numbers"] for name in ("deep", "ngram"))
    assert deep["mean_acceptance_length"] > ngram["mean_acceptance_length"]
    assert deep["decode_tokens_per_second"] < ngram["decode_tokens_per_second"]
    sentences = [sentence for sentence in comparison.explanations if "than ngram" in sentence]
    (sentence,) = sentences
    assert sentence.startswith("deep emits more per round than ngram (")
    assert "verify +" in sentence
    assert "draft +" in sentence
    assert not [one for one in comparison.explanations if one.startswith(("ngram", "autoregressive"))]


def test_nothing_is_explained_without_a_verdict():
    """A difference that cannot be told needs no reason."""
    pair = {"first": "a", "second": "b", "verdict": "cannot tell"}
    assert explanations([{"label": "a"}, {"label": "b"}], [pair]) == []


def test_budget_is_the_largest_tree():
    """Of any round of any request, root included; null without rows, 1 for a strategy that drafts nothing."""
    weights = {"memory_bytes": {"draft_weights": 7}, "draft_training_tokens": 11}
    rows = [{"proposed_nodes_per_round": [0, 3]}, {"proposed_nodes_per_round": [5]}, {"proposed_nodes_per_round": []}]
    assert budget(rows, weights) == {"nodes": 6, "draft_weights": 7, "training_tokens": 11}
    assert budget([{"proposed_nodes_per_round": [0]}], weights)["nodes"] == 1
    assert budget([], weights)["nodes"] is None


# --- Spec-Bench ------------------------------------------------------------------------------------------------------


def answer(question: int, category: str, tokens: int, seconds: float, accepted: list[int], turn: int = 0) -> dict:
    return {
        "question_id": question,
        "category": category,
        "turn": turn,
        "repeat": 0,
        "output_ids": list(range(tokens)),
        "accepted_per_round": accepted,
        "bonus_per_round": [1] * len(accepted),
        "time_seconds": {"prefill": 1.0, "total": seconds},
    }


def test_spec_bench_by_hand():
    """Guards BM-07: a question's rate sums its turns; the mean is over questions, of rates, prefill included.

    10 + 10 tokens in 2 + 3 s are 4 a second, 30 in 3 s are 10: the mean is 7, where all tokens over all seconds would
    be 6.25. The baseline's 2 and 5 give 3.5. Rounds emit 2, 1, 3 tokens: 2 on average.
    """
    mine = [
        answer(81, "writing", 10, 2.0, [1]),
        answer(81, "writing", 10, 3.0, [0], turn=1),
        answer(321, "qa", 30, 3.0, [2]),
    ]
    base = [
        answer(81, "writing", 10, 5.0, [0]),
        answer(81, "writing", 10, 5.0, [0], turn=1),
        answer(321, "qa", 30, 6.0, [0]),
    ]
    found = spec_bench_numbers(mine, base)
    assert found["questions"] == 2
    assert found["tokens_per_second"] == pytest.approx(7.0)
    assert found["speedup"] == pytest.approx(7.0 / 3.5)
    assert found["mean_accepted_tokens"] == pytest.approx(2.0)
    assert list(found["by_task"]) == ["mt_bench", "qa"]
    assert found["by_task"]["mt_bench"]["tokens_per_second"] == pytest.approx(4.0)
    assert found["by_task"]["qa"]["speedup"] == pytest.approx(2.0)


def test_spec_bench_needs_both_answers():
    """A question with a turn that failed on one side takes no part on either; of none nothing is defined."""
    mine = [answer(81, "qa", 10, 2.0, [1]), answer(82, "qa", 10, 2.0, [1]), answer(82, "qa", 10, 2.0, [1], turn=1)]
    base = [answer(81, "qa", 10, 4.0, [0]), answer(82, "qa", 10, 1.0, [0])]
    found = spec_bench_numbers(mine, base)
    assert (found["questions"], found["speedup"]) == (1, pytest.approx(2.0))
    nothing = spec_bench_numbers(mine, [])
    assert nothing == {
        "questions": 0, "tokens_per_second": None, "speedup": None, "mean_accepted_tokens": None, "by_task": {},
    }  # fmt: skip


def test_sub_tasks_are_spec_bench_s_or_none():
    """Other prompts have no sub-tasks of that benchmark, only its overall numbers."""
    rows = [answer(1, "talk", 10, 2.0, [1])]
    assert spec_bench_numbers(rows, rows)["by_task"] == {}
