"""Each kind of head learns: what it is shown it can repeat, in simulation and in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heads_at_hand import greedy_continuation

from specdec_lab.distill.batch import Example
from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.learner import Learner
from specdec_lab.distill.learners.draft_model import DraftModelLearner
from specdec_lab.distill.learners.medusa import MedusaLearner
from specdec_lab.distill.learners.recurrent import Eagle3Learner, EagleLearner
from specdec_lab.distill.loop import TrainPlan, train
from specdec_lab.distill.measured import measure_on
from specdec_lab.distill.train_settings import TrainSettings
from specdec_lab.target import Target

SETTINGS: dict[str, tuple[type[Learner], dict[str, Any]]] = {
    "medusa": (MedusaLearner, {"heads": 2, "blocks": 2, "own_output": True}),
    "eagle": (EagleLearner, {"regression": 0.1}),
    "eagle3": (Eagle3Learner, {"layers": [0, 1, 2]}),
    "draft_model": (DraftModelLearner, {"layers": [0]}),
}


def greedy_examples(target: Target, count: int = 8, tokens: int = 20) -> list[Example]:
    """Return texts whose second part is the target's own greedy answer to the first."""
    generator = torch.Generator().manual_seed(3)
    examples = []
    for at in range(count):
        prompt = torch.randint(5, target.vocab_size - 1, (6,), generator=generator)
        answer = greedy_continuation(target, prompt, tokens)
        ids = (*prompt.tolist(), *answer)
        examples.append(Example(f"{at}/0/0", ids, (False,) * 6 + (True,) * tokens))
    return examples


def made(kind: str, target: Target, examples: list[Example]) -> Learner:
    learner_class, settings = SETTINGS[kind]
    counts = torch.bincount(torch.tensor([i for e in examples for i in e.ids]), minlength=target.vocab_size)
    return learner_class(target, counts, draft_vocab=None, **settings)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("kind", SETTINGS)
def test_eight_texts_can_be_learnt_by_heart(kind: str, tiny_target, tmp_path: Path):
    """TD-16: labels, features, losses and optimizer have to fit, and the engine accepts what the simulation promised."""
    target: Target = tiny_target()
    examples = greedy_examples(target)
    learner = made(kind, target, examples)
    assert learner.kind == kind
    settings = TrainSettings(
        epochs=300, batch_size=8, learning_rate=6e-3, warmup_steps=5, evaluate_every=None, save_every=1000, log_every=100
    )
    chain = {"tree": [[0], [0, 0]]} if kind == "medusa" else {"k": 2} if kind == "draft_model" else {}
    if kind.startswith("eagle"):
        chain = {"width": 1, "branches": 1, "depth": 2, "min_probability": 0.0}
    measure = measure_on([example.ids[:6] for example in examples], 20, chain)
    result = train(
        TrainPlan(settings),
        learner,
        examples,
        examples,
        OnlineFeatures(target, learner.feature_layers),
        measure,
        tmp_path,
    )
    row = result.last("evaluation")
    assert row is not None
    assert row["accuracy/depth1/top1"] > 0.9
    if kind != "draft_model":  # its simulation knows one depth
        assert row["accuracy/depth2/chain"] > 0.8
        assert row["simulated_acceptance_length"] - 1 >= 1.7
    assert row["real_acceptance_length"] > 2.4
    assert row["real_accepted/depth1"] == pytest.approx(row["accuracy/depth1/top1"], abs=0.1)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_head_comes_back_from_its_folder_with_the_same_drafts(kind: str, tiny_target, tmp_path: Path):
    """CF-01: weights that stay random after loading."""
    target: Target = tiny_target()
    examples = greedy_examples(target, count=4)
    learner = made(kind, target, examples)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in learner.head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            parameter.copy_(parameter.bfloat16())  # what the file holds
    folder = tmp_path / "head"
    learner.export(folder, {"made_of": "noise"})
    flat = {"verify_ms": {1: 1.0, 512: 1.0}}
    field = "model" if kind == "draft_model" else "head"
    of_kind = {"kind": kind} if kind.startswith("eagle") else {}
    ours = learner.drafter(**flat)
    loaded = type(ours)(target, **{field: str(folder)}, **of_kind, **flat)  # pyright: ignore[reportCallIssue]
    prompts = [example.ids[:9] for example in examples]
    assert drafts(target, ours, prompts) == drafts(target, loaded, prompts)


def drafts(target: Target, drafter, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    from specdec_lab.decode import Request, speculative_decode

    found = []
    for progress in speculative_decode(target, drafter, [Request(prompt, 12) for prompt in prompts]):
        if progress.generation is not None:
            assert progress.generation.error is None
            found += [one.tokens + one.parents for one in progress.generation.rounds]
    return found


@pytest.mark.parametrize("kind", SETTINGS)
def test_only_the_head_is_trained(kind: str, tiny_target):
    """CF-02: the frozen target in optimizer and checkpoint."""
    target: Target = tiny_target()
    learner = made(kind, target, greedy_examples(target, count=2))
    frozen = {id(parameter) for parameter in target.model.parameters()}
    assert not any(id(parameter) in frozen for parameter in learner.parameters())
    assert {name.partition(".")[0] for name, _ in learner.named_parameters()} == {"head"}
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    source = OnlineFeatures(target, learner.feature_layers)
    learner(source.batch(greedy_examples(target, count=2))).loss.backward()
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert all(parameter.grad is not None for parameter in learner.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.state_dict().items())


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_row_without_labels_costs_nothing(kind: str, tiny_target):
    """TD-08: a mean over nothing is NaN."""
    target: Target = tiny_target()
    learner = made(kind, target, greedy_examples(target, count=2))
    empty = Example("9/0/0", tuple(range(5, 20)), (False,) * 15)
    outcome = learner(OnlineFeatures(target, learner.feature_layers).batch([empty]))
    assert float(outcome.loss) == 0.0
    assert all(value.isfinite().all() for value in outcome.parts.values())
