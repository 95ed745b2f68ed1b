"""The reduced vocabulary of a draft head: the target ids that it can propose."""

from __future__ import annotations

import torch
from torch import Tensor


class DraftVocabulary:
    """Target ids by draft id, in ascending order.

    Args:
        token_ids: ascending, distinct, ``[draft_vocab]``.
        target_vocab: rows of the target's output layer.

    Raises:
        ValueError: ids that are not ascending or not the target's.
    """

    def __init__(self, token_ids: Tensor, target_vocab: int) -> None:
        if token_ids.dim() != 1 or not len(token_ids) or bool((token_ids[1:] <= token_ids[:-1]).any()):
            raise ValueError("the ids of a draft vocabulary have to be ascending and distinct")
        if int(token_ids[0]) < 0 or int(token_ids[-1]) >= target_vocab:
            raise ValueError(f"the draft vocabulary holds ids beyond the target's {target_vocab}")
        self.token_ids, self.target_vocab = token_ids.long(), target_vocab
        self._draft_ids = torch.full((target_vocab,), -1, dtype=torch.long)
        self._draft_ids[self.token_ids] = torch.arange(len(token_ids))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_whole(self) -> bool:
        """Whether no id of the target is missing."""
        return len(self) == self.target_vocab

    @classmethod
    def whole(cls, target_vocab: int) -> DraftVocabulary:
        """Return the target's own vocabulary."""
        return cls(torch.arange(target_vocab), target_vocab)

    @classmethod
    def from_offsets(cls, offsets: Tensor, target_vocab: int) -> DraftVocabulary:
        """Return the vocabulary that a checkpoint states as ``d2t``: target id = draft id + ``d2t[draft id]``."""
        return cls(torch.arange(len(offsets)) + offsets.cpu(), target_vocab)

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, always: frozenset[int] = frozenset()) -> DraftVocabulary:
        """Return the ``size`` ids that are labels most often; smaller ids first where counts are equal.

        Args:
            counts: how often each id is a label, ``[target_vocab]``.
            always: ids that are in whatever their count, such as EOS.
        """
        weights = counts.double().clone()
        weights[list(always)] = float("inf")
        best = torch.sort(weights, descending=True, stable=True).indices[:size]
        return cls(best.sort().values, len(counts))

    def offsets(self) -> Tensor:
        """Return ``d2t`` as EAGLE-3 checkpoints hold it, int64, ``[draft_vocab]``."""
        return self.token_ids - torch.arange(len(self))

    def members(self) -> Tensor:
        """Return ``t2d`` as EAGLE-3 checkpoints hold it: whether an id is in, bool, ``[target_vocab]``."""
        return self._draft_ids >= 0

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        """Return draft ids of target ids, -1 for those that are not in; any shape."""
        return self._draft_ids.to(token_ids.device)[token_ids]

    def scatter(self, values: Tensor, fill: float) -> Tensor:
        """Return values per draft id ``[..., draft_vocab]`` at their target ids, ``[..., target_vocab]``.

        It comes before any ratio of probabilities: the target's law is over all its ids.
        """
        wide = values.new_full((*values.shape[:-1], self.target_vocab), fill)
        wide[..., self.token_ids.to(values.device)] = values
        return wide
