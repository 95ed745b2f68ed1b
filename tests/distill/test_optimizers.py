"""Which optimizer takes which weight: Muon the matrices of the layers, AdamW the rest, each weight one of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from specdec_lab.distill.learner import Learner
from specdec_lab.distill.learners.draft_model import DraftModelLearner
from specdec_lab.distill.learners.medusa import MedusaLearner
from specdec_lab.distill.learners.recurrent import Eagle3Learner, EagleLearner
from specdec_lab.distill.optimizers import make_optimizers
from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.distill.training_state import trained_parameters
from specdec_lab.errors import InputError
from specdec_lab.target import Target


def weights() -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    shapes = {"norm": (6,), "layer": (6, 4), "down": (4, 6), "output": (50, 6), "embedding": (90, 6), "gate": (1, 6)}
    return {name: nn.Parameter(torch.randn(*shape, generator=random)) for name, shape in shapes.items()}


def tables(parameters: dict[str, nn.Parameter]) -> list[nn.Module]:
    output = nn.Linear(6, 50, bias=False)
    output.weight = parameters["output"]
    embedding = nn.Embedding(90, 6)
    embedding.weight = parameters["embedding"]
    return [output, embedding]


def names(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> set[str]:
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {name for name, one in parameters.items() if id(one) in held}


def test_muon_takes_the_matrices_of_layers_alone():
    """An orthogonal step on an embedding or an output layer would move rare tokens as far as frequent ones."""
    parameters = weights()
    muon, adamw = make_optimizers(parameters, TrainSettings(optimizer="muon"), tables(parameters))
    assert names(muon, parameters) == {"layer", "down"}
    assert names(adamw, parameters) == {"norm", "output", "embedding", "gate"}
    (alone,) = make_optimizers(parameters, TrainSettings(), tables(parameters))
    assert isinstance(alone, torch.optim.AdamW)
    assert names(alone, parameters) == {*parameters}


@pytest.mark.parametrize("name", ["layer", "down"])
def test_a_matrix_moves_in_all_its_directions_as_far_as_adamw_would(name: str):
    """The scale of arXiv 2502.16982: root mean square 0.2 of the learning rate, whatever the gradient's size."""
    parameters = weights()
    before = parameters[name].detach().clone()
    muon, _ = make_optimizers(parameters, TrainSettings(optimizer="muon", learning_rate=0.1), tables(parameters))
    parameters[name].grad = 1e-3 * torch.randn(before.shape, generator=torch.Generator().manual_seed(1))
    muon.step()
    moved = parameters[name].detach() - before
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * 0.1, rel=0.4)
    sizes = torch.linalg.svdvals(moved)
    assert float(sizes.min() / sizes.max()) > 0.4


def test_a_head_without_matrices_is_refused():
    """It would be trained with AdamW alone and state Muon."""
    parameters = {"output": nn.Parameter(torch.zeros(50, 6)), "norm": nn.Parameter(torch.zeros(6))}
    table = nn.Linear(6, 50, bias=False)
    table.weight = parameters["output"]
    with pytest.raises(InputError, match=r"optimizer='muon': .*no matrix.*use adamw"):
        make_optimizers(parameters, TrainSettings(optimizer="muon"), [table])


LEARNERS: dict[str, Callable[[Target, Tensor], Learner]] = {
    "medusa": lambda target, counts: MedusaLearner(target, counts, heads=2, own_output=True, draft_vocab=64),
    "eagle": lambda target, counts: EagleLearner(target, counts, draft_vocab=64),
    "eagle3": lambda target, counts: Eagle3Learner(target, counts, layers=[0, 1, 2], draft_vocab=64),
    "draft_model": lambda target, counts: DraftModelLearner(
        target, counts, layers=[0, 1], own_output=True, own_embedding=True, draft_vocab=64
    ),
}
TABLES = {"medusa": 2, "eagle": 0, "eagle3": 1, "draft_model": 2}


@pytest.mark.parametrize("kind", LEARNERS)
def test_heads_name_their_tables(kind: str, tiny_target: Callable[..., Target]):
    """By their part in the head: a layer may well be as wide as the draft vocabulary."""
    target = tiny_target()
    assert target.model.config.intermediate_size == 64
    learner = LEARNERS[kind](target, torch.ones(target.vocab_size))
    assert len(learner.tables()) == TABLES[kind]
    assert all(min(w.shape) > 1 and max(w.shape) >= 64 for table in learner.tables() for w in table.parameters())
    parameters = trained_parameters(learner.head)
    muon, _ = make_optimizers(parameters, TrainSettings(optimizer="muon"), learner.tables())
    held = names(muon, parameters)
    assert not [name for name in held if "lm_head" in name or "embedding" in name or name.startswith("output")]
    assert {name for name, one in parameters.items() if one.ndim == 2} - held == {
        name for name, one in parameters.items() for table in learner.tables() if one is getattr(table, "weight", None)
    }
