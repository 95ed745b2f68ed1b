"""One row's candidates of an EAGLE round: what is run next, what it sees, and which of its children are expanded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_lab.drafters.base import DraftContext

if TYPE_CHECKING:
    from specdec_lab.drafters.eagle import EagleDrafter


@dataclass
class Feed:
    """What one row runs next.

    Attributes:
        states: inputs, ``[fed, hidden]``.
        start: slot of the first one; the others follow.
        ancestors: slots that each one sees besides the committed ones and its own; ``None``: a chain of the text.
    """

    states: Tensor
    tokens: list[int]
    positions: list[int]
    start: int
    ancestors: list[list[int]] | None
    committed: int = 0

    def mark(self, seen: Tensor) -> None:
        """Write what each one sees, ``seen [width, visible]``."""
        count = len(self.tokens)
        seen[:count, 0] = False
        if self.ancestors is None:
            seen[:count, : self.start] = True
            seen[:count, self.start : self.start + count] = torch.ones(count, count, dtype=torch.bool).tril_()
            return
        seen[:count, : self.committed] = True
        for at, slots in enumerate(self.ancestors):
            seen[at, [*slots, self.start + at]] = True


@dataclass
class Growth:
    """One row's candidates while they are drafted.

    Attributes:
        tokens: of the candidates, the root first; ``parents`` and ``values`` go with it.
        frontier: candidates that the current feed runs, ``[fed]``; the root for the first feed.
        slots: of the candidates that were run, with those of their ancestors, the root's excluded.
    """

    context: DraftContext
    feed: Feed
    depth: int
    committed: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=lambda: [-1])
    values: list[float] = field(default_factory=lambda: [1.0])
    ranks: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    frontier: list[int] = field(default_factory=lambda: [0])
    slots: dict[int, list[int]] = field(default_factory=lambda: {0: []})
    level: int = 0
    used: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        self.tokens = [self.context.tokens[-1]]
        self.used = self.committed

    def drafting(self, states: Tensor) -> Tensor:
        """Return those of the states just made that are drafted from: of a catch-up the last, then all."""
        return states[-1:] if self.level == 0 else states

    def extend(
        self, states: Tensor, tokens: list[list[int]], chances: list[list[float]], drafter: EagleDrafter
    ) -> None:
        """Add the children of the frontier, and choose which of them to run next."""
        states = self.drafting(states)
        self.level += 1
        calibration = drafter.calibrated(self.context)
        born: list[tuple[int, int]] = []  # (child, index of its parent among the states)
        for at, node in enumerate(self.frontier):
            for rank in self._ranks(node, drafter):
                child = len(self.tokens)
                self.tokens.append(tokens[at][rank])
                self.parents.append(node)
                chance = chances[at][rank]
                self.values.append(self.values[node] * min(1.0, calibration.chance(chance, self.level)))
                self.ranks.append((*self.ranks[node], rank))
                born.append((child, at))
        if self.level == self.depth:
            self.finished = True
            return
        eos_ids = drafter.target.eos_ids
        run = [(child, at) for child, at in born if self._runs(child, drafter, eos_ids)]
        if drafter.static is None:
            run = sorted(run, key=lambda one: -self.values[one[0]])[: drafter.width]
        if not run:
            self.finished = True
            return
        ancestors = [self.slots[self.parents[child]] for child, _ in run]
        self.frontier = [child for child, _ in run]
        chosen = states[torch.tensor([at for _, at in run], device=states.device)]
        position = self.committed + self.level - 1
        fed = [self.tokens[child] for child in self.frontier]
        self.feed = Feed(chosen, fed, [position] * len(run), self.used, ancestors, self.committed)
        for at, child in enumerate(self.frontier):
            self.slots[child] = [*ancestors[at], self.used + at]
        self.used += len(run)

    def _ranks(self, node: int, drafter: EagleDrafter) -> Sequence[int]:
        if drafter.static is None:
            return range(drafter.branches)
        return drafter.static.children.get(self.ranks[node], ())

    def _runs(self, child: int, drafter: EagleDrafter, eos_ids: frozenset[int]) -> bool:
        """Whether a candidate's own children may be drafted: never after EOS, nor without hope."""
        if self.tokens[child] in eos_ids or self.values[child] < drafter.min_probability:
            return False
        return drafter.static is None or self.ranks[child] in drafter.static.children
