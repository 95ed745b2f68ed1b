"""Cost models of speculative decoding: what a chain of drafts can gain, and how long it should be."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from scipy.optimize import root_scalar

from specdec_lab.errors import InputError
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, best_nodes

EVERY_NODE_PAYS = {1: 1.0, 512: 1.0}
"""Milliseconds of a verify forward under which no tree is cut: for what must not hang on the clock."""


def expected_emitted(acceptance: float, k: float) -> float:
    """Return the tokens that a round with a chain of ``k`` drafts emits, bonus token included.

    (1 - a^(k+1)) / (1 - a) for acceptance probability ``a`` per draft, the same and independent at each
    (arXiv 2211.17192, equation 1).
    """
    if acceptance >= 1:
        return k + 1.0
    return (1 - acceptance ** (k + 1)) / (1 - acceptance)


def chain_speedup(acceptance: float, k: int, draft_cost: float) -> float:
    """Return the speed-up over plain decoding if verifying costs as much as one step (arXiv 2211.17192, theorem 3.8).

    Args:
        draft_cost: time of one draft step over that of one target step.
    """
    return expected_emitted(acceptance, k) / (k * draft_cost + 1)


def best_chain_length(acceptance: float, draft_cost: float, longest: int) -> int:
    """Return the number of drafts, 1 to ``longest``, with the largest ``chain_speedup``."""
    return max(range(1, longest + 1), key=lambda k: (chain_speedup(acceptance, k, draft_cost), -k))


def break_even_acceptance(k: int, draft_cost: float) -> float | None:
    """Return the acceptance probability per draft from which on ``chain_speedup`` exceeds 1.

    ``None`` if none does: drafting so many costs more than all of them are worth.
    """
    if chain_speedup(1.0, k, draft_cost) <= 1:
        return None
    return float(root_scalar(lambda rate: chain_speedup(rate, k, draft_cost) - 1, bracket=[0.0, 1.0]).root)


def rough_chain_speedup(acceptance: float, k: int, draft_cost: float) -> float:
    """Return the rule of thumb (1 + K a) / (1 + K c), which counts each draft as if those before it did not matter.

    It equals ``chain_speedup`` at K = 1, and is too large beyond; it is exact with accepted over proposed drafts in
    place of ``acceptance``.
    """
    return (1 + k * acceptance) / (1 + k * draft_cost)


def rough_best_chain_length(acceptance: float, draft_cost: float) -> float:
    """Return the rule of thumb sqrt(a / c); ``best_chain_length`` searches the exact formula."""
    return math.sqrt(acceptance / draft_cost)


class VerifyCost:
    """Time of a verify forward by its number of nodes, between measured points by straight lines.

    Args:
        milliseconds: ``{nodes: time}`` at two or more numbers of nodes, 1 among them.

    Raises:
        InputError: no time for one node or for more than one, or numbers that are not positive.
    """

    def __init__(self, milliseconds: Mapping[int, float]) -> None:
        plausible = len(milliseconds) > 1 and min(milliseconds) == 1 and min(milliseconds.values()) > 0
        if not plausible:
            remedy = "give the milliseconds of a forward by its nodes, of 1 node and of more, as {1: 35, 8: 40, 16: 50}"
            raise InputError("verify_ms", dict(milliseconds), remedy)
        self.points = sorted(milliseconds.items())

    def of(self, nodes: int) -> float:
        """Return the milliseconds of a forward; beyond the last point, as many per node as up to it."""
        for (few, low), (many, high) in pairwise(self.points):
            if nodes <= many:
                return low + (high - low) * (nodes - few) / (many - few)
        most, last = self.points[-1]
        return last * max(nodes, most) / most

    def worth(self, values: Sequence[float], draft_share: float) -> int:
        """Return how many of the best drafts give the most expected tokens per time of a round.

        Args:
            values: probability that the text runs through each draft, the best first.
            draft_share: what drafting takes, whatever is offered, over a forward of one node.
        """
        drafting = draft_share * self.of(1)
        best, best_rate, expected = 0, 1 / (drafting + self.of(1)), 1.0
        for count, value in enumerate(values, start=1):
            expected += value
            rate = expected / (drafting + self.of(1 + count))
            if rate > best_rate:
                best, best_rate = count, rate
        return best


def measure_verify_cost(
    target: Target, most: int, history: int = 64, repeats: int = 5, rows: int = 1
) -> VerifyCost | None:
    """Time forwards of 1, 2, 4, 8, ... nodes behind a history, medians; the first ``rows`` cache rows have to be empty.

    Args:
        most: nodes of the largest tree.
        history: tokens before the tree, as far as the cache and the target's positions allow.
        rows: that share the forward, each with a tree of that many nodes.

    Returns:
        ``None`` if the cache has no room for a token and two nodes.
    """
    most = min(most, target.cache.capacity - 1)
    if most < 2:
        return None
    branches = min(8, target.vocab_size)
    room = target.cache.capacity - most
    if target.max_length is not None:
        room = min(room, target.max_length - 1 - bushy(most, branches).depth)
    for row in range(rows):
        target.prefill(row, [1] * max(1, min(history, room)))
    times: dict[int, list[float]] = {min(2**power, most): [] for power in range(12)}
    for _ in range(1 + repeats):  # sizes take turns, so that a slow moment of the machine meets all of them
        for nodes, taken in times.items():
            trees = dict.fromkeys(range(rows), bushy(nodes, branches))
            start = time.perf_counter()
            target.forward(trees)
            target.synchronize()
            taken.append(1e3 * (time.perf_counter() - start))
    for row in range(rows):
        target.reset(row)
    found = {nodes: max(statistics.median(taken[1:]), 1e-3) for nodes, taken in times.items()}  # the first is a warm-up
    return VerifyCost(never_falling(found))


def never_falling(milliseconds: Mapping[int, float]) -> dict[int, float]:
    """Return times of which none exceeds that of a larger forward: a slow moment of the machine is no step in the cost.

    A forward takes what it takes or longer, so a smaller one that took longer was disturbed.
    """
    found: dict[int, float] = {}
    least = math.inf
    for nodes in sorted(milliseconds, reverse=True):
        least = min(least, milliseconds[nodes])
        found[nodes] = least
    return dict(sorted(found.items()))


def paying_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    values: Sequence[float],
    most: int,
    cost: VerifyCost | None,
    draft_share: float,
) -> DraftTree:
    """Return the best of all candidates, at most so many drafts, and no more than are worth while, but one.

    Args:
        tokens: see ``specdec_lab.tree.best_nodes``, as ``parents`` and ``values``.
        cost: of a verify forward; ``None`` where every node pays.
        draft_share: see ``VerifyCost.worth``.
    """
    if cost is not None:
        most = max(1, cost.worth(sorted(values[1:], reverse=True)[:most], draft_share))
    return best_nodes(tokens, parents, values, most)


def bushy(nodes: int, branches: int) -> DraftTree:
    """Return a tree of so many nodes, the root included, as shallow as so many children per node allow."""
    children = range(nodes - 1)
    return DraftTree((0, *(child % branches for child in children)), (-1, *(child // branches for child in children)))
