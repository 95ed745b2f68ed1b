"""Projections against hand-worked places, and predictions of made runs whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compared_runs import DEEP, QUICK, THREE, made_run

from specdec_lab.cost import VerifyCost, expected_emitted
from specdec_lab.predict.projection import (
    Drafting,
    Place,
    fitted_acceptance,
    measured_drafting,
    predict_here,
    project,
)
from specdec_lab.predict.roofline import Hardware, ModelShape

PLAIN = ModelShape(parameters=10**9, layers=1, kv_heads=1, head_dim=1, kv_bytes_per_entry=0)
MACHINE = Hardware(memory_bytes_per_second=2e12, flops_per_second=1e15, memory_bytes=10e9)
"""A forward reads 2 GB in 1 ms, and computes as long from 500 tokens on."""


def drafting(**changes: object) -> Drafting:
    facts = {
        "name": "made", "emitted_per_round": 2.0, "nodes_per_round": 5.0, "depth_per_round": 4.0, "draft_share": 0.0,
        "weight_share": 0.0,
        "host_seconds": 0.0, "model": False, "chain": True,
    }  # fmt: skip
    return Drafting(**{**facts, **changes})  # type: ignore[arg-type]


def place(**changes: object) -> Place:
    facts = {
        "hardware": MACHINE, "target": PLAIN, "draft": None, "batch_size": 1, "tokens": 0, "devices": 1,
        "overhead_seconds": 0.0,
    }  # fmt: skip
    return Place(**{**facts, **changes})  # type: ignore[arg-type]


def test_free_drafts_gain_their_acceptance_length():
    """Drafts without cost, verified in the time of one token."""
    found = project(drafting(), place())
    assert found["speedup"] == pytest.approx(2.0)
    assert found["baseline_ms"] == pytest.approx(1.0)
    assert found["tokens_per_second"] == pytest.approx(2000)


def test_a_head_keeps_its_measured_share_of_a_forward():
    """Drafting that took a fifth of the target's forward: rounds of 1.2 ms, however many forwards the head ran."""
    found = project(drafting(draft_share=0.2), place())
    assert found["cycle_ms"] == pytest.approx(1.2)
    assert found["break_even_acceptance_length"] == pytest.approx(1.2)
    assert found["speedup"] == pytest.approx(2 / 1.2)


def test_a_named_draft_model_takes_the_place_of_the_measured_one():
    """And only of strategies that draft with a model of their own."""
    small = PLAIN.model_copy(update={"parameters": 10**8})
    assert project(drafting(draft_share=2.0, model=True), place(draft=small))["cycle_ms"] == pytest.approx(1.4)
    assert project(drafting(draft_share=2.0), place(draft=small))["cycle_ms"] == pytest.approx(3.0)


def test_speculation_stops_paying_where_computing_bounds():
    """At 100 rows five nodes each are 500 tokens, the crossover; at 400 rows the round takes five times as long."""
    assert project(drafting(), place(batch_size=100))["speedup"] == pytest.approx(2.0)
    assert project(drafting(), place(batch_size=500))["speedup"] == pytest.approx(0.4)


def test_overhead_is_on_both_sides_and_host_time_grows_with_the_rows():
    """1 ms around a forward of 1 ms halves nothing; a lookup runs once for each row."""
    assert project(drafting(), place(overhead_seconds=1e-3))["speedup"] == pytest.approx(2.0)
    assert project(drafting(host_seconds=1e-4), place(batch_size=10))["cycle_ms"] == pytest.approx(2.0)


def test_devices_share_a_forward_and_are_counted_from_what_they_hold():
    """A model of 20 GB needs two of 10."""
    large = PLAIN.model_copy(update={"parameters": 10**10})
    found = project(drafting(), place(target=large, devices=None))
    assert found["devices"] == 2
    assert found["baseline_ms"] == pytest.approx(5.0)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.72, 0.99])
def test_acceptance_is_found_again(acceptance: float):
    """The inverse of the expected length; a chain that is always right is 1."""
    assert fitted_acceptance(expected_emitted(acceptance, 4.5), 4.5) == pytest.approx(acceptance, abs=1e-6)
    assert fitted_acceptance(5.0, 4) == 1.0
    assert all(fitted_acceptance((r + p) / r, p / r) == 1.0 for r in range(1, 80) for p in range(1, 80))  # by an ulp


def test_best_chain_is_the_best_of_all_lengths():
    """With drafts at a tenth and an acceptance of 0.8."""
    length = expected_emitted(0.8, 4)
    found = project(drafting(emitted_per_round=length, draft_share=0.4), place())
    speeds = {k: expected_emitted(0.8, k) / (1 + 0.1 * k) for k in range(1, 33)}
    assert found["best_chain_length"] == max(speeds, key=lambda k: speeds[k])
    assert found["best_chain_speedup"] == pytest.approx(max(speeds.values()), rel=1e-4)
    assert project(drafting(chain=False), place())["best_chain_length"] is None


def test_a_made_run_is_predicted_from_its_own_costs(tmp_path: Path):
    """Verify times of the made strategies, given as measured apart, foretell their speed-ups."""
    folder = made_run(tmp_path / "run", THREE)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    cost = VerifyCost({1: 30.0, 1 + QUICK.drafts: QUICK.cost["verify"], 1 + DEEP.drafts: DEEP.cost["verify"]})
    found = {one["strategy"]: one for one in predict_here(summary, rows, cost)}
    assert set(found) == {"ngram", "deep"}
    for one in found.values():
        assert one["predicted_over_measured"] == pytest.approx(1, abs=0.05)
    assert {one.name for one in measured_drafting(summary)} == {"ngram", "deep"}
