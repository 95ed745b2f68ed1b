"""Strategies whose trees are as large as the time of a wider verify forward makes worth while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_lab.cost import VerifyCost, measure_verify_cost, paying_tree
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.heads.calibration import AT_ITS_WORD, Calibration
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree

NETWORK_SHARE = 0.2
"""What running a small network takes: 0.15 to 0.3 with the heads and draft model of the default target."""


class SizedDrafter(Drafter):
    """A strategy that cuts its trees to what is worth while.

    Times that are not stated are measured on the target, for as many rows as share its forwards, when the first cache
    is there. A benchmark measures them once for all its strategies and states them in its result, since tree sizes, and
    with them every counter, hang on them.

    Attributes:
        verify_cost: time of a verify forward by its nodes; ``None`` until it is known, and where every node pays.
        draft_share: time of drafting over that of a forward of one node, roughly; the best size hardly hangs on it, and
            measured times of each strategy would make trees hang on the clock once more.
        calibration: what the probabilities of its network are worth where the likeliest token is taken.
    """

    draft_share: float = NETWORK_SHARE
    calibration: Calibration = AT_ITS_WORD

    def __init__(
        self, target: Target, *, max_nodes: int, verify_ms: Mapping[int, float] | None, sized: bool = True
    ) -> None:
        super().__init__(target, max_nodes=max_nodes)
        self.verify_cost = None if verify_ms is None else VerifyCost(verify_ms)
        self._sized = sized

    @classmethod
    def check_parameters(cls, *, verify_ms: Mapping[int, float] | None, **others: Any) -> None:
        """Refuse times that cannot be."""
        if verify_ms is not None:
            VerifyCost(verify_ms)

    @property
    def awaits_cost(self) -> bool:
        """Whether trees are to be cut and the times by which are not known yet."""
        return self._sized and self.verify_cost is None

    def size_by(self, cost: VerifyCost | None) -> None:
        """Take measured times; those that the settings state stay."""
        if self.awaits_cost:
            self.verify_cost = cost

    def allocate(self, rows: int, tokens: int) -> None:
        """Measure the target, unless the times are known."""
        if self.awaits_cost:
            self.size_by(measure_verify_cost(self.target, self.max_nodes, rows=rows))

    def calibrated(self, context: DraftContext) -> Calibration:
        """Return what probabilities are worth in a sequence; where tokens are drawn they are taken at their word."""
        return self.calibration if context.randomness.sampling.greedy else AT_ITS_WORD

    def cut(self, tokens: Sequence[int], parents: Sequence[int], values: Sequence[float], most: int) -> DraftTree:
        """Return the candidates that are worth while, at most so many drafts; see ``specdec_lab.cost.paying_tree``."""
        return paying_tree(tokens, parents, values, most, self.verify_cost, self.draft_share)
