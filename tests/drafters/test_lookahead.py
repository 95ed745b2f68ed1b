"""Lookahead: how its window moves, what its pool keeps, and what a tree holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import decode
from scripted import context_of, told
from torch import Tensor

from specdec_lab.decode import Request
from specdec_lab.drafters.lookahead import LookaheadDrafter, NgramPool, filler
from specdec_lab.errors import InputError
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, find_path, from_paths

GetTarget = Callable[..., Target]


def saying(tree: DraftTree, after: dict[tuple[int, ...], int], vocab: int = 128) -> Tensor:
    """Return logits under which the target says a token after each path that is named, and token 0 elsewhere."""
    logits = torch.zeros(len(tree), vocab)
    for path, token in after.items():
        node = find_path(tree, path)
        assert node is not None
        logits[node, token] = 5.0
    return logits


def window_alone(target: Target, **settings: Any) -> LookaheadDrafter:
    return LookaheadDrafter(target, **{"window": 3, "level": 3, "guesses": 0, "text_pool": False, **settings})


def test_the_window_is_a_chain_with_a_branch_per_column(tiny_target: GetTarget):
    """Node (j, i) is the child of (j - 1, i), so that depth is position."""
    drafter, context = window_alone(tiny_target()), context_of([10, 11, 12, 13, 14, 15, 16])
    tree = drafter.propose(context)
    first, second = context.state.levels
    assert tree == from_paths(16, [[*first[: at + 1], second[at]] for at in range(3)])
    assert first == [filler(context.tokens, 0, at) for at in range(3)]
    assert set(first + second) <= set(context.tokens)


def test_the_window_moves_with_the_text(tiny_target: GetTarget):
    """Level 0 is dropped, what the target said after the last level is the new one; accepted drafts drop columns."""
    drafter, context = window_alone(tiny_target()), context_of([10, 11, 12, 13])
    tree = drafter.propose(context)
    context.state.levels = [[20, 21, 22], [30, 31, 32]]
    tree = from_paths(13, context.state.column_paths())
    said = {(20, 30): 40, (20, 21, 31): 41, (20, 21, 22, 32): 42}
    told(context, tree, (0,), 50, saying(tree, said))
    drafter.propose(context)
    assert context.state.levels == [[30, 31, 32], [40, 41, 42]]
    pool = context.state.pool
    assert [pool.guesses(first, 5, 2) for first in (20, 21, 22)] == [[(30, 40)], [(31, 41)], [(32, 42)]]

    tree = from_paths(50, context.state.column_paths())
    said = {(30, 40): 60, (30, 31, 41): 61, (30, 31, 32, 42): 62}
    path = tree.path_to(find_path(tree, (30,)) or 0)
    told(context, tree, path, 51, saying(tree, said))
    drafter.propose(context)
    tail = [filler(context.tokens, level, 2) for level in range(2)]
    assert context.state.levels == [[41, 42, tail[0]], [61, 62, tail[1]]]


def test_a_window_that_was_cut_or_pruned_is_filled_up(tiny_target: GetTarget):
    """Guards ST-05: near the end of the budget branches are shorter, and a column without an answer goes on."""
    drafter, context = window_alone(tiny_target()), context_of([10, 11, 12, 13], max_depth=2)
    drafter.propose(context)
    context.state.levels = [[20, 21, 22], [30, 31, 32]]
    tree = from_paths(13, [path[:2] for path in context.state.column_paths()])
    assert tree.depth == 2
    told(context, tree, (0,), 50, saying(tree, {(20, 30): 40}))
    drafter.propose(context)
    assert context.state.levels[1][0] == 40
    assert len(context.state.levels[1]) == 3
    assert len(context.state.pool) == 1


def test_guesses_are_distinct_and_as_many_as_there_are(tiny_target: GetTarget):
    """Guards TR-07: W=5, G=3 and W=3, G=5 with a pool of four continuations give 3 and 4 of them."""
    target = tiny_target()
    text = [7, 1, 2, 7, 3, 4, 7, 1, 2, 7, 5, 6, 7, 8, 9, 7]
    for window, guesses, wanted in ((5, 3, 3), (3, 5, 4)):
        drafter, context = LookaheadDrafter(target, window=window, guesses=guesses, depth=2), context_of(text)
        tree = drafter.propose(context)
        offered = {
            (tree.tokens[tree.parents[node]], tree.tokens[node])
            for node in range(1, len(tree))
            if tree.depths[node] == 2
        }
        known = {(1, 2), (3, 4), (5, 6), (8, 9)}
        assert len(offered & known) >= wanted
        alone = LookaheadDrafter(target, window=0, guesses=guesses, depth=2).propose(context_of(text))
        assert len(alone) - 1 == 2 * wanted
        assert len(alone) <= LookaheadDrafter(target, window=0, guesses=guesses, depth=2).max_nodes


def test_the_most_recent_guess_comes_first_and_goes_on_through_the_pool():
    pool = NgramPool(3, keys=10, per_key=4)
    pool.catch_up([7, 1, 2, 5, 6, 7, 3, 4])
    assert pool.guesses(7, 5, 2) == [(3, 4), (1, 2)]
    assert pool.guesses(7, 2, 4) == [(3, 4), (1, 2, 5, 6)]
    assert pool.guesses(7, 2, 3) == [(3, 4), (1, 2, 5)]
    pool.add([7, 1, 2])
    assert pool.guesses(7, 1, 2) == [(1, 2)]
    assert pool.guesses(99, 5, 2) == []


def test_the_pool_is_bounded():
    """Guards ML-04 and PF-01: the oldest n-gram of a token goes, then the token that was touched longest ago."""
    pool = NgramPool(2, keys=3, per_key=2)
    for second in (1, 2, 3):
        pool.add([7, second])
    assert pool.guesses(7, 5, 1) == [(3,), (2,)]
    for first in (8, 9, 7, 10):
        pool.add([first, 1])
    assert [bool(pool.guesses(first, 1, 1)) for first in (7, 8, 9, 10)] == [True, False, True, True]
    for token in range(5000):
        pool.add([token, token + 1])
    assert len(pool) <= 6


def test_work_per_round_does_not_grow_with_the_text():
    """Guards PF-01: only what is new is indexed."""
    added: list[list[int]] = []

    class Counting(NgramPool):
        def add(self, ngram: Any) -> None:
            added.append(list(ngram))
            super().add(ngram)

    pool, text = Counting(3, 10_000, 8), list(range(4000))
    pool.catch_up(text)
    assert len(added) == 3998
    pool.catch_up([*text, 1, 2])
    assert added[3998:] == [[3998, 3999, 1], [3999, 1, 2]]


def test_nothing_is_drafted_after_eos(tiny_target: GetTarget):
    drafter, context = LookaheadDrafter(tiny_target(), window=0), context_of([5, 2, 9, 9, 5])
    assert drafter.propose(context).tokens == (5, 2)


@pytest.mark.parametrize("prompt", [(7,), (7, 7), (7, 7, 7, 7), (0, 0, 0)])
@pytest.mark.parametrize(
    "settings", [{}, {"window": 0}, {"guesses": 0}, {"level": 2}, {"level": 5, "depth": 9}], ids=str
)
def test_short_and_monotonous_texts(prompt: tuple[int, ...], settings: dict[str, Any], tiny_target: GetTarget):
    """Guards ST-07 and TV-04: nothing to say is no error, and token 0 is a token."""
    target = tiny_target()
    (generation,) = decode(target, LookaheadDrafter(target, **settings), [Request(prompt, 20)])
    assert generation.error is None


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"window": 0, "guesses": 0}, "guesses"), ({"level": 6}, "depth"), ({"guesses": 17}, "guesses")],
)
def test_parameters_that_do_not_fit_together_are_refused(settings: dict[str, int], field: str, tiny_target: GetTarget):
    with pytest.raises(InputError) as refused:
        LookaheadDrafter(tiny_target(), **settings)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_free_places_are_filled_with_many_tokens_of_the_text():
    """Another one per place and round, however long the text is."""
    for length in (50, 700, 5000):
        tokens = list(range(length))
        places = [(level, column) for level in range(3) for column in range(5)]
        rounds = [{filler(tokens[:end], *place) for place in places} for end in (length - 1, length)]
        assert all(len(found) > 10 for found in rounds)
        assert rounds[0] != rounds[1]
