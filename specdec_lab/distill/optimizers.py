"""The optimizers of a head's weights: AdamW for all of them, or Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    kept = {id(weight) for table in tables for weight in table.parameters()}
    everything = [*parameters.values()]
    matrices = [one for one in everything if settings.optimizer == "muon" and is_matrix(one) and id(one) not in kept]
    if settings.optimizer == "muon" and not matrices:
        raise InputError("optimizer", "muon", "this head has no matrix between hidden states; use adamw")
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


def is_matrix(weight: Tensor) -> bool:
    """Return whether a weight has a step that can be made orthogonal."""
    return weight.ndim == 2 and min(weight.shape) > 1
