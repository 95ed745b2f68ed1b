"""What a head is trained on: texts with those tokens marked that serve as labels, and what is predicted where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One text to train on.

    Attributes:
        key: where it comes from, unique within its data: ``question_id/turn/sample``.
        ids: the rendered conversation, ``[tokens]``.
        supervised: per token, whether it serves as a label: the target wrote it, or prompts are learnt too,
            ``[tokens]``.
    """

    key: str
    ids: tuple[int, ...]
    supervised: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.supervised):
            raise ValueError(f"{self.key}: {len(self.ids)} ids and {len(self.supervised)} marks")

    @property
    def labels(self) -> int:
        """Tokens that may serve as labels."""
        return sum(self.supervised)


@dataclass(frozen=True)
class Batch:
    """Some texts side by side, padded on the right; padding is never supervised.

    Attributes:
        ids: ``[rows, tokens]``.
        supervised: see ``Example``, ``[rows, tokens]``, bool.
        lengths: tokens of each row without padding, ``[rows]``.
        features: the target's hidden states at each token, ``{layer: [rows, tokens, hidden]}``, layers counted as
            ``Drafter.feature_layers`` counts them.
        keys: of the rows.
    """

    ids: Tensor
    supervised: Tensor
    lengths: Tensor
    features: dict[int, Tensor]
    keys: tuple[str, ...] = ()

    @property
    def labels(self) -> int:
        """Supervised tokens: what sums of losses are divided by, whatever head, accumulation or process count."""
        return int(self.supervised.sum())

    def labels_at(self, offset: int) -> tuple[Tensor, Tensor]:
        """Return what is to be predicted at each position, ``offset`` tokens further on, and where that is a label.

        The mark moves with the label: position *t* counts when token *t + offset* is marked, so that the
        first token of a reply is learnt from the end of the prompt, and nothing is learnt past the end.

        Returns:
            Token ids, ``[rows, tokens]`` (0 where there is none), and marks, ``[rows, tokens]``, bool.
        """
        return ahead(self.ids, offset), ahead(self.supervised, offset)


def ahead(values: Tensor, offset: int) -> Tensor:
    """Return ``values[:, t + offset]`` at ``[:, t]``, zero (false) past the end; further axes stay as they are."""
    moved = torch.zeros_like(values)
    kept = max(0, values.shape[1] - offset)
    moved[:, :kept] = values[:, offset:]
    return moved


def collate(examples: Sequence[Example], features: dict[int, Tensor] | None = None) -> Batch:
    """Pad examples to the longest; ``features`` are ``{layer: [rows, tokens, hidden]}`` of the same width."""
    width = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    supervised = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        supervised[row, : len(example.ids)] = torch.tensor(example.supervised)
    lengths = torch.tensor([len(example.ids) for example in examples])
    return Batch(ids, supervised, lengths, features or {}, tuple(example.key for example in examples))
