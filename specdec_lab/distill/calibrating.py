"""How the probabilities of a head relate to what the target says, from counts on held-out texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit

from specdec_lab.distill.hits import Ranked
from specdec_lab.heads.calibration import LEAST_SLOPE, MOST

GROUP = "odds"
"""First part of the names of the counts, ``odds/DEPTH/BIN/right`` and ``.../seen``."""

WIDTH, FARTHEST = 0.25, 9.0
"""Width of a bin of log-odds, and where the outermost ones lie."""

EDGE = round(FARTHEST / WIDTH)
"""Bins on either side of even odds."""

FEWEST = 500
"""Choices of a depth from which on its line is fitted; a position has eight."""

PRIOR = 10.0
"""Weight of the belief that probabilities can be taken at their word, in choices."""


def odds_counts(ranked: Mapping[int, Ranked]) -> dict[str, float]:
    """Return how many choices of each depth and bin there were, and how many of them were right; empty bins left out.

    What is not a number is no choice.
    """
    found: dict[str, float] = {}
    for depth, choices in ranked.items():
        known = choices.log_odds.isfinite()
        bins = (choices.log_odds[known].clamp(-FARTHEST, FARTHEST) / WIDTH).round().long() + EDGE
        seen = torch.bincount(bins, minlength=2 * EDGE + 1)
        right = torch.bincount(bins[choices.right[known]], minlength=2 * EDGE + 1)
        for at, (some, hits) in enumerate(torch.stack((seen, right), dim=1).tolist()):
            if some:
                name = f"{GROUP}/{depth}/{at - EDGE}"
                found[f"{name}/right"], found[f"{name}/seen"] = float(hits), float(some)
    return found


def fitted_lines(counts: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return slope and offset of each depth from 1, as far as there are choices enough; see ``heads.calibration``.

    Args:
        counts: see ``odds_counts``, added up; other names are passed over.
    """
    lines: list[tuple[float, float]] = []
    while True:
        start = f"{GROUP}/{len(lines) + 1}/"
        bins = sorted({int(name.split("/")[2]) for name in counts if name.startswith(start)})
        right = np.array([counts[f"{start}{one}/right"] for one in bins])
        seen = np.array([counts[f"{start}{one}/seen"] for one in bins])
        if seen.sum() < FEWEST:
            return lines
        lines.append(_line(WIDTH * np.array(bins), right, seen))


def _line(log_odds: np.ndarray, right: np.ndarray, seen: np.ndarray) -> tuple[float, float]:
    """Return the slope and offset under which the counts are the likeliest."""

    def cost(line: np.ndarray) -> tuple[float, np.ndarray]:
        slope, offset = line
        at = slope * log_odds + offset
        missed = seen * np.logaddexp(0, at) - right * at
        surplus = seen * expit(at) - right
        away = np.array([slope - 1, offset])
        slopes = np.array([(surplus * log_odds).sum(), surplus.sum()])
        return float(missed.sum() + PRIOR / 2 * (away**2).sum()), slopes + PRIOR * away

    found = minimize(
        cost, np.array([1.0, 0.0]), jac=True, method="L-BFGS-B", bounds=[(LEAST_SLOPE, MOST), (-MOST, MOST)]
    )
    return float(found.x[0]), float(found.x[1])


def calibration_numbers(lines: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return lines as numbers of a row of ``metrics.jsonl``: ``calibration/depthD/slope`` and ``.../offset``."""
    parts = ("slope", "offset")
    named = ((f"calibration/depth{depth}", line) for depth, line in enumerate(lines, start=1))
    return {f"{name}/{part}": value for name, line in named for part, value in zip(parts, line, strict=True)}


def lines_of(row: Mapping[str, float]) -> list[list[float]]:
    """Return the lines that ``calibration_numbers`` has put into a row."""
    lines: list[list[float]] = []
    while (slope := row.get(f"calibration/depth{len(lines) + 1}/slope")) is not None:
        lines.append([slope, row[f"calibration/depth{len(lines) + 1}/offset"]])
    return lines
