"""Counts of right drafts, by depth and rank."""

from __future__ import annotations

import torch
from torch import Tensor

RANKS = tuple(range(1, 9))
"""Ranks that accuracies are reported for: whether the label is among the first so many."""


class HitCounter:
    """Counts, depth by depth, how often the text's own token is among a head's first choices.

    A chain counts as right at a depth when the first choice was right there and at every depth before it, from the same
    starting position: that is what greedy decoding of a chain accepts, if the text is the target's greedy answer.
    """

    def __init__(self, like: Tensor) -> None:
        self._chain = torch.ones_like(like, dtype=torch.bool)
        self._started = torch.ones_like(like, dtype=torch.bool)
        self.hits: dict[str, Tensor] = {}
        self.seen: dict[str, Tensor] = {}

    @torch.no_grad()
    def count(self, depth: int, marked: Tensor, student_logits: Tensor, labels: Tensor) -> None:
        """Add one depth.

        Args:
            depth: from 1.
            marked: positions with a label, ``[rows, tokens]``.
            student_logits: ``[marked, draft_vocab]``.
            labels: draft ids, -1 where the vocabulary lacks the token, ``[marked]``.
        """
        best = student_logits.topk(min(RANKS[-1], student_logits.shape[-1]), dim=-1).indices  # [marked, ranks]
        right = best == labels[:, None]
        name = f"depth{depth}"
        for rank in RANKS:
            self.hits[f"{name}/top{rank}"] = right[:, :rank].any(dim=-1).sum()
        first = torch.zeros_like(self._chain)
        first[marked] = right[:, 0]
        self._chain &= first
        self._started &= marked  # before a reply a chain has depths without a label, and could never be right
        self.hits[f"chain{depth}/right"], self.seen[f"chain{depth}"] = self._chain.sum(), self._started.sum()
        self.seen[name] = marked.sum()
