"""The optimizers of a head's weights: AdamW for all of them, or Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from specdec_lab.distill.train_settings import TrainSettings


def make_optimizers(
    parameters: Mapping[str, nn.Parameter], settings: TrainSettings, vocabularies: Collection[int]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers, each with weights of its own; all of them follow one learning rate.

    Muon (Jordan et al. 2024, as ``torch.optim.Muon``) makes a matrix's step orthogonal. With the scale of arXiv
    2502.16982, sec. 2.2, its steps are as large as those of AdamW, so that one learning rate suits both.

    Args:
        parameters: trained ones, by name.
        vocabularies: sizes of the target's vocabulary and of the head's; weights with such an axis are embeddings and
            output layers, which Muon is not meant for.
    """
    everything = [*parameters.values()]
    matrices = [one for one in everything if settings.optimizer == "muon" and is_matrix(one, vocabularies)]
    chosen = {id(one) for one in matrices}
    rest = [one for one in everything if id(one) not in chosen]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        muon = torch.optim.Muon(
            matrices,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        found.append(muon)
    if rest:
        adamw = torch.optim.AdamW(
            rest, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        found.append(adamw)
    return found


def is_matrix(weight: Tensor, vocabularies: Collection[int]) -> bool:
    """Return whether a weight maps hidden states to hidden states."""
    return weight.ndim == 2 and min(weight.shape) > 1 and not any(size in vocabularies for size in weight.shape)
