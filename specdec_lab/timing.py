"""Wall time of the parts of a round, with the device synchronised at both ends of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass
class TimeSplit:
    """Seconds per part of one request; they add up to ``total``.

    ``draft`` and ``verify`` hold the forwards of drafter and target, ``accept`` the choice of tokens and the walk,
    ``commit`` the gather of accepted rows, ``other`` the rest of the loop. In a batch each row bears an equal share
    of a round, so that the rows of a run add up to its wall time.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts, in seconds."""
        return sum(getattr(self, field.name) for field in fields(self))

    def add(self, parts: dict[str, float], share: float = 1.0) -> None:
        """Add ``share`` of each measured part, in seconds."""
        for name, seconds in parts.items():
            setattr(self, name, getattr(self, name) + share * seconds)


class Stopwatch:
    """Measures named parts inside a lap; what no part covers is ``other``.

    Args:
        synchronize: waits for the device; called before the clock is read at both ends of a part.
        clock: seconds, monotonic.
    """

    def __init__(
        self, synchronize: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize, self._clock = synchronize, clock
        self.parts: dict[str, float] = {}

    def now(self) -> float:
        """Return the clock's reading in seconds, after the device has finished its work."""
        self._synchronize()
        return self._clock()

    @contextmanager
    def lap(self) -> Iterator[dict[str, float]]:
        """Measure a lap; the yielded mapping holds its parts in seconds, ``other`` included, once it has ended."""
        self.parts = {}
        start = self.now()
        yield self.parts
        self.parts["other"] = max(0.0, self.now() - start - sum(self.parts.values()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a part of the current lap."""
        start = self.now()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + self.now() - start
