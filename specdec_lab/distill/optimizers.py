"""The optimizers of a head's weights: AdamW for all of them, or Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress

import torch
from torch import Tensor, nn

from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.errors import InputError


def make_optimizers(
    parameters: Mapping[str, nn.Parameter], settings: TrainSettings, tables: Iterable[nn.Module]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers, each with weights of its own; all of them follow one learning rate.

    Muon (Jordan et al. 2024, as ``torch.optim.Muon``) makes a matrix's step orthogonal. With the scale of arXiv
    2502.16982, sec. 2.2, its steps are as large as those of AdamW, so that one learning rate suits both.

    Args:
        parameters: trained ones, by name.
        tables: embeddings and output layers among them, whose rows are tokens; Muon is not meant for them.

    Raises:
        InputError: ``optimizer=muon`` and there is no other matrix.
    """
    everything = [*parameters.values()]
    if settings.optimizer == "adamw":
        return [_adamw(everything, settings)]
    kept = {id(weight) for table in tables for weight in table.parameters()}
    stepped = [is_matrix(one) and id(one) not in kept for one in everything]
    if not any(stepped):
        raise InputError("optimizer", "muon", "this head has no matrix between hidden states; use adamw")
    muon = torch.optim.Muon(
        list(compress(everything, stepped)),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [one for one, by_muon in zip(everything, stepped, strict=True) if not by_muon]
    return [muon, _adamw(rest, settings)] if rest else [muon]


def _adamw(weights: list[nn.Parameter], settings: TrainSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        weights, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )


def is_matrix(weight: Tensor) -> bool:
    """Return whether a weight has a step that can be made orthogonal."""
    return weight.ndim == 2 and min(weight.shape) > 1
