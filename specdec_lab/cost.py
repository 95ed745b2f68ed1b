"""Cost models of speculative decoding: what a chain of drafts can gain, and how long it should be."""

from __future__ import annotations


def expected_emitted(acceptance: float, k: int) -> float:
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
