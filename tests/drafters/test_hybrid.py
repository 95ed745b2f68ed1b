"""The hybrid: which nodes of its members it takes, and what it learns about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oracles import decode, naive_answers
from scripted import PathsDrafter, RandomTreeDrafter, context_of

from specdec_lab.decode import Request
from specdec_lab.drafters.hybrid import HybridDrafter, _Yield, path_texts
from specdec_lab.errors import InputError
from specdec_lab.target import Target
from specdec_lab.tree import from_paths

GetTarget = Callable[..., Target]


def hybrid(target: Target, *members: Any, **settings: Any) -> HybridDrafter:
    drafter = HybridDrafter(target, members={"autoregressive": {}}, **settings)
    drafter.members = list(members)
    return drafter


def test_the_union_holds_each_path_once(tiny_target: GetTarget):
    """Guards TR-07: what two members propose is one node, worth more."""
    target = tiny_target()
    drafter = hybrid(target, PathsDrafter(target, [[1, 2]]), PathsDrafter(target, [[1, 3], [4]]), min_value=0.0)
    tree = drafter.propose(context_of([9, 8]))
    assert set(path_texts(tree)[1:]) == {(1,), (1, 2), (1, 3), (4,)}
    assert tree.tokens[1] == 1, "proposed by both, so the best"


def test_the_budget_keeps_the_best_and_their_ancestors(tiny_target: GetTarget):
    """Guards TR-08: closed under ancestors whatever the yields are."""
    target = tiny_target()
    for nodes in range(1, 7):
        drafter = hybrid(
            target, PathsDrafter(target, [[1, 2, 3]]), PathsDrafter(target, [[5, 6, 7]]), nodes=nodes, min_value=0.0
        )
        context = context_of([9, 8])
        drafter.propose(context)
        context.state.yields[0].right = {1: 0.0, 2: 9.0, 3: 30.0}
        context.state.yields[0].offered = {1: 30.0, 2: 30.0, 3: 30.0}
        tree = drafter._union(context.state, context.state.trees)
        assert len(tree) == nodes + 1
        texts = set(path_texts(tree))
        assert all(text[:-1] in texts for text in texts if text)


def test_a_member_that_is_wrong_loses_its_place(tiny_target: GetTarget):
    target = tiny_target()
    requests = [Request((5, 6, 7), 40)]
    answers = naive_answers(target.model, requests, target.eos_ids)
    wrong, right = PathsDrafter(target, [[127, 127, 127]]), RandomTreeDrafter(target, answers, max_nodes=3, seed=1)
    (generation,) = decode(target, hybrid(target, wrong, right, nodes=4, min_value=0.1), requests)
    assert generation.output_ids == tuple(answers[requests[0].prompt_ids][3:])
    assert 127 in generation.rounds[0].tokens
    assert 127 not in generation.rounds[-2].tokens


def test_yields_count_what_was_right_and_what_is_known():
    """A draft deeper than what came is neither right nor wrong."""
    record = _Yield()
    record.learn(from_paths(0, [[1, 2, 3, 4], [5]]), [1, 2, 9])
    assert record.offered == {1: 1, 2: 1, 3: 1}
    assert record.right == {1: 1, 2: 1, 3: 0}
    assert record.joint(1) == pytest.approx((1 + 4 * 0.5) / 5)
    assert record.joint(4) == pytest.approx(0.5**4)


def test_nothing_is_drafted_where_nothing_is_worth_it(tiny_target: GetTarget):
    target = tiny_target()
    drafter = hybrid(target, PathsDrafter(target, [[1, 2, 3, 4, 5]]), min_value=0.2)
    assert len(drafter.propose(context_of([9, 8]))) == 3


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({}, "members"),
        ({"hybrid": {}}, "members"),
        ({"ngrams": {}}, "members.ngrams"),
        ({"ngram": {"k": 0}}, "members.ngram.k"),
        ({"ngram": {"kk": 1}}, "members.ngram.kk"),
        ({"draft_model": {}}, "members.draft_model.model"),
    ],
)
def test_members_that_cannot_be_are_refused_before_a_target_is_there(members: dict[str, Any], field: str):
    with pytest.raises(InputError) as refused:
        HybridDrafter.check_parameters(members=members)
    assert refused.value.field == field
