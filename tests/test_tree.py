"""The draft tree: what it derives, what it refuses, and its builders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_lab.tree import DraftTree, chain, find_path, first_nodes, from_paths, root_only, without


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Draw trees of up to 20 nodes with distinct siblings; token id 0 is as good as any (TV-04)."""
    tokens, parents = [draw(st.integers(0, 9))], [-1]
    for _ in range(draw(st.integers(0, 19))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 9))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


paths = st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=8)


@given(trees())
def test_mask_depths_and_children_agree_with_the_paths(tree: DraftTree):
    """Guards CP-04 and TR-04: a node sees exactly its path; depth and tree size are two numbers."""
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (len(tree), len(tree))
    for node in range(len(tree)):
        path = tree.path_to(node)
        assert mask[node].nonzero().flatten().tolist() == list(path)
        assert tree.depths[node] == len(path) - 1
        assert [tree.parents[at] for at in path] == [-1, *path[:-1]]
        assert tree.children[node] == tuple(at for at in range(len(tree)) if tree.parents[at] == node)
    assert tree.depth == max(tree.depths) <= len(tree) - 1
    assert tree.is_chain == (tree.depth == len(tree) - 1 and tree.parents == tuple(range(-1, len(tree) - 1)))


@given(trees())
def test_each_mask_is_the_callers_own(tree: DraftTree):
    """Guards CP-10: no mask is shared, so that none can carry one round into the next."""
    tree.ancestor_mask().zero_()
    assert tree.ancestor_mask().diagonal().all()


@given(st.integers(0, 4), paths)
def test_merged_paths_are_all_there_and_nothing_else_is(root: int, guesses: list[list[int]]):
    """Guards TR-07: common prefixes share a node, so every distinct guess is checked, and checked once."""
    tree = from_paths(root, guesses)
    wanted = {tuple(guess[:count]) for guess in guesses for count in range(1, len(guess) + 1)}
    found = [tuple(tree.tokens[at] for at in tree.path_to(node)[1:]) for node in range(1, len(tree))]
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert tree.tokens[0] == root


@given(paths, st.integers(1, 12))
def test_a_bounded_merge_keeps_the_first_guesses_and_stays_a_tree(guesses: list[list[int]], bound: int):
    """Guards TR-08: what the bound cuts off leaves no node without its parent, and the best guesses come first."""
    whole, tree = from_paths(9, guesses), from_paths(9, guesses, bound)
    assert len(tree) == min(bound, len(whole))
    assert tree.tokens == whole.tokens[: len(tree)]
    assert tree.parents == whole.parents[: len(tree)]


@given(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=9))
def test_a_chain_is_the_tree_of_one_path(root: int, drafts: list[int]):
    tree = chain(root, drafts)
    assert tree == from_paths(root, [drafts])
    assert tree.is_chain
    assert tree.depth == len(drafts)
    assert tree.tokens == (root, *drafts)


def test_the_root_alone_is_a_tree():
    """Guards TV-04: "nothing to propose" is a value of its own, also after token 0."""
    tree = root_only(0)
    assert tree == chain(0, []) == from_paths(0, []) == from_paths(0, [[]])
    assert (tree.depth, tree.children, tree.path_to(0)) == (0, ((),), (0,))
    assert tree.ancestor_mask().tolist() == [[True]]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((), ()),
        ((1, 2), (-1,)),
        ((1,), (-1, 0)),
        ((1, 2), (0, 0)),
        ((1, 2), (-1, -1)),
        ((1, 2), (-1, 1)),
        ((1, 2, 3), (-1, 2, 0)),
        ((1, -1), (-1, 0)),
        ((-1,), (-1,)),
        ((1, 2, 2), (-1, 0, 0)),
    ],
    ids=[
        "no root",
        "parent missing",
        "parent too many",
        "root with a parent",
        "two roots",
        "own parent",
        "parent after child",
        "padding as a token",
        "padding as the root",
        "a sibling twice",
    ],
)
def test_what_is_not_a_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...]):
    """Guards TR-05 and TV-04: padding never enters a tree, and no malformed tree reaches the target."""
    with pytest.raises(ValueError, match=r"."):
        DraftTree(tokens, parents)


def test_drawn_siblings_may_repeat_a_token():
    """Children drawn with replacement can be equal; only children chosen by rank cannot."""
    tree = DraftTree((1, 2, 2), (-1, 0, 0), draft_probs=torch.full((3, 4), 0.25))
    assert tree.children[0] == (1, 2)


def test_one_token_under_two_parents_is_no_repetition():
    tree = from_paths(0, [[1, 3], [2, 3]])
    assert tree.tokens == (0, 1, 3, 2, 3)
    assert tree.parents == (-1, 0, 1, 0, 3)


def test_lists_become_tuples_and_a_tree_cannot_be_edited():
    tree = DraftTree([1, 2], [-1, 0])  # type: ignore[arg-type]
    assert tree.tokens == (1, 2)
    with pytest.raises(AttributeError):
        tree.tokens = (3, 4)  # type: ignore[misc]


@given(st.data())
def test_pruned_trees_are_trees(data: st.DataObject):
    """Guards TR-08: whatever is dropped, what hangs from it goes too, and the rest keeps its paths."""
    paths = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6))
    sure = [[1 / (2 + depth) for depth in range(len(path))] for path in paths]
    tree = from_paths(9, paths, confidences=sure)
    dropped = data.draw(st.sets(st.integers(0, 30)))
    kept = without(tree, lambda node: node in dropped)
    texts = {tuple(kept.tokens[at] for at in kept.path_to(node)[1:]) for node in range(len(kept))}
    wanted = {
        tuple(tree.tokens[at] for at in tree.path_to(node)[1:])
        for node in range(len(tree))
        if not dropped & set(tree.path_to(node)[1:])
    }
    assert texts == wanted
    assert (kept.confidence is None) == (tree.confidence is None)
    if kept.confidence is not None:
        assert kept.confidence[1:] == tuple(1 / (1 + depth) for depth in kept.depths[1:])
    for count in range(1, len(tree) + 1):
        first = first_nodes(tree, count)
        assert first.tokens == tree.tokens[:count]
    for node in range(len(tree)):
        assert find_path(tree, [tree.tokens[at] for at in tree.path_to(node)[1:]]) == node
    assert find_path(tree, [7]) is None


def test_what_was_drawn_is_never_dropped():
    """Guards LC-12: to prune a drawn tree would change the law of what is left."""
    drawn = DraftTree((0, 1, 1), (-1, 0, 0), torch.full((3, 4), 0.25))
    assert first_nodes(drawn, 1) is drawn
    with pytest.raises(ValueError, match="never dropped"):
        without(drawn, lambda node: True)
