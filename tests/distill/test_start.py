"""A training that begins at another head: its weights, its vocabulary, its history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learners import SETTINGS

from specdec_lab.distill.batch import Example
from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.learner import Learner
from specdec_lab.distill.start import started
from specdec_lab.errors import InputError
from specdec_lab.target import Target

KINDS = ["medusa", "eagle", "eagle3", "draft_model"]


def made(kind: str, target: Target, counts: torch.Tensor, **changes: Any) -> Learner:
    learner_class, settings = SETTINGS[kind]
    return learner_class(target, counts, **{"draft_vocab": 40, **settings, **changes})  # pyright: ignore[reportCallIssue]


def exported(kind: str, target: Target, folder: Path, facts: Mapping[str, Any] | None = None) -> Learner:
    """Write a head with weights and a vocabulary of its own."""
    generator = torch.Generator().manual_seed(0)
    learner = made(kind, target, torch.randint(0, 100, (target.vocab_size,), generator=generator))
    with torch.no_grad():
        for weight in learner.head.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
            weight.copy_(weight.bfloat16())  # what the file holds
    learner.export(folder, facts or {"optimizer_steps": 7})
    return learner


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_others_weights_and_vocabulary(kind: str, tiny_target, tmp_path: Path):
    """CF-01: a start that silently keeps fresh weights, or whose rows stand for other tokens."""
    target: Target = tiny_target()
    other = exported(kind, target, tmp_path / "head")
    learner, facts = started(lambda t, counts: made(kind, t, counts), kind, str(tmp_path / "head"), target)
    assert facts["optimizer_steps"] == 7
    assert torch.equal(learner.vocabulary.token_ids, other.vocabulary.token_ids)
    theirs = other.head.state_dict()
    assert theirs.keys() == learner.head.state_dict().keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in learner.head.state_dict().items())
    assert {weight.dtype for weight in learner.head.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_another_size_of_vocabulary_is_refused(kind: str, tiny_target, tmp_path: Path):
    """With the value to give."""
    target: Target = tiny_target()
    exported(kind, target, tmp_path / "head")
    with pytest.raises(InputError, match=r"start=.*give head.draft_vocab="):
        started(lambda t, counts: made(kind, t, counts, draft_vocab=50), kind, str(tmp_path / "head"), target)


def test_layers_that_a_head_lacks_begin_as_doing_nothing(tiny_target, tmp_path: Path):
    """A head is made deeper without losing what it has learnt; one that is made shallower would lose it."""
    target: Target = tiny_target()
    exported("eagle", target, tmp_path / "head")
    learner, deeper = (
        started(lambda t, counts, n=n: made("eagle", t, counts, layers=n), "eagle", str(tmp_path / "head"), target)[0]
        for n in (1, 3)
    )
    batch = OnlineFeatures(target, learner.feature_layers).batch([Example("one", tuple(range(5, 29)), (True,) * 24)])
    outcome = deeper(batch)
    assert outcome.loss.item() == pytest.approx(learner(batch).loss.item(), rel=1e-5)
    outcome.loss.backward()
    moved = {name for name, weight in deeper.head.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {
        f"layers.{layer}.{part}.weight" for layer in (1, 2) for part in ("self_attn.o_proj", "mlp.down_proj")
    } <= moved
    deeper.export(tmp_path / "deeper", {})
    with pytest.raises(InputError, match=r"another shape .*layers\.2\."):
        started(lambda t, counts: made("eagle", t, counts, layers=2), "eagle", str(tmp_path / "deeper"), target)


def test_heads_that_did_not_see_the_root_begin_to_see_it(tiny_target, tmp_path: Path):
    """What they have learnt stays; the way back would lose what the root told them."""
    target: Target = tiny_target()
    exported("medusa", target, tmp_path / "head")
    without, seeing = (
        started(lambda t, counts, r=r: made("medusa", t, counts, root=r), "medusa", str(tmp_path / "head"), target)[0]
        for r in (False, True)
    )
    batch = OnlineFeatures(target, seeing.feature_layers).batch([Example("one", tuple(range(5, 29)), (True,) * 24)])
    outcome = seeing(batch)
    assert outcome.loss.item() == pytest.approx(without(batch).loss.item(), rel=1e-6)
    outcome.loss.backward()
    root = dict(seeing.head.named_parameters())["root"]
    assert root.grad is not None
    assert root.grad.any()
    seeing.export(tmp_path / "seeing", {})
    with pytest.raises(InputError, match=r"another shape .*root"):
        started(lambda t, counts: made("medusa", t, counts), "medusa", str(tmp_path / "seeing"), target)


def test_what_no_weight_tells_apart_is_compared_too(tiny_target, tmp_path: Path):
    """The same weights on other states, or with other rotary positions, are another head: it was run in silence."""
    target: Target = tiny_target()
    exported("eagle3", target, tmp_path / "head")
    layers = list(made("eagle3", target, torch.ones(target.vocab_size)).head.feature_layers)  # pyright: ignore
    with pytest.raises(InputError, match=r"its feature_layers is .* give the settings it was trained with"):
        started(
            lambda t, counts: made("eagle3", t, counts, layers=layers[::-1]), "eagle3", str(tmp_path / "head"), target
        )
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, "rope_theta": 77.0}))
    with pytest.raises(InputError, match=r"its rope_parameters is"):
        started(lambda t, counts: made("eagle3", t, counts), "eagle3", str(tmp_path / "head"), target)


def test_another_shape_is_refused(tiny_target, tmp_path: Path):
    """By the first weight that differs."""
    target: Target = tiny_target()
    exported("medusa", target, tmp_path / "head")
    with pytest.raises(InputError, match=r"start=.*another shape .*the same head"):
        started(lambda t, counts: made("medusa", t, counts, heads=3), "medusa", str(tmp_path / "head"), target)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_there_is_refused(kind: str, tiny_target, tmp_path: Path):
    """The field is the one that the user gave."""
    with pytest.raises(InputError) as refused:
        started(lambda t, counts: made(kind, t, counts), kind, str(tmp_path), tiny_target())
    assert refused.value.field == "start"


def test_heads_without_pairs_do_not_get_any_on_the_way(tiny_target, tmp_path: Path):
    """Heads learn what the pairs do not say; with others, or none, they would be right less often than before."""
    target: Target = tiny_target()
    exported("medusa", target, tmp_path / "head")
    with pytest.raises(
        InputError, match=r"start=.*beside pairs with a weight of 0.0, not 0.6; give head.transitions=0.0"
    ):
        started(lambda t, counts: made("medusa", t, counts, transitions=0.6), "medusa", str(tmp_path / "head"), target)


def test_a_refusal_names_the_settings_that_the_other_head_was_trained_with(tiny_target, tmp_path: Path):
    """One option at a time, each after the target was loaded, and at last torch's list of missing weights."""
    target: Target = tiny_target()
    own = {"_target_": "x", "blocks": 3, "root": False, "losses": {"tv": 1.0}, "draft_vocab": 40}
    exported("medusa", target, tmp_path / "head", {"training": {"head": own}})
    settings = {"_target_": "x", "blocks": 2, "root": True, "losses": {"kl": 1.0}, "draft_vocab": 40}
    with pytest.raises(InputError, match=r"; it was trained with head.blocks=3 head.root=false, so give these$"):
        started(
            lambda t, counts: made("medusa", t, counts, blocks=2, root=True),
            "medusa",
            str(tmp_path / "head"),
            target,
            settings,
        )


def test_none_is_shipped_for_another_target(tiny_target):
    """The word means the default target's heads."""
    with pytest.raises(InputError, match=r"start='shipped': no medusa head comes with the package"):
        started(lambda t, counts: made("medusa", t, counts), "medusa", "shipped", tiny_target())
