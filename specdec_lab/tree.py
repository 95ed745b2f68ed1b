"""The draft tree: the one representation that every strategy proposes and the one verifier checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of one sequence, as a tree whose root is the last committed token.

    Node 0 is the root: a token that is already part of the output but whose row is not yet in the target's
    cache. Every other node is a draft token. A chain is a tree; a plain decoding step is a tree of one node.

    Attributes:
        tokens: token id per node, ``[nodes]``.
        parents: index of each node's parent, ``[nodes]``; ``parents[0] == -1`` and ``parents[i] < i``.
        draft_probs: ``None`` when children were chosen deterministically (a point mass per child). Otherwise
            ``[nodes, vocab]``, where row *i* is the law that the children of node *i* were really drawn from, after
            temperature and cut-offs, on the target's vocabulary; rows of leaves are not read.
        without_replacement: whether each sibling was drawn from what its elder siblings left of that law, renormalised;
            otherwise siblings are independent draws, which can be equal.
        confidence: the strategy's own estimate, per node, that the target's text runs through it, ``[nodes]``; for who
            sizes or compares trees. It has no part in verification, nor in whether two trees are equal.

    Raises:
        ValueError: the lists disagree, a parent does not precede its child, a token id is negative, or two siblings
            carry the same token though they were not drawn independently.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_probs: Tensor | None = None
    without_replacement: bool = False
    confidence: tuple[float, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "parents", tuple(self.parents))
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree needs one parent per token and a root: {self.tokens} and {self.parents}")
        if self.confidence is not None and len(self.confidence) != len(self.tokens):
            raise ValueError(f"{len(self.confidence)} confidences for {len(self.tokens)} nodes; give one per node")
        if self.parents[0] != -1:
            raise ValueError(f"node 0 is the root, so its parent is -1, not {self.parents[0]}")
        for node in range(1, len(self.tokens)):
            if not 0 <= self.parents[node] < node:
                raise ValueError(f"node {node} has parent {self.parents[node]}; a parent precedes its child")
        if min(self.tokens) < 0:
            raise ValueError(f"negative token id in {self.tokens}; an absent draft is no node, not a padded one")
        independent = self.draft_probs is not None and not self.without_replacement
        if not independent and len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            raise ValueError(f"two siblings carry the same token: {self.tokens} under {self.parents}")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges between the root and each node, ``[nodes]``."""
        depths = [0] * len(self)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node: the most draft tokens that one round can accept."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node in the order in which they are tried, ``[nodes][children]``."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self)):
            children[self.parents[node]].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def path_to(self, node: int) -> tuple[int, ...]:
        """Return the node indices from the root to ``node``, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def drafts_to(self, node: int) -> tuple[int, ...]:
        """Return the tokens below the root on the path to ``node``, its own included."""
        return tuple(self.tokens[at] for at in self.path_to(node)[1:])

    def child(self, node: int, token: int) -> int | None:
        """Return the first child of a node that carries a token, ``None`` if no child does."""
        return next((at for at in self.children[node] if self.tokens[at] == token), None)

    def ancestor_mask(self) -> Tensor:
        """Return ``[nodes, nodes]`` bool, true where the column's node is the row's node or an ancestor of it."""
        nodes = len(self)
        if self.is_chain:
            return torch.ones(nodes, nodes, dtype=torch.bool).tril_()
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = list(rows[parent]) if parent >= 0 else [False] * nodes
            row[node] = True
            rows.append(row)
        return torch.tensor(rows)


def root_only(root: int) -> DraftTree:
    """Return the tree of a plain decoding step: the root and nothing to accept."""
    return DraftTree((root,), (-1,))


def chain(root: int, drafts: Sequence[int], draft_probs: Tensor | None = None) -> DraftTree:
    """Return the tree with one path ``root -> drafts[0] -> drafts[1] -> ...``."""
    return DraftTree((root, *drafts), tuple(range(-1, len(drafts))), draft_probs)


def from_paths(
    root: int,
    paths: Iterable[Sequence[int]],
    max_nodes: int | None = None,
    confidences: Iterable[Sequence[float]] | None = None,
) -> DraftTree:
    """Merge continuations of ``root`` into one tree; common prefixes share nodes, so each guess is checked once.

    Args:
        root: the last committed token.
        paths: candidate continuations, the most promising first.
        max_nodes: stop adding nodes at this size, root included; what was added before stays closed under ancestors.
        confidences: of the tokens of each path; a shared node has that of the path which brought it.

    Raises:
        ValueError: a path holds a negative token id.
    """
    tokens, parents, node_of, values = [root], [-1], {}, [1.0]
    for path, sure in zip(paths, repeat(repeat(0.0)) if confidences is None else confidences, strict=False):
        at = 0
        for token, value in zip(path, sure, strict=False):
            child = node_of.get((at, token))
            if child is None:
                if max_nodes is not None and len(tokens) >= max_nodes:
                    break
                child = len(tokens)
                tokens.append(token)
                parents.append(at)
                values.append(value)
                node_of[at, token] = child
            at = child
    return DraftTree(tuple(tokens), tuple(parents), confidence=None if confidences is None else tuple(values))


def without(tree: DraftTree, dropped: Callable[[int], bool]) -> DraftTree:
    """Return a deterministic tree without some nodes and all that hangs from them; the root stays.

    Raises:
        ValueError: the children were drawn at random. To drop what was drawn would change the law of the rest.
    """
    if tree.draft_probs is not None:
        raise ValueError("a drawn token is never dropped")
    place = {0: 0}
    for node in range(1, len(tree)):
        if tree.parents[node] in place and not dropped(node):
            place[node] = len(place)
    kept = tuple(place)
    parents = (-1, *(place[tree.parents[node]] for node in kept[1:]))
    sure = None if tree.confidence is None else tuple(tree.confidence[node] for node in kept)
    return DraftTree(tuple(tree.tokens[node] for node in kept), parents, confidence=sure)


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """Return the first nodes of a deterministic tree, which hold their ancestors; a tree that was drawn stays whole."""
    if len(tree) <= count or tree.draft_probs is not None:
        return tree
    sure = None if tree.confidence is None else tree.confidence[:count]
    return DraftTree(tree.tokens[:count], tree.parents[:count], confidence=sure)


def best_nodes(tokens: Sequence[int], parents: Sequence[int], values: Sequence[float], count: int) -> DraftTree:
    """Return the tree of the most valuable drafts; the root stays first.

    Values do not rise along a path, and a parent stands before its child, so that the choice is closed under ancestors.

    Args:
        tokens: of all candidates, root first, ``[candidates]``.
        parents: of all candidates, ``[candidates]``.
        values: the probability that the text runs through each, ``[candidates]``.
        count: most drafts to keep.

    Raises:
        ValueError: a value above its parent's.
    """
    for node in range(1, len(tokens)):
        if values[node] > values[parents[node]]:
            raise ValueError(f"node {node} is worth {values[node]}, more than its parent's {values[parents[node]]}")
    ranked = sorted(range(1, len(tokens)), key=lambda node: (-values[node], node))[:count]
    kept = (0, *sorted(ranked))
    place = {node: at for at, node in enumerate(kept)}
    return DraftTree(
        tuple(tokens[node] for node in kept),
        (-1, *(place[parents[node]] for node in kept[1:])),
        confidence=tuple(values[node] for node in kept),
    )


def find_path(tree: DraftTree, tokens: Iterable[int]) -> int | None:
    """Return the node at the end of a path of tokens below the root, or ``None`` where the tree has no such path."""
    node: int | None = 0
    for token in tokens:
        node = tree.child(node, token)
        if node is None:
            return None
    return node
