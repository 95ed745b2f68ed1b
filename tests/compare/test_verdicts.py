"""Verdicts: seldom wrong where there is nothing to tell, mostly right where there is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from specdec_lab.bench.statistics import RequestKey
from specdec_lab.compare.comparable import Difference
from specdec_lab.compare.entries import Entry, Measured
from specdec_lab.compare.verdicts import all_pairs, holm, verdict

PROMPTS = 40


def noisy_run(speeds: Mapping[str, float], rng: np.random.Generator, run: int = 0, drift: float = 0.0) -> list[Entry]:
    """Entries of a run whose strategies are so many times as fast as its baseline, with the noise of a real machine.

    Prompts differ in length and in how well a strategy does on them; the machine wanders slowly during the run, single
    requests vary, and now and then something else runs for a while.

    Args:
        drift: logarithm of how much slower the whole run is.
    """
    tokens = np.random.default_rng(1).integers(20, 64, PROMPTS)
    texts: dict[RequestKey, tuple[int, ...]] = {(prompt, 0, 0): (1, prompt) for prompt in range(PROMPTS)}
    wander = np.cumsum(rng.normal(0, 0.01, PROMPTS))
    requests: dict[str, dict[tuple[Hashable, int, int], Measured]] = {}
    for name, speed in {"autoregressive": 1.0, **speeds}.items():
        suits = np.random.default_rng(2).normal(0, 0.2 if speed != 1 else 0, PROMPTS)  # the same in every run
        noise = rng.normal(0, 0.03, PROMPTS) + (rng.random(PROMPTS) < 0.05) * rng.exponential(0.1, PROMPTS)
        seconds = 0.03 * tokens * np.exp(drift + wander + noise - suits) / speed
        requests[name] = {
            (prompt, 0, 0): Measured(int(tokens[prompt]), float(seconds[prompt]), "talk") for prompt in range(PROMPTS)
        }
    facts = {name: {"name": name, "lossless": True} for name in requests}
    return [
        Entry(f"{name} {run}", run, facts[name], requests[name], requests["autoregressive"], texts) for name in requests
    ]


def judged(entries: list[Entry], differences: tuple[Difference, ...] = ()) -> list[dict[str, Any]]:
    return all_pairs(entries, differences, seed=0)


def test_a_strategy_against_itself_cannot_be_told():
    """Two runs of one strategy, on a machine that was 5 % slower the second time: at most 5 % of verdicts are wrong."""
    rng, trials, told = np.random.default_rng(0), 200, 0
    for _ in range(trials):
        first, second = noisy_run({"ngram": 1.4}, rng), noisy_run({"ngram": 1.4}, rng, run=1, drift=rng.normal(0, 0.05))
        (pair,) = (one for one in judged([first[1], second[1]]))
        told += pair["verdict"] != "cannot tell"
    assert told <= 0.05 * trials


def test_equal_strategies_of_one_run_cannot_be_told():
    """Three strategies as fast as the baseline make six pairs; even one wrong verdict among them is rare."""
    rng, trials, told = np.random.default_rng(1), 40, 0
    for _ in range(trials):
        pairs = judged(noisy_run(dict.fromkeys("abc", 1.0), rng))
        assert len(pairs) == 6
        told += any(pair["verdict"] != "cannot tell" for pair in pairs)
    assert told <= 0.05 * trials


def test_a_real_difference_is_told():
    """A test that never tells anything would pass the two above: a tenth more speed is seen nearly always."""
    rng, trials, right = np.random.default_rng(2), 40, 0
    for _ in range(trials):
        pairs = judged(noisy_run({"slow": 1.4, "fast": 1.54}, rng))
        named = {(pair["first"], pair["second"]): pair["verdict"] for pair in pairs}
        right += named["fast 0", "slow 0"] == "faster" and named["slow 0", "autoregressive 0"] == "faster"
    assert right >= 0.95 * trials


def test_a_slower_strategy_is_called_slower():
    """The direction: a strategy that loses to the baseline is slower than it, which is second in its pairs."""
    (pair,) = judged(noisy_run({"bad": 0.8}, np.random.default_rng(3)))
    assert (pair["first"], pair["second"], pair["verdict"]) == ("bad 0", "autoregressive 0", "slower")
    assert pair["ratio_of_totals"] < 1


def test_a_baseline_is_no_pair_with_what_other_runs_did():
    """Each speed is relative to its own baseline already, and Holm counts every pair: copies would cost certainty."""
    rng = np.random.default_rng(4)
    pairs = judged([*noisy_run({"a": 1.2}, rng), *noisy_run({"a": 1.2}, rng, run=1)])
    names = {(pair["first"], pair["second"]) for pair in pairs}
    assert names == {("a 0", "autoregressive 0"), ("a 1", "autoregressive 1"), ("a 1", "a 0")}


def test_holm_by_hand():
    """0.01 x 4, 0.02 x 3, 0.03 x 2, 0.2 x 1, never falling; an undefined one is no test."""
    assert holm([0.02, None, 0.2, 0.01, 0.03]) == pytest.approx([0.06, None, 0.2, 0.04, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_is_stricter_than_controlling_the_rate():
    """Against scipy's correction for the rate of false discoveries, which has to be the smaller at every place."""
    values = list(np.random.default_rng(0).uniform(0, 0.2, 20))
    corrected = holm(values)
    assert all(mine >= theirs - 1e-12 for mine, theirs in zip(corrected, false_discovery_control(values), strict=True))  # type: ignore[operator]
    assert min(value for value in corrected if value is not None) == pytest.approx(20 * min(values))


DRIFT = ("cannot tell", "the runs' baselines differ as much")
BASE = {"prompts": 30, "p_corrected": 0.01, "ci95": [1.1, 1.3], "ratio_of_totals": 1.2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("faster", None)),
        ({"ci95": [0.7, 0.9], "ratio_of_totals": 0.8}, ("slower", None)),
        ({"prompts": 0}, ("cannot tell", "no request in common")),
        ({"prompts": 5}, ("cannot tell", "too few prompts")),
        ({"prompts": 6}, ("faster", None)),
        ({"p_corrected": None, "ci95": None}, ("cannot tell", "one prompt")),
        ({"p_corrected": 0.051}, ("cannot tell", "within the noise")),
        ({"ci95": [1.004, 1.3]}, ("cannot tell", "the interval holds 1")),
        ({"baseline_ratio": 1.25}, DRIFT),
        ({"baseline_ratio": 0.8}, DRIFT),
        ({"baseline_ratio": 1.1}, ("faster", None)),
        ({"baseline_ratio": 5.0, "unlike": ["machine"]}, ("faster", None)),
        ({"baseline_ratio": 5.0, "unlike": ["git_sha", "lossless"]}, DRIFT),
    ],
)  # fmt: skip
def test_why_nothing_is_told(changes: dict[str, Any], expected: tuple[str, str | None]):
    """A verdict is that of the numbers shown, and a reason stands where there is none."""
    assert verdict({"baseline_ratio": None, "unlike": [], **BASE, **changes}) == expected


def test_what_else_differs_is_named():
    """Guards BM-07: a pair of runs that differ, or of a lossy and a lossless strategy, says so."""
    rng = np.random.default_rng(5)
    first, second = noisy_run({"a": 1.3}, rng), noisy_run({"a": 1.3}, rng, run=1)
    lossy = Entry("l", 1, {"name": "a", "lossless": False}, second[1].requests, second[1].baseline, second[1].texts)
    difference = Difference("dtype", "", True, ("float32", "bfloat16"))
    (pair,) = judged([first[1], lossy], (difference,))
    assert pair["unlike"] == ["dtype", "lossless"]
    (inside,) = judged(first, (difference,))
    assert inside["unlike"] == []
