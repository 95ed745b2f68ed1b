"""Heads that are trained with an adapter of the target: off it is not there, on it is what is merged for decoding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import pytest
import torch
from test_learners import greedy_examples

from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.learner import Learner
from specdec_lab.distill.learners.medusa2 import ADAPTER, Medusa2Learner
from specdec_lab.distill.loop import TrainPlan, train
from specdec_lab.distill.measured import measure_on
from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.errors import InputError
from specdec_lab.target import Target
from specdec_lab.targets.adapter import check_adapter
from specdec_lab.targets.hub import load_hub
from specdec_lab.targets.tiny import load_tiny

IDS = torch.tensor([[5, 9, 17, 33, 65, 3]])


def copied(target: Target) -> Target:
    """Return a target of the test's own, since an adapter changes its model for good."""
    return Target(copy.deepcopy(target.model), target.tokenizer, name="copied")


def made(target: Target, **settings: object) -> Medusa2Learner:
    counts = torch.ones(target.vocab_size, dtype=torch.long)
    return Medusa2Learner(target, counts, heads=2, draft_vocab=None, **settings)  # pyright: ignore[reportArgumentType]


def disturbed(learner: Medusa2Learner) -> Medusa2Learner:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in learner.head.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return learner


def logits(target: Target) -> torch.Tensor:
    with torch.no_grad():
        return target.model(input_ids=IDS, use_cache=False).logits


def test_off_the_target_is_what_it_was(tiny_target):
    """The teacher, and every other strategy on this target, must not see the adapter."""
    target = copied(tiny_target())
    before = logits(target)
    learner = disturbed(made(target))
    assert torch.equal(logits(target), before)
    with learner.serving():
        assert not torch.allclose(logits(target), before, atol=1e-3)
    assert torch.equal(logits(target), before)


def test_it_starts_as_no_change_and_nothing_else_is_trained(tiny_target):
    """CF-02: the adapter and the heads have gradients, also though it is off again when they are computed."""
    target = copied(tiny_target())
    examples = greedy_examples(target, count=2)
    learner = made(target)
    batch = OnlineFeatures(target, learner.feature_layers).batch(examples)
    outcome = learner(batch)
    assert float(outcome.parts["target/forward_kl"]) == pytest.approx(0.0, abs=1e-4)
    disturbed(learner)(batch).loss.backward()
    own = {id(weight) for weight in learner.head.parameters()}
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in learner.head.parameters())
    assert all(weight.grad is None for weight in target.model.parameters() if id(weight) not in own)


def test_the_target_bends_and_is_held(tiny_target, tmp_path: Path):
    """The loss falls, the law stays near the original's, and the merged adapter is the target that was measured."""
    target: Target = load_tiny(device="cpu")
    folder = tmp_path / "model"
    target.model.save_pretrained(folder)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder)
    examples = greedy_examples(target)
    learner = made(target, rank=4, blocks=2, own_output=True, losses={"forward_kl": 1.0})
    settings = TrainSettings(
        epochs=150, batch_size=8, learning_rate=6e-3, warmup_steps=5, evaluate_every=None, save_every=1000, log_every=1
    )
    source = OnlineFeatures(target, learner.feature_layers)
    measure = measure_on([example.ids[:6] for example in examples], 12, {"tree": [[0], [0, 0]]})
    result = train(TrainPlan(settings), learner, examples, examples, source, measure, tmp_path / "run")
    losses = [row["loss"] for row in result.rows if row["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]
    row = result.last("evaluation")
    assert row is not None
    assert row["parts/target/forward_kl"] < 0.5
    assert result.head is not None
    with learner.serving():
        expected = logits(target)
    merged = load_hub(str(folder), dtype="float32", device="cpu", adapter=str(result.head / ADAPTER))
    assert merged.name == "hf+adapter"
    assert torch.allclose(logits(merged), expected, atol=1e-4)
    drafter = type(learner.drafter())(merged, head=str(result.head), tree=[[0], [0, 0]])
    assert measure_on([example.ids[:6] for example in examples], 12, {})(
        cast(Learner, Served(merged, drafter))
    ) == pytest.approx({name: value for name, value in row.items() if name.startswith("real_")})


class Served:
    """Stands in for a learner: a target and a drafter as a user would load them."""

    def __init__(self, target: Target, drafter: object) -> None:
        self.target, self._drafter = target, drafter

    def serving(self):
        from contextlib import nullcontext

        return nullcontext()

    def drafter(self, **settings: object) -> object:
        return self._drafter


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path):
    """Before any weight is read, by the name of the file."""
    with pytest.raises(InputError, match=r"target.adapter=.*adapter_config.json"):
        check_adapter(str(tmp_path))
    check_adapter(None)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, tiny_target):
    """In one sentence, with the folder."""
    target = load_tiny(device="cpu")
    target.model.save_pretrained(tmp_path / "model")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(tmp_path / "model")
    other = copied(tiny_target())
    disturbed(made(other)).export(tmp_path / "head", {})
    with pytest.raises(InputError, match=r"target.adapter=.*does not fit"):
        load_hub(str(tmp_path / "model"), dtype="float32", device="cpu", adapter=str(tmp_path / "head" / ADAPTER))
