"""Static draft trees: which ranks of a head's choices are drafted at each depth, whatever their probabilities."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from specdec_lab.errors import InputError

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class RankTree:
    """A tree of ranks: path ``(0, 2)`` is the third choice at depth 2 after the first choice at depth 1.

    Attributes:
        paths: parents before their children, siblings by rank.
    """

    paths: tuple[RankPath, ...]

    @cached_property
    def children(self) -> Mapping[RankPath, tuple[int, ...]]:
        """Ranks that follow each path, the empty one for the root included."""
        children: dict[RankPath, list[int]] = {}
        for path in self.paths:
            children.setdefault(path[:-1], []).append(path[-1])
        return {path: tuple(ranks) for path, ranks in children.items()}

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(len(path) for path in self.paths)

    def within(self, depth: int) -> RankTree:
        """Return the nodes that are at most so deep."""
        return self if depth >= self.depth else RankTree(tuple(path for path in self.paths if len(path) <= depth))

    @property
    def branches(self) -> int:
        """Choices that a head has to rank for it."""
        return 1 + max(max(path) for path in self.paths)


def rank_tree(paths: Iterable[Sequence[int]], deepest: int, choices: int) -> RankTree:
    """Check and order a tree of ranks.

    Args:
        deepest: depths that there are heads or steps for.
        choices: tokens that a head can rank.

    Raises:
        InputError: names the node that has no parent, or that is deeper or wider than the head allows.
    """
    nodes = [tuple(path) for path in paths]
    known = set(nodes)
    if not nodes:
        raise InputError("tree", [], "name at least one node, as [[0],[0,0],[1]]")
    for path in nodes:
        if not path or min(path) < 0:
            raise InputError("tree", list(path), "a node is a list of ranks from 0, as [0,2]")
        if len(path) > deepest:
            raise InputError("tree", list(path), f"this node is {len(path)} deep and the head drafts {deepest} tokens")
        if max(path) >= choices:
            raise InputError("tree", list(path), f"this node wants rank {max(path)} and a head ranks {choices} tokens")
        if len(path) > 1 and path[:-1] not in known:
            raise InputError("tree", list(path), f"its parent {list(path[:-1])} is not in the tree; add it")
    if len(known) != len(nodes):
        twice = next(path for path in nodes if nodes.count(path) > 1)
        raise InputError("tree", list(twice), "this node is in the tree twice; name it once")
    return tree_of(nodes)


def tree_of(paths: Iterable[RankPath]) -> RankTree:
    """Return the tree of paths that are known to hold their parents."""
    return RankTree(tuple(sorted(paths, key=lambda path: (len(path), path))))


def tree_from_accuracy(accuracy: Sequence[Sequence[float]], nodes: int) -> RankTree:
    """Return the tree of ``best_paths``."""
    return tree_of(path for _, path in best_paths(accuracy, nodes))


def best_paths(accuracy: Sequence[Sequence[float]], nodes: int) -> list[tuple[float, RankPath]]:
    """Return value and path of the nodes of the tree with the most expected accepted tokens, the best first.

    It follows from how often each rank was right at each depth.

    A node's value is the product along its path; the best node that hangs from the tree so far is added until there are
    enough (arXiv 2401.10774, section 2.3.3). Since values fall along a path, no other tree of that size is better under
    that product.

    Args:
        accuracy: share of positions where the token of that rank was right, ``[depths][ranks]``, falling in the rank.
        nodes: drafts of the tree.
    """
    frontier: list[tuple[float, RankPath]] = [(-accuracy[0][0], (0,))]
    values: dict[RankPath, float] = {(): 1.0}
    chosen: list[tuple[float, RankPath]] = []
    while frontier and len(chosen) < nodes:
        value, path = heapq.heappop(frontier)
        chosen.append((-value, path))
        values[path] = -value
        depth, rank = len(path), path[-1]
        if rank + 1 < len(accuracy[depth - 1]):
            sibling = (*path[:-1], rank + 1)
            heapq.heappush(frontier, (-values[path[:-1]] * accuracy[depth - 1][rank + 1], sibling))
        if depth < len(accuracy):
            heapq.heappush(frontier, (-values[path] * accuracy[depth][0], (*path, 0)))
    return chosen
