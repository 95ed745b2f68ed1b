"""Speed-ups against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdec_lab.bench.statistics import DECODE, END_TO_END, paired, speedup


def timed(question_id: int, seconds: float, *, tokens: int = 10, turn: int = 0, status: str = "ok") -> dict[str, Any]:
    """A row that decodes ``tokens`` tokens in ``seconds``, after a prefill of 1 s."""
    return {
        "strategy": "any",
        "question_id": question_id,
        "turn": turn,
        "repeat": 0,
        "status": status,
        "output_ids": list(range(tokens + 1)),
        "accepted_per_round": [0] * tokens,
        "bonus_per_round": [1] * tokens,
        "time_seconds": {"prefill": 1.0, "total": 1.0 + seconds},
    }


def test_both_averages_are_given_and_named():
    """Guards BM-07: 10 s to 2 s and 1 s to 1 s: mean of ratios 3.0, ratio of totals 3.67."""
    pairs = paired([timed(1, 2), timed(2, 1)], [timed(1, 10), timed(2, 1)])
    found = speedup(pairs, DECODE, "autoregressive", seed=0)
    assert found["mean_of_ratios"] == pytest.approx(3.0)
    assert found["ratio_of_totals"] == pytest.approx(11 / 3)
    assert found["baseline"] == "autoregressive"
    assert speedup(pairs, END_TO_END, "autoregressive", seed=0)["ratio_of_totals"] == pytest.approx(13 / 5)


def test_interval_holds_the_ratio_and_is_reproducible():
    """The bootstrap is seeded; its interval lies between the smallest and the largest ratio of a prompt."""
    pairs = paired([timed(i, 1 + i) for i in range(8)], [timed(i, 2 * (1 + i) + i % 3) for i in range(8)])
    found = speedup(pairs, DECODE, "autoregressive", seed=3)
    low, high = found["ci95"]
    assert 2.0 <= low < found["ratio_of_totals"] < high <= 3.0
    assert found == speedup(pairs, DECODE, "autoregressive", seed=3)


def test_no_spread_of_a_single_prompt():
    """Guards BM-08: one prompt with two turns is one observation, so it has no interval; never a spread of 0."""
    rows = [timed(1, 2), timed(1, 3, turn=1)]
    found = speedup(paired(rows, [timed(1, 4), timed(1, 5, turn=1)]), DECODE, "autoregressive", seed=0)
    assert found["ratio_of_totals"] == pytest.approx(9 / 5)
    assert found["ci95"] is None


def test_equal_prompts_give_a_defined_interval():
    """No NaN where every resample gives the same ratio."""
    found = speedup(paired([timed(i, 1) for i in range(3)], [timed(i, 2) for i in range(3)]), DECODE, "b", seed=0)
    assert found["ci95"] == pytest.approx([2.0, 2.0])
    assert not any(math.isnan(value) for value in found["ci95"])


def test_failed_requests_are_left_out_on_both_sides():
    """A request that failed on one side must not enter the other side's total either."""
    rows = [timed(1, 2), timed(2, 100), timed(3, 100, status="failed")]
    baseline = [timed(1, 4), timed(2, 5, status="failed"), timed(3, 6)]
    pairs = paired(rows, baseline)
    assert [pair[0]["question_id"] for pair in pairs] == [1]
    assert speedup(pairs, DECODE, "b", seed=0)["ratio_of_totals"] == pytest.approx(2.0)


def test_undefined_without_anything_to_compare():
    """No pair, or answers of one token, which have no decode rate: null, not 1 and not NaN."""
    nothing = {"ratio_of_totals": None, "mean_of_ratios": None, "ci95": None, "baseline": "b"}
    assert speedup([], DECODE, "b", seed=0) == nothing
    single = paired([timed(1, 0, tokens=0)], [timed(1, 0, tokens=0)])
    assert speedup(single, DECODE, "b", seed=0) == nothing
    assert speedup(single, END_TO_END, "b", seed=0)["ratio_of_totals"] == 1.0
