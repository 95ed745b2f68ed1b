"""Static trees of ranks."""

from itertools import combinations, product

import pytest

from specdec_lab.errors import InputError
from specdec_lab.heads.published_trees import PUBLISHED, published_tree
from specdec_lab.rank_trees import RankPath, rank_tree, tree_from_accuracy

ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.15, 0.05], [0.3, 0.1, 0.02]]


def value(path: RankPath) -> float:
    found = 1.0
    for depth, rank in enumerate(path):
        found *= ACCURACY[depth][rank]
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees_are_trees(name: str):
    """TR-01: a tree with a node whose parent is missing."""
    tree = rank_tree(published_tree(name), deepest=5, choices=10)
    assert len(tree.paths) == int(name.rpartition("_")[2])
    assert all(path[:-1] in {(), *tree.paths} for path in tree.paths)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_no_other_tree_of_that_size_expects_more(nodes: int):
    every = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    closed = [
        chosen for chosen in combinations(every, nodes) if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    ]
    best = max(sum(map(value, chosen)) for chosen in closed)
    found = tree_from_accuracy(ACCURACY, nodes)
    assert len(found.paths) == nodes
    assert sum(map(value, found.paths)) == pytest.approx(best)


def test_a_tree_ends_where_heads_and_ranks_end():
    found = tree_from_accuracy([[0.9, 0.1]], 10)
    assert found.paths == ((0,), (1,))
    assert (found.depth, found.branches) == (1, 2)


@pytest.mark.parametrize(
    ("paths", "word"),
    [
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "4 deep"),  # three heads
        ([[11]], "rank 11"),  # top-10
        ([[0, 1]], "parent"),
        ([[0], [0]], "twice"),
        ([[]], "list of ranks"),
        ([], "at least one"),
        ([[-1]], "list of ranks"),
    ],
)
def test_what_a_head_cannot_draft_is_refused_by_name(paths: list[list[int]], word: str):
    """TR-01: an index overflow in the middle of a run."""
    with pytest.raises(InputError, match=word) as error:
        rank_tree(paths, deepest=3, choices=10)
    assert error.value.field == "tree"


def test_a_tree_within_a_depth_keeps_its_upper_part():
    tree = rank_tree([[0], [0, 0], [1], [0, 0, 0]], 3, 4)
    assert tree.within(2).paths == ((0,), (1,), (0, 0))
    assert tree.within(9) is tree


def test_unknown_published_tree_is_refused():
    with pytest.raises(InputError, match="medusa_7b_63"):
        published_tree("medusa_7b_6")
