"""Counts of right drafts, by depth and rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_lab.heads.calibration import LEAST_PROBABILITY

RANKS = tuple(range(1, 9))
"""Ranks that accuracies are reported for: whether the label is among the first so many."""


@dataclass(frozen=True)
class Ranked:
    """The first choices of a head at one depth, one entry per choice.

    Attributes:
        log_odds: of their probabilities, ``[choices]``.
        right: whether the target takes them, ``[choices]``, bool.
    """

    log_odds: Tensor
    right: Tensor


class HitCounter:
    """Counts, depth by depth, how often the text's own token is among a head's first choices.

    A chain counts as right at a depth when the first choice was right there and at every depth before it, from the same
    starting position: that is what greedy decoding of a chain accepts, if the text is the target's greedy answer.

    Attributes:
        ranked: by depth, where the head is not being trained: its first choices and whether they are right, as far as
            the text has gone on with the target's likeliest token at this depth and all before.
    """

    def __init__(self, like: Tensor) -> None:
        self._chain = torch.ones_like(like, dtype=torch.bool)
        self._started = torch.ones_like(like, dtype=torch.bool)
        self._greedy = torch.ones_like(like, dtype=torch.bool)
        self.hits: dict[str, Tensor] = {}
        self.seen: dict[str, Tensor] = {}
        self.ranked: dict[int, Ranked] = {}

    @torch.no_grad()
    def count(
        self, depth: int, marked: Tensor, student_logits: Tensor, labels: Tensor, greedy: Tensor | None = None
    ) -> None:
        """Add one depth.

        Args:
            depth: from 1.
            marked: positions with a label, ``[rows, tokens]``.
            student_logits: ``[marked, draft_vocab]``.
            labels: draft ids, -1 where the vocabulary lacks the token, ``[marked]``.
            greedy: whether the text goes on with the target's likeliest token, ``[marked]``, bool, if the head's
                choices are to be ``ranked``.
        """
        best = student_logits.topk(min(RANKS[-1], student_logits.shape[-1]), dim=-1).indices  # [marked, ranks]
        right = best == labels[:, None]
        name = f"depth{depth}"
        for rank in RANKS:
            self.hits[f"{name}/top{rank}"] = right[:, :rank].any(dim=-1).sum()
        self._chain &= marked.masked_scatter(marked, right[:, 0])
        self._started &= marked  # before a reply a chain has depths without a label, and could never be right
        self.hits[f"chain{depth}/right"], self.seen[f"chain{depth}"] = self._chain.sum(), self._started.sum()
        self.seen[name] = marked.sum()
        if greedy is not None:
            self._greedy &= marked.masked_scatter(marked, greedy)
            counted = self._greedy[marked]
            chances = student_logits[counted].float().softmax(dim=-1).gather(-1, best[counted])
            odds = torch.logit(chances.double(), eps=LEAST_PROBABILITY).float()
            self.ranked[depth] = Ranked(odds.flatten(), right[counted].flatten())
