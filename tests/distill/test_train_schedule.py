"""The plan of a training is a pure function: every example once per epoch, one learning rate per step."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_lab.distill.schedule import (
    derived_seed,
    epoch_order,
    groups_in_epoch,
    learning_rate,
    planned_steps,
    rank_slices,
    step_examples,
)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_visits_every_example_once(examples: int, group_size: int, epoch: int):
    """Guards TD-05: an incomplete last group is a step too, and nothing is dropped or seen twice."""
    order = epoch_order(examples, 7, epoch)
    groups = groups_in_epoch(examples, group_size)
    steps = range(epoch * groups, (epoch + 1) * groups)
    visited = [index for step in steps for index in step_examples(order, step, group_size)]
    assert visited == list(order)
    assert sorted(visited) == list(range(examples))


def test_epochs_differ_and_repeat_themselves():
    """Guards TD-04: the second epoch is not the first one again, and a plan made anew is the same plan."""
    orders = [epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6
    assert epoch_order(50, 1, 2) == orders[-1]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_micro_batches_share_out_a_group(lengths: list[int], batch_size: int, processes: int):
    """Every example goes to one process; all have as many micro-batches, none of which is too large."""
    group = list(range(len(lengths)))
    shares = [rank_slices(group, lengths, batch_size, processes, rank) for rank in range(processes)]
    assert sorted(itertools.chain(*itertools.chain(*shares))) == group
    assert {len(share) for share in shares} == {math.ceil(len(group) / (batch_size * processes))}
    assert max(len(micro) for micro in itertools.chain(*shares)) <= batch_size


def test_micro_batches_hold_texts_of_like_length():
    """Padding is what a group's longest text costs all others; sorted, it costs only its neighbours."""
    assert rank_slices([0, 1, 2, 3], [9, 2, 8, 3], 2, 1, 0) == [(0, 2), (3, 1)]
    assert rank_slices([0, 1, 2, 3], [9, 2, 8, 3], 1, 2, 1) == [(2,), (1,)]


@pytest.mark.parametrize(("accumulation", "processes"), [(1, 4), (2, 2), (4, 1)])
def test_steps_count_optimizer_steps(accumulation: int, processes: int):
    """Guards TD-05: neither accumulation nor processes change how many steps there are, so no learning rate either."""
    group_size = 2 * accumulation * processes
    assert group_size == 8
    assert planned_steps(21, group_size, epochs=3, max_steps=None) == 9  # 8 + 8 + 5 examples per epoch
    assert planned_steps(21, group_size, epochs=3, max_steps=4) == 4
    assert planned_steps(21, group_size, epochs=3, max_steps=40) == 9


def test_learning_rates_by_hand():
    """Warm-up in equal parts, then cosine or a line down to the floor, or nothing."""

    def rates(shape, floor=0.0):
        return [learning_rate(step, 10, 1.0, shape, 2, floor) for step in range(10)]

    assert rates("constant") == [0.5] + [1.0] * 9
    assert rates("linear")[:4] == pytest.approx([0.5, 1, 1, 7 / 8])
    assert rates("linear")[-1] == pytest.approx(1 / 8)
    assert rates("linear", floor=0.2)[6] == pytest.approx(0.6)
    assert rates("cosine")[6] == pytest.approx(0.5)
    assert rates("cosine")[4] == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert rates("cosine", floor=0.5)[6] == pytest.approx(0.75)
    assert learning_rate(0, 1, 3.0, "cosine", 0, 0.0) == 3.0
    assert learning_rate(1, 2, 1.0, "linear", 100, 0.0) == pytest.approx(0.02)


def test_seeds_differ_with_every_part():
    """Parts that read alike when put together give other seeds."""
    seeds = [derived_seed(1, 23), derived_seed(12, 3), derived_seed("step", 1), derived_seed("epoch", 1)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
