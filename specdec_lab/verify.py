"""The acceptance walk: which drafts the target agrees with, and the token it adds after them."""

from __future__ import annotations

from collections.abc import Callable

from specdec_lab.tree import DraftTree


def follow(tree: DraftTree, token_at: Callable[[int], int]) -> tuple[tuple[int, ...], int]:
    """Walk from the root to the child that carries the target's own token, until no child does.

    Lossless for any tree that was fixed before the target's tokens were drawn, greedy or sampled: the tokens along the
    walk are the target's own (SpecInfer, arXiv 2305.09781, naive sampling). For deterministic children no lossless
    rule accepts more. The token after the path comes from its last node, the deepest that was accepted.

    Args:
        token_at: the target's token after a node; asked once per visited node, in order.

    Returns:
        Accepted nodes from the root downwards, root included, and the token that the target adds after them.
    """
    path = [0]
    while True:
        token = token_at(path[-1])
        child = next((node for node in tree.children[path[-1]] if tree.tokens[node] == token), None)
        if child is None:
            return tuple(path), token
        path.append(child)
