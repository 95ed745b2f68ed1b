"""Trees that are cut to what the time of a wider verify forward makes worth while, and how those times are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from oracles import decode
from scripted import PathsDrafter, context_of

from specdec_lab.cost import VerifyCost, bushy, measure_verify_cost, never_falling, paying_tree
from specdec_lab.decode import Request
from specdec_lab.drafters import sized as sized_module
from specdec_lab.drafters.hybrid import HybridDrafter, drafting_share
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.drafters.sized import SizedDrafter
from specdec_lab.errors import InputError
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree

GetTarget = Callable[..., Target]

FREE = {1: 1.0, 512: 1.0}


def test_the_target_is_measured_once(tiny_target: GetTarget, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    monkeypatch.setattr(
        sized_module, "measure_verify_cost", lambda target, most, rows: calls.append(most) or VerifyCost(FREE)
    )
    target = tiny_target()
    drafter = HybridDrafter(target, nodes=9)
    for _ in range(3):
        decode(target, drafter, [Request((5, 6, 5, 6), 5)])
    assert calls == [10]


def test_costs_between_and_beyond_measured_points():
    cost = VerifyCost({1: 30.0, 9: 70.0, 5: 40.0})
    assert [cost.of(nodes) for nodes in (1, 3, 5, 7, 9, 18)] == [30, 35, 40, 55, 70, 140]


def test_a_node_pays_by_the_time_of_the_whole_round():
    """Forwards of 10, 11, 12, 13 ms: without drafting 1.5 / 11 beats 1.62 / 12, with 10 ms of it 1.62 / 22 wins.

    Without it trees were cut as if their drafting took no time, which is spent whatever they offer.
    """
    cost = VerifyCost({1: 10.0, 4: 13.0})
    values = [0.5, 0.12, 0.05]
    assert cost.worth(values, 0.0) == 1
    assert cost.worth(values, 1.0) == 2
    assert cost.worth(values, 4.0) == 3
    assert cost.worth([], 1.0) == cost.worth([0.0, 0.0], 1.0) == 0
    parents, tokens = [-1, 0, 1, 2], [1, 2, 3, 4]
    assert len(paying_tree(tokens, parents, [1.0, *values], 9, cost, 1.0)) == 3
    assert len(paying_tree(tokens, parents, [1.0, *values], 9, cost, 0.0)) == 2
    assert len(paying_tree(tokens, parents, [1.0, 0.0, 0.0, 0.0], 9, cost, 0.0)) == 2


def test_a_tree_is_cut_with_the_drafting_of_its_strategy(tiny_target: GetTarget):
    """The share that a strategy states is the one by which its trees are cut."""
    drafter = Confident(tiny_target(), verify_ms={1: 10.0, 4: 13.0})
    sizes = []
    for drafter.draft_share in (0.0, 1.0, 4.0):
        sizes.append(len(drafter.cut([1, 2, 3, 4], [-1, 0, 1, 2], [1.0, 0.5, 0.12, 0.05], 9)))
    assert sizes == [2, 3, 4]


def test_a_hybrid_drafts_as_long_as_its_members(tiny_target: GetTarget):
    """Lookups take no time, so that the verify forward alone cuts their trees; networks run one after the other."""
    target = tiny_target()
    assert HybridDrafter(target, members=["ngram", "recycling"]).draft_share == 0 < Confident.draft_share
    assert drafting_share([NgramDrafter(target), Confident(target), Confident(target)]) == 2 * Confident.draft_share


def test_a_measured_cost_has_every_size(tiny_target: GetTarget):
    target = tiny_target()
    target.allocate(2, 40, 12)
    cost = measure_verify_cost(target, 12)
    assert cost is not None
    assert [nodes for nodes, _ in cost.points] == [1, 2, 4, 8, 12]
    assert all(time > 0 for _, time in cost.points)
    assert target.length(0) == 0


def test_a_cost_is_measured_within_the_cache(tiny_target: GetTarget):
    """A member that is wider than the hybrid, or prompts that all fail, left no room for the widest tree."""
    target = tiny_target()
    target.allocate(1, 4, 4)
    cost = measure_verify_cost(target, 500)
    assert cost is not None
    assert max(nodes for nodes, _ in cost.points) == target.cache.capacity - 1 < 500


def test_a_cost_is_that_of_all_rows_of_a_batch(tiny_target: GetTarget, monkeypatch: pytest.MonkeyPatch):
    """In a batch every row pays for its nodes; a forward of one row would say that they are cheap."""
    target = tiny_target()
    target.allocate(3, 40, 4)
    seen: list[tuple[int, ...]] = []
    forward = target.forward

    def watched(trees: Mapping[int, DraftTree], features: Sequence[int] = ()) -> Any:
        seen.append(tuple(len(trees[row]) for row in sorted(trees)))
        return forward(trees, features)

    monkeypatch.setattr(target, "forward", watched)
    assert measure_verify_cost(target, 4, rows=3, repeats=1) is not None
    assert seen == [(1, 1, 1), (2, 2, 2), (4, 4, 4)] * 2
    assert [target.length(row) for row in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("limit", "history", "expected"), [(None, 30, 30), (None, 200, 88), (64, 200, 61), (64, 9, 9)])
def test_a_cost_is_measured_behind_the_history_that_was_asked_for(
    limit: int | None, history: int, expected: int, tiny_target: GetTarget, monkeypatch: pytest.MonkeyPatch
):
    """As far as the cache goes and, where there is a last position, the deepest node still has one."""
    target = tiny_target()
    monkeypatch.setattr(Target, "max_length", property(lambda _: limit))
    target.allocate(1, 88, 12)
    lengths: list[int] = []
    prefill = target.prefill
    monkeypatch.setattr(target, "prefill", lambda row, ids: lengths.append(len(ids)) or prefill(row, ids))
    assert measure_verify_cost(target, 12, history, repeats=1) is not None
    assert lengths == [expected]
    if limit is not None:
        assert expected + bushy(12, 8).depth < limit


def test_a_slow_moment_is_no_step_in_the_cost():
    """One disturbed size would cut every tree below it: 8 nodes do not take five times as long as 16."""
    disturbed = {1: 1.09, 2: 1.06, 4: 1.04, 8: 5.22, 16: 1.24, 17: 1.20}
    assert never_falling(disturbed) == {1: 1.04, 2: 1.04, 4: 1.04, 8: 1.20, 16: 1.20, 17: 1.20}
    steps = {1: 10.0, 2: 16.0, 4: 16.0, 8: 20.0}
    assert never_falling(steps) == steps


def test_a_cache_without_room_for_two_nodes_measures_nothing(tiny_target: GetTarget):
    target = tiny_target()
    target.allocate(1, 1, 1)
    assert measure_verify_cost(target, 1) is None


class Confident(SizedDrafter):
    """Offers nothing; there to be sized."""

    def __init__(self, target: Target, *, verify_ms: Mapping[int, float] | None = None, sized: bool = True) -> None:
        super().__init__(target, max_nodes=5, verify_ms=verify_ms, sized=sized)

    def propose(self, context: Any) -> DraftTree:
        return PathsDrafter(self.target, []).propose(context)


def test_stated_times_stay_and_static_trees_want_none(tiny_target: GetTarget):
    target, other = tiny_target(), VerifyCost({1: 1.0, 2: 9.0})
    for drafter, waits in ((Confident(target), True), (Confident(target, verify_ms=FREE), False)):
        assert drafter.awaits_cost == waits
        drafter.size_by(other)
        assert (drafter.verify_cost is other) == waits
    static = Confident(target, sized=False)
    static.size_by(other)
    static.allocate(1, 9)
    assert static.verify_cost is None


def test_members_of_a_hybrid_are_sized_with_it(tiny_target: GetTarget):
    """One measurement for all, and what a hybrid is told holds within it."""
    target = tiny_target()
    drafter, member = HybridDrafter(target, members=["ngram"]), Confident(target)
    drafter.members.append(member)
    cost = VerifyCost(FREE)
    drafter.size_by(cost)
    assert drafter.verify_cost is cost
    assert member.verify_cost is cost
    assert not isinstance(drafter.members[0], SizedDrafter)
    assert drafter.propose(context_of([9, 8])).tokens[0] == 8


@pytest.mark.parametrize("verify_ms", [{}, {2: 5.0}, {1: 35.0}, {1: 0.0, 2: 1.0}, {0: 1.0, 1: 1.0}, {1: -1.0, 2: 1.0}])
def test_times_that_say_nothing_are_refused(verify_ms: dict[int, float]):
    """One point would make every further node cost a whole forward, and cut every tree without a word."""
    with pytest.raises(InputError, match="of 1 node and of more"):
        VerifyCost(verify_ms)
