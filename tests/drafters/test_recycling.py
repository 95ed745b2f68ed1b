"""Token recycling: what it learns from a round, and the tree that it grows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from oracles import decode
from scripted import context_of, told

from specdec_lab.decode import Request
from specdec_lab.drafters.recycling import AdjacencyTable, RecyclingDrafter
from specdec_lab.target import Target
from specdec_lab.tree import from_paths

GetTarget = Callable[..., Target]


def test_every_verified_node_teaches_what_follows_its_token(tiny_target: GetTarget):
    """Rejected branches as well: their logits have been paid for."""
    drafter, context = RecyclingDrafter(tiny_target(), successors=2), context_of([5, 6, 7])
    drafter.propose(context)
    tree = from_paths(7, [[20, 21], [30]])
    logits = torch.zeros(4, 128)
    for node, (first, second) in enumerate([(40, 41), (42, 43), (44, 45), (46, 47)]):
        logits[node, first], logits[node, second] = 9.0, 8.0
    told(context, tree, (0,), 40, logits)
    drafter.propose(context)
    table = context.state
    assert [table.get(token) for token in (7, 20, 21, 30)] == [(40, 41), (42, 43), (44, 45), (46, 47)]


def test_the_prompt_counts_before_anything_was_verified(tiny_target: GetTarget):
    table = AdjacencyTable(2, 100)
    table.follow_text([5, 6, 5, 7, 5, 8])
    assert table.get(5) == (8, 7)
    assert table.get(8) == ()


def test_the_tree_takes_the_likeliest_paths_by_rank(tiny_target: GetTarget):
    drafter, context = RecyclingDrafter(tiny_target(), nodes=5, depth=3, first=0.5, decay=0.4), context_of([3, 9])
    drafter.propose(context)
    table = AdjacencyTable(8, 100)
    for token, following in {9: (10, 11, 12), 10: (20, 21), 20: (30,), 11: (40,)}.items():
        table.set(token, following)
    tree = drafter._grow(table, 9, depth=3)
    # values: 10 .5, 20 .25, 11 .2, 30 .125, then 21 and 40 with .1 each: the one that was found first
    assert sorted(tree.tokens[1:]) == [10, 11, 20, 21, 30]
    assert drafter._grow(table, 9, depth=1).tokens == (9, 10, 11, 12)


def test_the_table_is_bounded():
    """Guards ML-04: the token that was touched longest ago is forgotten."""
    table = AdjacencyTable(2, 3)
    for token in range(100):
        table.set(token, [token + 1])
    assert len(table) == 3
    assert table.get(99) == (100,)
    assert table.get(0) == ()


def test_more_successors_than_the_vocabulary_has(tiny_target: GetTarget):
    """Guards TR-01."""
    target = tiny_target()
    drafter = RecyclingDrafter(target, successors=64, nodes=300, depth=9)
    (generation,) = decode(target, drafter, [Request((5, 6, 7, 5), 30)])
    assert generation.error is None
    assert max(item.proposed for item in generation.rounds) > 1
