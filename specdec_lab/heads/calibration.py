"""What a head's probabilities are worth where the target's likeliest token is taken.

A head learns the target's law. Where the target draws its tokens, a draft that the head gives 0.4 is right in 0.4 of
the cases; where it takes the likeliest one, a head that knows which one that is gives too little. Trees that are grown
and cut by the bare probabilities are then too small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec_lab.errors import InputError

CALIBRATION = "calibration"
"""Name of the facts of a head that hold it."""

LEAST_SLOPE, MOST = 0.1, 10.0
"""Smallest slope, so that a likelier draft stays the likelier one; largest slope, and largest offset either way."""

LEAST_PROBABILITY = 1e-6
"""Probabilities are taken for at least this, and for at most 1 less it, so that their odds are finite."""


@dataclass(frozen=True)
class Calibration:
    """The chance that a draft is the target's likeliest token, from the head's probability, by depth.

    The log-odds of being right are a straight line of those of the probability (Platt scaling).

    Attributes:
        lines: slope and offset of each depth from 1; deeper ones take the last. Without any, probabilities are taken at
            their word.
    """

    lines: tuple[tuple[float, float], ...] = ()

    def chance(self, probability: float, depth: int) -> float:
        """Return the chance of a draft whose parent is right; what has no probability has none.

        Args:
            probability: the head's, given its parent.
            depth: of the draft, from 1.
        """
        if not self.lines or probability <= 0:
            return probability
        slope, offset = self.lines[min(depth, len(self.lines)) - 1]
        probability = min(max(probability, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY)
        return 1 / (1 + math.exp(-offset) * ((1 - probability) / probability) ** slope)


AT_ITS_WORD = Calibration()


def stated_calibration(facts: Mapping[str, Any], field: str, source: object) -> Calibration:
    """Return the calibration that a head states, as its training has measured it.

    Args:
        facts: from the head's folder; ``{}`` for a checkpoint from elsewhere.
        field: the parameter that names the head, for messages; ``source`` is its value.

    Raises:
        InputError: what it states is none.
    """
    stated = facts.get(CALIBRATION)
    if stated is None:
        return AT_ITS_WORD
    if not isinstance(stated, list) or not all(_is_line(one) for one in stated):
        bounds = f"a slope from {LEAST_SLOPE} to {MOST:g} and an offset of at most {MOST:g} either way, per depth"
        raise InputError(field, source, f"its {CALIBRATION} has to be {bounds}; copy the head again")
    return Calibration(tuple((float(slope), float(offset)) for slope, offset in stated))


def _is_line(stated: Any) -> bool:
    if not isinstance(stated, list) or len(stated) != 2:
        return False
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in stated):
        return False
    return LEAST_SLOPE <= stated[0] <= MOST and -MOST <= stated[1] <= MOST
