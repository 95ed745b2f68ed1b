"""Two strategies over the same requests, against values worked out by hand and against the benchmark's own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from compared_runs import THREE, made_run

from specdec_lab.bench.statistics import RequestKey
from specdec_lab.compare.entries import Entry, Measured, make_entries
from specdec_lab.compare.pairs import (
    exchange_p_value,
    log_ratio,
    prompt_sums,
    request_columns,
    shared_requests,
    statistics_of_pair,
)
from specdec_lab.compare.runs import read_runs


def entry(seconds: Mapping[int, float], *, baseline: Mapping[int, float] | None = None, run: int = 0) -> Entry:
    """One request of 10 tokens per question, in so many seconds."""
    texts: dict[RequestKey, tuple[int, ...]] = {(question, 0, 0): (1, question) for question in seconds}
    return Entry("any", run, {"name": "any"}, requests(seconds), requests(baseline or seconds), texts)


def requests(seconds: Mapping[int, float]) -> dict[RequestKey, Measured]:
    return {(question, 0, 0): Measured(10, value, "talk") for question, value in seconds.items()}


def statistics(first: Entry, second: Entry) -> dict:
    keys = shared_requests(first, second)
    return statistics_of_pair(request_columns(first, second, keys), [key[0] for key in keys], seed=0)


def test_both_averages_are_given_and_named():
    """Guards BM-07: 10 s to 2 s and 1 s to 1 s: mean of ratios 3.0, ratio of totals 3.67."""
    base = {1: 10.0, 2: 1.0}
    found = statistics(entry({1: 2.0, 2: 1.0}, baseline=base), entry(base))
    assert found["mean_of_ratios"] == pytest.approx(3.0)
    assert found["ratio_of_totals"] == pytest.approx(11 / 3)
    assert (found["prompts"], found["requests"]) == (2, 2)


def test_between_runs_each_speed_is_over_its_own_baseline():
    """A run on a machine that was twice as slow that day says the same; raw seconds would halve the speed."""
    first = entry({1: 4.0, 2: 6.0}, baseline={1: 8.0, 2: 12.0}, run=1)
    second = entry({1: 2.0, 2: 3.0}, baseline={1: 4.0, 2: 6.0})
    assert statistics(first, second)["ratio_of_totals"] == pytest.approx(1.0)
    assert statistics(first, entry({1: 4.0, 2: 6.0}))["ratio_of_totals"] == pytest.approx(2.0)


def test_against_the_baseline_of_a_run_it_is_the_summary_s_own_speed_up(tmp_path):
    """One number, one value: the ratios and the interval of a pair with the baseline are those of summary.json."""
    entries = make_entries(read_runs([made_run(tmp_path / "run", THREE)]))
    baseline, *others = entries
    for one in others:
        found, stated = statistics(one, baseline), one.numbers["speedup"]
        assert found["ratio_of_totals"] == pytest.approx(stated["ratio_of_totals"], rel=1e-12)
        assert found["mean_of_ratios"] == pytest.approx(stated["mean_of_ratios"], rel=1e-12)
        assert found["ci95"] == pytest.approx(stated["ci95"], rel=1e-9)


def test_no_spread_of_a_single_prompt():
    """Guards BM-08: turns and repeats of one prompt are one observation; it has a ratio, no interval and no p-value."""
    base: dict[RequestKey, Measured] = {(1, turn, 0): Measured(10, 4.0 + turn, "talk") for turn in range(3)}
    own = {key: Measured(10, 2.0, "talk") for key in base}
    texts: dict[RequestKey, tuple[int, ...]] = dict.fromkeys(base, (1,))
    first = Entry("a", 0, {"name": "a"}, own, base, texts)
    second = Entry("b", 0, {"name": "b"}, base, base, texts)
    found = statistics(first, second)
    assert found["ratio_of_totals"] == pytest.approx(15 / 6)
    assert (found["prompts"], found["requests"]) == (1, 3)
    assert found["ci95"] is None
    assert found["p_value"] is None


def test_nothing_in_common_is_undefined():
    """Null, not 1 and not NaN; and no error."""
    found = statistics(entry({1: 2.0}), entry({2: 2.0}))
    assert found["prompts"] == 0
    assert {found[name] for name in ("ratio_of_totals", "mean_of_ratios", "ci95", "p_value")} == {None}


def test_a_question_of_other_tokens_is_another_question():
    """Two prompt files, or chat templates, can give one id to two texts."""
    first, second = entry({1: 2.0, 2: 2.0}), entry({1: 2.0, 2: 2.0}, run=1)
    second = Entry("b", 1, second.numbers, second.requests, second.baseline, {(1, 0, 0): (1, 1), (2, 0, 0): (9, 9)})
    assert shared_requests(first, second) == [(1, 0, 0)]


def test_exchanges_of_few_prompts_are_all_tried():
    """Three prompts that all favour the first: 2 of 8 exchanges are as extreme, so nothing can be told from them."""
    first = entry({1: 1.0, 2: 1.0, 3: 1.0}, baseline=dict.fromkeys((1, 2, 3), 2.0))
    second = entry(dict.fromkeys((1, 2, 3), 2.0))
    assert statistics(first, second)["p_value"] == pytest.approx(2 / 8)
    assert statistics(first, first)["p_value"] == 1.0


def test_random_exchanges_agree_with_all_of_them(monkeypatch: pytest.MonkeyPatch):
    """With many prompts exchanges are drawn; the p-value is that of all exchanges within what drawing costs."""
    rng = np.random.default_rng(5)
    columns = rng.lognormal(0, 0.2, (8, 12))
    columns[1] *= 0.92
    every = exchange_p_value(columns, seed=0)
    monkeypatch.setattr("specdec_lab.compare.pairs.SWAPS", 4000)
    drawn = exchange_p_value(columns, seed=0)
    assert every != drawn
    assert drawn == pytest.approx(every, abs=4 * np.sqrt(every * (1 - every) / 4000))


def test_turns_and_repeats_are_summed_by_prompt():
    """Each prompt is one column, whatever the order of its requests."""
    columns = np.arange(1.0, 33.0).reshape(8, 4)
    sums = prompt_sums(columns, ["a", "b", "a", "b"])
    assert sums.shape == (8, 2)
    assert sums[0].tolist() == [1 + 3, 2 + 4]
    assert log_ratio(sums.sum(axis=1)) == pytest.approx(log_ratio(columns.sum(axis=1)))
