"""Which optimizer takes which weight: Muon the matrices of the layers, AdamW the rest, each weight one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec_lab.distill.optimizers import make_optimizers
from specdec_lab.distill.train_settings import TrainSettings


def weights() -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    shapes = {"norm": (6,), "layer": (6, 4), "down": (4, 6), "output": (50, 6), "embedding": (90, 6), "gate": (1, 6)}
    return {name: nn.Parameter(torch.randn(*shape, generator=random)) for name, shape in shapes.items()}


def names(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> set[str]:
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {name for name, one in parameters.items() if id(one) in held}


def test_muon_takes_the_matrices_of_layers_alone():
    """An orthogonal step on an embedding or an output layer would move rare tokens as far as frequent ones."""
    parameters = weights()
    muon, adamw = make_optimizers(parameters, TrainSettings(optimizer="muon"), {50, 90})
    assert names(muon, parameters) == {"layer", "down"}
    assert names(adamw, parameters) == {"norm", "output", "embedding", "gate"}
    (alone,) = make_optimizers(parameters, TrainSettings(), {50, 90})
    assert isinstance(alone, torch.optim.AdamW)
    assert names(alone, parameters) == {*parameters}


@pytest.mark.parametrize("name", ["layer", "down"])
def test_a_matrix_moves_in_all_its_directions_as_far_as_adamw_would(name: str):
    """The scale of arXiv 2502.16982: root mean square 0.2 of the learning rate, whatever the gradient's size."""
    parameters = weights()
    before = parameters[name].detach().clone()
    muon, _ = make_optimizers(parameters, TrainSettings(optimizer="muon", learning_rate=0.1), {50, 90})
    parameters[name].grad = 1e-3 * torch.randn(before.shape, generator=torch.Generator().manual_seed(1))
    muon.step()
    moved = parameters[name].detach() - before
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * 0.1, rel=0.4)
    sizes = torch.linalg.svdvals(moved)
    assert float(sizes.min() / sizes.max()) > 0.4
