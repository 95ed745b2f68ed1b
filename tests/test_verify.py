"""The acceptance walk alone: scripted choices, and its law by exact enumeration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_lab.tree import DraftTree, chain, from_paths, root_only
from specdec_lab.verify import follow

TOKENS = (0, 1, 2)


def walked(tree: DraftTree, chosen: Sequence[int]) -> tuple[list[int], int]:
    path, token = follow(tree, lambda node: chosen[node])
    return [tree.tokens[node] for node in path[1:]], token


@pytest.mark.parametrize(
    ("chosen", "accepted", "token"),
    [
        ([1, 2, 3, 9], [1, 2, 3], 9),
        ([1, 2, 9, 3], [1, 2], 9),
        ([9, 2, 3, 3], [], 9),
        ([1, 9, 3, 3], [1], 9),
    ],
)
def test_the_bonus_comes_from_the_deepest_accepted_node(chosen: list[int], accepted: list[int], token: int):
    """Guards LC-04: after 1, 2, 3 the target says 9, and the 3 that its parent said is not repeated."""
    assert walked(chain(5, [1, 2, 3]), chosen) == (accepted, token)


def test_the_bonus_in_a_tree():
    """Guards LC-04 and CP-04: the same where accepted nodes are scattered over the tree."""
    tree = DraftTree((5, 4, 1, 8, 2, 2, 3), (-1, 0, 0, 1, 1, 2, 5))
    assert walked(tree, [1, 0, 2, 0, 0, 3, 9]) == ([1, 2, 3], 9)
    assert follow(tree, [1, 0, 2, 0, 0, 3, 9].__getitem__)[0] == (0, 2, 5, 6)
    assert walked(tree, [4, 2, 0, 0, 7, 0, 0]) == ([4, 2], 7)


def test_nothing_to_accept():
    """Guards TR-02 and TV-04: the root alone gives one token, be it token 0."""
    assert follow(root_only(5), lambda _: 0) == ((0,), 0)


def test_token_0_is_a_token():
    """Guards TV-04: a draft of 0 is accepted when the target says 0, and only then."""
    assert walked(chain(0, [0, 0]), [0, 0, 0]) == ([0, 0], 0)
    assert walked(chain(0, [0, 0]), [0, 1, 0]) == ([0], 1)


@given(st.data())
def test_each_visited_node_is_asked_once_from_the_root_down(data: st.DataObject):
    """Guards LC-07 and TR-04: one choice per node, shared by all branches through it; never a node off the path."""
    paths = data.draw(st.lists(st.lists(st.sampled_from(TOKENS), max_size=4), max_size=6))
    tree = from_paths(7, paths)
    chosen = data.draw(st.lists(st.sampled_from(TOKENS), min_size=len(tree), max_size=len(tree)))
    asked: list[int] = []

    def token_at(node: int) -> int:
        asked.append(node)
        return chosen[node]

    path, token = follow(tree, token_at)
    assert tuple(asked) == path == tree.path_to(path[-1])
    assert len(path) <= tree.depth + 1
    assert [tree.tokens[child] for child in path[1:]] == [chosen[node] for node in path[:-1]]
    assert token == chosen[path[-1]]
    assert token not in [tree.tokens[child] for child in tree.children[path[-1]]]


BRANCHES: dict[str, list[list[int]]] = {
    "both children, one branch more popular": [[0, 0], [0, 1], [0, 2], [1, 0]],
    "chain": [[1, 1]],
    "wide": [[0], [1], [2]],
    "one child": [[2]],
    "nothing": [],
    "full": [list(pair) for pair in product(TOKENS, TOKENS)],
}


@pytest.mark.parametrize("branches", BRANCHES.values(), ids=BRANCHES.keys())
def test_the_law_of_two_tokens_is_the_targets_by_enumeration(branches: list[list[int]]):
    """Guards LC-03, LC-07, LC-12: summed over every choice at every node, no branch gains or loses probability."""
    law = {(): (0.5, 0.3, 0.2), (0,): (0.1, 0.2, 0.7), (1,): (0.6, 0.4, 0.0), (2,): (1 / 3, 1 / 3, 1 / 3)}
    tree = from_paths(0, branches)
    texts = [tuple(tree.tokens[at] for at in tree.path_to(node)[1:]) for node in range(len(tree))]
    inner = [node for node, text in enumerate(texts) if len(text) < 2]
    got: dict[tuple[int, ...], float] = defaultdict(float)
    for choice in product(TOKENS, repeat=len(inner)):
        chosen = dict(zip(inner, choice, strict=True))
        probability = 1.0
        for node, token in chosen.items():
            probability *= law[texts[node]][token]
        path, token = follow(tree, lambda node, chosen=chosen: chosen.get(node, 0))
        text = (*texts[path[-1]], token)[:2]
        if len(text) == 1:  # the second token comes from a later round
            for second in TOKENS:
                got[(*text, second)] += probability * law[text][second]
        else:
            got[text] += probability
    for first, second in product(TOKENS, TOKENS):
        assert got[first, second] == pytest.approx(law[()][first] * law[(first,)][second], abs=1e-12)
