"""Ratios of noisy timings: systems take turns on the same work, and the median over rounds is quoted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Work = TypeVar("Work")


@dataclass(frozen=True)
class Spread:
    """Median of repeated measurements with the smallest and the largest of them."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int = 2) -> str:
        """Return ``median (low-high)``; the median alone for a single measurement."""
        if self.count < 2:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread(values: Iterable[float]) -> Spread:
    """Summarise measurements.

    Raises:
        statistics.StatisticsError: there are none.
    """
    values = sorted(values)
    return Spread(statistics.median(values), values[0], values[-1], len(values))


@dataclass(frozen=True)
class Sample:
    """One system's run of one piece of work: units done (tokens, calls) and the seconds that they took."""

    units: float
    seconds: float


def alternate(
    systems: Mapping[str, Callable[[Work], Sample]],
    work: Sequence[Work],
    rounds: int,
    on_sample: Callable[[str, Sample], None] = lambda name, sample: None,
) -> dict[str, list[float]]:
    """Run every system on every piece of work, ``rounds`` times, in an order that rotates from piece to piece.

    Returns:
        Units per second of each system and round: ``{system: [rounds]}``, totals over the work.
    """
    names = list(systems)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        units, seconds = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for at, piece in enumerate(work):
            shift = (turn + at) % len(names)
            for name in names[shift:] + names[:shift]:
                sample = systems[name](piece)
                units[name] += sample.units
                seconds[name] += sample.seconds
                on_sample(name, sample)
        for name in names:
            rates[name].append(units[name] / seconds[name])
    return rates


def ratio(rates: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """Return the spread of the ratio of two systems' rates, taken within each round."""
    return spread(a / b for a, b in zip(rates[over], rates[under], strict=True))
