"""Every outcome of a computation that asks for chance, with its exact probability: no sampling, no error bars."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from specdec_lab.noise import Key

Result = TypeVar("Result")
Outcome = TypeVar("Outcome", bound=Hashable)


class TooManyOutcomesError(Exception):
    """An enumeration would not end in reasonable time."""


class EnumeratedNoise:
    """A ``Noise``, and its only ``Chance``, that follows a list of outcomes and then takes the first possible ones.

    Attributes:
        taken: the outcome of each decision, as a number.
        open: how many further outcomes each decision had.
        probability: of all these outcomes together.
    """

    def __init__(self, prescribed: list[int]) -> None:
        self._prescribed = prescribed
        self.taken: list[int] = []
        self.open: list[int] = []
        self.probability = 1.0

    def happens(self, probability: float) -> bool:
        """Return true in one outcome and false in the other, where both are possible."""
        if probability >= 1:
            return True
        if probability <= 0:
            return False
        return self._take([probability, 1 - probability]) == 0

    def draw(self, law: Tensor) -> int:
        """Return each possible index in turn."""
        possible = law.nonzero()[:, 0].tolist()
        total = float(law.sum())
        return possible[self._take([float(law[index]) / total for index in possible])]

    def target_token(self, scores: Tensor, key: Key) -> int:
        """Return each token that the target can choose in turn."""
        return self.draw(scores.double().softmax(dim=-1))

    def chance(self, key: Key) -> EnumeratedNoise:
        """Return this very source: decisions are told apart by their order."""
        return self

    def shared(self, vocab: int, key: Key, device: torch.device | str = "cpu") -> Tensor:
        """Refuse: noise that target and draft share has no finite number of outcomes."""
        raise NotImplementedError("coupled drafts are proved by comparing texts, not by enumeration")

    def _take(self, probabilities: list[float]) -> int:
        at = len(self.taken)
        choice = self._prescribed[at] if at < len(self._prescribed) else 0
        self.taken.append(choice)
        self.open.append(len(probabilities) - 1 - choice)
        self.probability *= probabilities[choice]
        return choice


def outcomes(run: Callable[[EnumeratedNoise], Result], limit: int = 1_000_000) -> Iterator[tuple[Result, float]]:
    """Call a function once per outcome of the chance that it asks for.

    Args:
        run: depends on nothing but its argument.
        limit: most outcomes.

    Yields:
        Its result and the probability of the outcome; the probabilities add up to 1.

    Raises:
        TooManyOutcomesError: there are more than ``limit``.
    """
    prescribed: list[int] = []
    for _ in range(limit):
        noise = EnumeratedNoise(prescribed)
        result = run(noise)
        yield result, noise.probability
        while noise.open and noise.open[-1] == 0:
            noise.open.pop()
        if not noise.open:
            return
        prescribed = noise.taken[: len(noise.open)]
        prescribed[-1] += 1
    raise TooManyOutcomesError(f"more than {limit} outcomes")


Law = Mapping[tuple[int, ...], float]
"""Probability per text."""


def total_variation(one: Mapping[Outcome, float], other: Mapping[Outcome, float]) -> float:
    """Return half the summed absolute difference of two laws: 0 for equal ones, 1 for disjoint ones."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def as_law(values: list[float]) -> Tensor:
    """Return ``[vocab]`` float64 probabilities proportional to non-negative values."""
    law = torch.tensor(values, dtype=torch.float64)
    return law / law.sum()
