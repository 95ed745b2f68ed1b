"""The hybrid: which nodes of its members it takes, and what it learns about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from oracles import decode, naive_answers
from scripted import PathsDrafter, RandomTreeDrafter, context_of

from specdec_lab.decode import Request
from specdec_lab.drafters.hybrid import HybridDrafter, _Yield, path_texts, trained_on
from specdec_lab.errors import InputError
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, chain, from_paths

GetTarget = Callable[..., Target]

FREE = {1: 1.0, 1000: 1.0}
"""A forward that costs the same whatever its nodes, so that every draft is worth while."""

COSTLY = {1: 10.0, 11: 20.0}
"""Each further node costs a tenth of a plain step."""


def hybrid(target: Target, *members: Any, **settings: Any) -> HybridDrafter:
    drafter = HybridDrafter(target, members=["ngram"], **{"verify_ms": FREE, **settings})
    drafter.members = list(members)
    return drafter


def test_the_union_holds_each_path_once(tiny_target: GetTarget):
    """Guards TR-07: what two members propose is one node, worth more."""
    target = tiny_target()
    drafter = hybrid(target, PathsDrafter(target, [[1, 2]]), PathsDrafter(target, [[1, 3], [4]]))
    tree = drafter.propose(context_of([9, 8]))
    assert set(path_texts(tree)[1:]) == {(1,), (1, 2), (1, 3), (4,)}
    assert tree.tokens[1] == 1, "proposed by both, so the best"


def test_the_budget_keeps_the_best_and_their_ancestors(tiny_target: GetTarget):
    """Guards TR-08: closed under ancestors whatever the yields are."""
    target = tiny_target()
    for nodes in range(1, 7):
        drafter = hybrid(target, PathsDrafter(target, [[1, 2, 3]]), PathsDrafter(target, [[5, 6, 7]]), nodes=nodes)
        context = context_of([9, 8])
        drafter.propose(context)
        context.state.yields[0].places.right = Counter({(1, 0, 1): 0, (2, 0, 1): 9, (3, 0, 1): 30})
        context.state.yields[0].places.offered = Counter({(1, 0, 1): 30, (2, 0, 1): 30, (3, 0, 1): 30})
        tree = drafter._union(context.state, context.state.trees)
        assert len(tree) == nodes + 1
        texts = set(path_texts(tree))
        assert all(text[:-1] in texts for text in texts if text)


def test_a_member_that_is_wrong_loses_its_place(tiny_target: GetTarget):
    target = tiny_target()
    requests = [Request((5, 6, 7), 40)]
    answers = naive_answers(target.model, requests, target.eos_ids)
    wrong, right = PathsDrafter(target, [[127, 127, 127]]), RandomTreeDrafter(target, answers, max_nodes=3, seed=1)
    (generation,) = decode(target, hybrid(target, wrong, right, nodes=4, verify_ms=COSTLY), requests)
    assert generation.output_ids == tuple(answers[requests[0].prompt_ids][3:])
    assert 127 in generation.rounds[0].tokens
    assert 127 not in generation.rounds[-2].tokens


def test_yields_count_what_was_right_and_what_is_known():
    """A draft deeper than what came is neither right nor wrong."""
    record = _Yield()
    record.learn(from_paths(0, [[1, 2, 3, 4], [5]]), [1, 2, 9])
    assert record.depths.offered == {1: 1, 2: 1, 3: 1}
    assert +record.depths.right == {1: 1, 2: 1}
    assert record.places.offered == {(1, 0, 2): 1, (1, 1, 2): 1, (2, 0, 1): 1, (3, 0, 1): 1}
    assert +record.places.right == {(1, 0, 2): 1, (2, 0, 1): 1}
    at_depth = (1 + 4 * 0.5) / 5
    assert record.joint(1, 0, 2) == pytest.approx((1 + 4 * at_depth / 2) / 5)
    assert record.joint(1, 1, 2) == pytest.approx(4 * at_depth / 2 / 5)
    assert record.joint(4, 0, 1) == pytest.approx(0.5**4)


def test_places_that_are_right_are_told_from_those_that_are_not():
    """A strategy's first guess and its tenth are not worth the same only because they are equally deep."""
    record, tree = _Yield(), from_paths(0, [[1], [2], [3]])
    for _ in range(30):
        record.learn(tree, [2, 9])
    first, second, third = record.values(tree)[1:]
    assert second > 0.9
    assert first == third < 0.1
    narrower = from_paths(0, [[7], [2]])
    assert record.values(narrower)[1] > 0.2  # of two drafts it knows nothing but how often the depth is right
    assert first + second + third == pytest.approx(record.joint(1, 0, 3) * 2 + record.joint(1, 1, 3))


def test_as_many_nodes_as_are_worth_their_time(tiny_target: GetTarget):
    """A node pays where what it is expected to bring exceeds its share of the time."""
    target = tiny_target()
    deep = PathsDrafter(target, [[1, 2, 3, 4, 5]])  # .5, .25, .125, ...
    assert len(hybrid(target, deep).propose(context_of([9, 8]))) == 6
    # one node: 1.5 / 1.1; two: 1.75 / 1.2 = 1.458; three: 1.875 / 1.3 = 1.442
    assert len(hybrid(target, deep, verify_ms=COSTLY).propose(context_of([9, 8]))) == 3
    assert len(hybrid(target, deep, verify_ms={1: 10.0, 2: 20.0}).propose(context_of([9, 8]))) == 1
    # a step at two nodes, and nothing after it: if any, then all
    assert len(hybrid(target, deep, verify_ms={1: 10.0, 2: 16.0, 6: 16.0}).propose(context_of([9, 8]))) == 6


def test_stated_confidence_is_corrected_by_what_came():
    """A strategy that is sure and wrong loses, one that is unsure and right gains."""
    sure = chain(0, [1, 2])
    sure = DraftTree(sure.tokens, sure.parents, confidence=(1.0, 0.9, 0.8))
    record = _Yield()
    assert record.values(sure) == pytest.approx([1.0, 0.9, 0.8])
    for _ in range(10):
        record.learn(sure, [7, 7])
    assert record.values(sure)[1] == pytest.approx(0.9 * 2 / (2 + 17))
    record = _Yield()
    for _ in range(10):
        record.learn(DraftTree(sure.tokens, sure.parents, confidence=(1.0, 0.1, 0.1)), [1, 2, 3])
    assert record.values(sure) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("verify_ms", [{}, {2: 5.0}, {1: 35.0}, {1: 0.0}, {0: 1.0, 1: 1.0}, {1: -1.0}])
def test_times_that_cannot_be_are_refused(verify_ms: dict[int, float]):
    with pytest.raises(InputError) as refused:
        HybridDrafter.check_parameters(members=["ngram"], settings=None, verify_ms=verify_ms)
    assert refused.value.field == "verify_ms"


@pytest.mark.parametrize(
    ("members", "settings", "field"),
    [
        ([], None, "members"),
        (["hybrid"], None, "members"),
        (["ngram", "hybrid_eagle"], None, "members"),
        (["autoregressive"], None, "members"),
        (["ngrams"], None, "members"),
        (["ngram", "ngram"], None, "members"),
        (["draft_model"], None, "members"),
        (["draft_model"], {"draft_model": {"model": "somewhere"}}, "members"),
        (["ngram"], {"lookahead": {}}, "settings"),
        (["ngram"], {"ngram": {"k": 0}}, "settings.ngram.k"),
        (["ngram"], {"ngram": {"kk": 1}}, "settings.ngram.kk"),
    ],
)
def test_members_that_cannot_be_are_refused_before_a_target_is_there(
    members: list[str], settings: dict[str, dict[str, Any]] | None, field: str
):
    with pytest.raises(InputError) as refused:
        HybridDrafter.check_parameters(members=members, settings=settings, verify_ms=None)
    assert refused.value.field == field


def test_members_take_their_own_parameters(tiny_target: GetTarget):
    drafter = HybridDrafter(tiny_target(), members=["ngram", "recycling"], settings={"ngram": {"k": 3}})
    assert [vars(member).get("k") for member in drafter.members] == [3, None]


def test_trained_members_state_their_labels(tiny_target: GetTarget):
    """A hybrid of heads is no strategy without training; one head that does not say leaves it open."""

    def member(labels: int | None, weights: int) -> PathsDrafter:
        one = PathsDrafter(tiny_target(), [[1]])
        one.training_tokens = labels
        one.memory_bytes = lambda: {"draft_weights": weights, "draft_kv": 0}
        return one

    assert trained_on([member(None, 0), member(None, 0)]) is None
    assert trained_on([member(300, 8), member(None, 0), member(40, 8)]) == 340
    assert trained_on([member(300, 8), member(None, 8)]) is None
