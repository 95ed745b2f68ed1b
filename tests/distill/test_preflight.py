"""Each check before training sees the fault that it is there for, says it in one sentence, and passes what is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_models import tiny_model
from torch import Tensor, nn

from specdec_lab.chat import render_chat
from specdec_lab.distill import preflight
from specdec_lab.distill.batch import Batch, Example, ahead, collate
from specdec_lab.distill.features import FeatureSource, OnlineFeatures
from specdec_lab.distill.learner import Learner, Outcome
from specdec_lab.distill.memory import activation_bytes, check_memory
from specdec_lab.distill.preflight import (
    PreflightError,
    PreflightReport,
    PreflightSettings,
    Rendering,
    check_bos,
    check_features,
    check_labels,
    check_marks,
    evenly,
    run_preflight,
)
from specdec_lab.drafters.base import Drafter
from specdec_lab.errors import InputError, SpecdecError, UnsupportedModelError
from specdec_lab.target import Target
from specdec_lab.targets.tiny import load_tiny

OURS = Rendering("tokenizer-a", "template-a")
SETTINGS = PreflightSettings(batch_size=2)


class LinearLearner(Learner):
    """Predicts the tokens two and three further on with one linear layer each."""

    kind = "linear"
    feature_layers = (-1,)
    offsets = (2, 3)

    def __init__(self, target: Target, known: Sequence[int] | None = None) -> None:
        super().__init__(target)
        hidden = target.model.config.get_text_config().hidden_size
        self.head = nn.ModuleList([nn.Linear(hidden, target.vocab_size) for _ in self.offsets])
        self.known = known

    def forward(self, batch: Batch) -> Outcome:
        loss = torch.zeros(())
        for offset, layer in zip(self.offsets, self.head.children(), strict=True):
            labels, marks = batch.labels_at(offset)
            loss = loss + nn.functional.cross_entropy(
                nn.functional.dropout(layer(batch.features[-1].float()))[marks], labels[marks], reduction="sum"
            )
        return Outcome(loss)

    def coverage(self, batch: Batch) -> float:
        if self.known is None:
            return 1.0
        labels = batch.ids[batch.supervised]
        return float(torch.isin(labels, torch.tensor(self.known)).float().mean())

    def drafter(self, **settings: Any) -> Drafter:
        raise NotImplementedError

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        raise NotImplementedError


class ChangedBatches:
    """A source with a fault."""

    def __init__(self, source: FeatureSource, change: Callable[[Batch], Batch]) -> None:
        self.source, self.layers, self.change = source, source.layers, change

    def batch(self, examples: Sequence[Example]) -> Batch:
        return self.change(self.source.batch(examples))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_tiny(device="cpu")


def conversations(target: Target, count: int = 7) -> list[Example]:
    """Rendered prompts of different lengths with replies of the target's vocabulary."""
    assert target.tokenizer is not None
    rng = random.Random(0)
    made: list[Example] = []
    for number in range(count):
        prompt = render_chat(target.tokenizer, [{"role": "user", "content": "Tell me about " + "this " * number}])
        reply = tuple(rng.randrange(5, 300) for _ in range(rng.randint(3, 30)))
        made.append(Example(f"{number}/0/0", (*prompt, *reply), (*[False] * len(prompt), *[True] * len(reply))))
    return made


def checked(
    target: Target,
    examples: Sequence[Example],
    *,
    change: Callable[[Batch], Batch] = lambda batch: batch,
    known: Sequence[int] | None = None,
    settings: PreflightSettings = SETTINGS,
    data: Rendering = OURS,
    report: Callable[[str], None] = lambda _: None,
) -> PreflightReport:
    learner = LinearLearner(target, known)
    source = ChangedBatches(OnlineFeatures(target, learner.feature_layers), change)
    return run_preflight(learner, examples, source, settings, report, data=data, target=OURS)


# --- right data -----------------------------------------------------------------------------------------------------


def test_right_data_passes_and_every_check_says_so(target: Target):
    examples = conversations(target)
    unmarked = Example("unmarked", examples[0].ids, (False,) * len(examples[0].ids))
    lines: list[str] = []
    report = checked(target, [*examples, unmarked], report=lines.append)
    assert [line.split(":")[0] for line in lines] == [
        "marks",
        "labels",
        "template",
        "features",
        "draft vocabulary",
        "memory",
    ]
    labels = sum(example.labels for example in examples)  # prompts are longer than the offset: each mark is a label
    tokens = sum(len(example.ids) for example in (*examples, unmarked))
    assert (report.marks.texts, report.marks.without) == (8, 1)
    assert (report.marks.labels, report.marks.tokens) == (labels, tokens)
    assert f"{100 * labels / tokens:.1f} %" in lines[0]
    assert "8 of 8 texts start with BOS" in lines[2]
    assert report.coverage == 1
    assert 0 < report.features_off[-1] < 1e-4
    assert report.logits_off < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_no_fault(dtype: Any):
    """Rounding of another shape of forward must not stop a training."""
    low = load_tiny(dtype=dtype, device="cpu")
    report = checked(low, conversations(low))
    assert 1e-4 < report.features_off[-1] < preflight.STATES_WITHIN[low.model.dtype]


def test_nothing_is_left_behind(target: Target):
    """Neither gradients nor draws of torch's generator: a run with the checks equals one without."""
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    learner = LinearLearner(target)
    torch.manual_seed(1)
    run_preflight(
        learner, conversations(target), OnlineFeatures(target, (-1,)), SETTINGS, lambda _: None, data=OURS, target=OURS
    )
    assert torch.equal(torch.rand(3), wanted)
    assert all(weight.grad is None for weight in learner.parameters())
    assert learner.training


# --- marks and labels -----------------------------------------------------------------------------------------------


def test_no_text_and_no_mark():
    """Guards TD-14: a wrong template leaves every mark at zero, and nothing is learnt."""
    with pytest.raises(InputError, match="no text"):
        check_marks([], 1)
    with pytest.raises(InputError, match=r"3 texts.*chat template"):
        check_marks([Example(f"{at}", (5, 6), (False, False)) for at in range(3)], 1)


def test_marks_before_the_first_label():
    """Guards TD-08: the only mark of the text stands where no position of the head has its label."""
    fine = Example("fine", (5, 6, 7, 8), (False, False, True, True))
    early = Example("early", (5, 6, 7, 8), (False, True, False, False))
    assert check_marks([fine, early], 1).labels == 3
    with pytest.raises(InputError, match="early"):
        check_marks([fine, early], 2)


def shifted_marks(batch: Batch) -> Batch:
    return replace(batch, supervised=ahead(batch.supervised, 1))


def shifted_ids(batch: Batch) -> Batch:
    return replace(batch, ids=ahead(batch.ids, 1))


def padded_left(batch: Batch) -> Batch:
    def moved(values: Tensor) -> Tensor:
        width = values.shape[1]
        rows = [row.roll(width - int(length), 0) for row, length in zip(values, batch.lengths, strict=True)]
        return torch.stack(rows)

    return replace(batch, ids=moved(batch.ids), supervised=moved(batch.supervised))


@pytest.mark.parametrize("change", [shifted_marks, shifted_ids, padded_left])
def test_labels_that_are_not_the_texts_own(change: Callable[[Batch], Batch], target: Target):
    """Guards TD-01 and TD-02: mask and label move together, and each depth has its own offset."""
    with pytest.raises(PreflightError, match="shifted"):
        checked(target, conversations(target), change=change)


def test_a_batch_that_moves_only_the_ids(monkeypatch: pytest.MonkeyPatch):
    """Guards TD-01 in the batch itself: ids shifted to be labels, marks left where they were."""
    examples = [Example("counting", tuple(range(10)), tuple(5 <= at <= 8 for at in range(10)))]
    batch = collate(examples)
    check_labels(batch, examples, (1, 2))
    monkeypatch.setattr(Batch, "labels_at", lambda self, offset: (ahead(self.ids, offset), self.supervised))
    with pytest.raises(PreflightError, match=r"1 tokens after position 4 is None in the batch and 5 in the text"):
        check_labels(batch, examples, (1, 2))


def test_a_label_that_is_the_input(target: Target):
    examples = conversations(target)
    with pytest.raises(PreflightError, match="offset 0"):
        check_labels(collate(examples), examples, (0, 1))


# --- template and BOS -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "what"),
    [(Rendering("tokenizer-b", "template-a"), "tokenizer"), (Rendering("tokenizer-a", "template-b"), "chat template")],
)
def test_another_tokenizer_or_template(data: Rendering, what: str, target: Target):
    """Guards TD-16: what the head is trained on is rendered as what it will draft for."""
    with pytest.raises(InputError, match=f"another {what}"):
        checked(target, conversations(target), data=data)


def test_bos_twice(target: Target):
    """Guards TV-05: the template writes BOS and the tokenizer adds one."""
    examples = conversations(target)
    assert check_bos(examples, 1) == len(examples)
    assert check_bos(examples, None) == 0
    doubled = Example("doubled", (1, *examples[0].ids), (False, *examples[0].supervised))
    with pytest.raises(InputError, match=r"doubled.*BOS twice"):
        checked(target, [*examples, doubled])
    inside = Example("inside", (*examples[0].ids, 1, 1, 7), (*examples[0].supervised, False, False, True))
    assert check_bos([inside], 1) == 1


# --- features -------------------------------------------------------------------------------------------------------


def test_features_of_the_wrong_position(target: Target):
    """Guards CP-08: states one position late still train, to a head that is never right when it drafts."""

    def late(batch: Batch) -> Batch:
        return replace(batch, features={layer: states.roll(1, 1) for layer, states in batch.features.items()})

    with pytest.raises(PreflightError, match="layer -1"):
        checked(target, conversations(target), change=late)


def test_features_before_the_final_norm(target: Target):
    learner = LinearLearner(target)
    examples = conversations(target)
    batch = OnlineFeatures(target, (-1, 1)).batch(examples)
    swapped = replace(batch, features={-1: batch.features[1]})
    with pytest.raises(PreflightError, match="layer -1"):
        check_features(learner, swapped, examples)


def test_features_that_are_not_finite(target: Target):
    def broken(batch: Batch) -> Batch:
        return replace(batch, features={-1: batch.features[-1] * float("nan")})

    with pytest.raises(PreflightError, match="nan"):
        checked(target, conversations(target), change=broken)


def test_a_layer_that_the_source_does_not_bring(target: Target):
    with pytest.raises(InputError, match=r"features=\[-1\]"):
        checked(target, conversations(target), change=lambda batch: replace(batch, features={}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_caps_its_logits(dtype: torch.dtype):
    """A head that is taught by the output layer alone would learn another law than the target's."""
    model = tiny_model("gemma2").to(dtype)  # type: ignore[arg-type]
    output = model.get_output_embeddings()
    assert output is not None
    with torch.no_grad():
        output.weight.mul_(10)  # logits of about 10, as real ones
    capped = Target(model)
    examples = [Example("0", tuple(range(3, 30)), (False, *[True] * 26))]
    learner = LinearLearner(capped)
    batch = OnlineFeatures(capped, (-1,)).batch(examples)
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping=30"):
        check_features(learner, batch, examples)


def test_targets_without_a_cap_pass(architecture: str):
    """Sliding windows, scaled embeddings and tied output layers are no reason to refuse."""
    if architecture == "gemma2":
        pytest.skip("caps its logits")
    plain = Target(tiny_model(architecture))
    examples = [Example("0", tuple(range(3, 30)), (False, *[True] * 26)), Example("1", (9, 8, 7), (False, True, True))]
    batch = OnlineFeatures(plain, (-1,)).batch(examples)
    features_off, logits_off = check_features(LinearLearner(plain), batch, examples)
    assert features_off[-1] < 1e-4
    assert logits_off < 1e-5


# --- draft vocabulary and memory ------------------------------------------------------------------------------------


def test_a_draft_vocabulary_that_misses_the_labels(target: Target):
    examples = conversations(target)
    labels = [
        token for example in examples for token, mark in zip(example.ids, example.supervised, strict=True) if mark
    ]
    known = sorted(set(labels))[::2]
    share = sum(token in known for token in labels) / len(labels)
    report = checked(target, examples, known=known, settings=PreflightSettings(batch_size=2, min_coverage=share - 0.01))
    assert report.coverage == pytest.approx(share, abs=1e-6)
    with pytest.raises(InputError, match=rf"min_coverage=.*{100 * share:.1f} %"):
        checked(target, examples, known=known, settings=PreflightSettings(batch_size=2, min_coverage=share + 0.01))


def test_memory_is_that_of_the_longest_texts(target: Target):
    """The largest batch is known before the first step, not found in the middle of an epoch."""
    examples = conversations(target)
    longest = max(len(example.ids) for example in examples)
    learner = LinearLearner(target)
    source = OnlineFeatures(target, (-1,))
    memory = check_memory(learner, examples, source, 3)
    weights = 2 * (64 + 1) * target.vocab_size * 4
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, weights, 2 * weights)
    assert memory.features == 3 * longest * 64 * 4
    logits = 2 * longest * target.vocab_size * 4  # of both depths; dropout's mask and the log-softmax are kept
    assert logits < memory.activations / 3 < 3 * logits
    assert memory.needed == memory.gradients + memory.optimizer + memory.activations + memory.features
    with pytest.raises(InputError, match=r"batch_size=100000000.*accumulation"):
        check_memory(learner, examples, source, 100_000_000)


def test_frozen_weights_take_no_gradient(target: Target):
    learner = LinearLearner(target)
    next(learner.head.parameters()).requires_grad_(False)
    memory = check_memory(learner, conversations(target), OnlineFeatures(target, (-1,)), 1)
    assert memory.weights - memory.gradients == 64 * target.vocab_size * 4
    assert memory.optimizer == 2 * memory.gradients


def test_what_a_batch_needs_once_is_counted_once(target: Target):
    """A reduced output layer is kept for the backward of the whole batch, not for each of its texts."""

    class Shared(LinearLearner):
        def forward(self, batch: Batch) -> Outcome:
            shared = torch.ones(64, 64)  # 16 kB
            return Outcome((batch.features[-1] @ next(self.head.parameters()).T @ shared.repeat(5, 1)).tanh().sum())

    examples = conversations(target)
    longest = max(len(example.ids) for example in examples)
    memory = check_memory(Shared(target), examples, OnlineFeatures(target, (-1,)), 10)
    assert memory.activations == 5 * 64 * 64 * 4 + 10 * longest * 64 * 4


def test_activations_count_neither_weights_nor_features(target: Target):
    class Product(LinearLearner):
        def forward(self, batch: Batch) -> Outcome:
            return Outcome((batch.features[-1] @ next(self.head.parameters()).T).sum())

    (example, *_) = conversations(target)
    assert activation_bytes(Product(target), OnlineFeatures(target, (-1,)).batch([example])) == 0


# --- the order, and settings ----------------------------------------------------------------------------------------


def test_the_first_fault_in_order_is_the_one_that_is_named(target: Target):
    """Someone who mends one fault after another meets the cheap ones first, memory last."""
    examples = conversations(target)
    other = Rendering("other", "other")
    short = PreflightSettings(batch_size=10**9, min_coverage=1.0)
    unmarked = [Example(example.key, example.ids, (False,) * len(example.ids)) for example in examples]

    def late(batch: Batch) -> Batch:
        return replace(batch, features={layer: states.roll(1, 1) for layer, states in batch.features.items()})

    def all_wrong(batch: Batch) -> Batch:
        return shifted_marks(late(batch))

    steps: list[tuple[dict[str, Any], str]] = [
        ({"examples": unmarked, "change": all_wrong, "data": other, "known": [1], "settings": short}, "marked"),
        ({"examples": examples, "change": all_wrong, "data": other, "known": [1], "settings": short}, "shifted"),
        ({"examples": examples, "change": late, "data": other, "known": [1], "settings": short}, "tokenizer"),
        ({"examples": examples, "change": late, "known": [1], "settings": short}, "layer -1"),
        ({"examples": examples, "known": [1], "settings": short}, "min_coverage"),
        ({"examples": examples, "settings": short}, "batch_size"),
    ]
    for arguments, word in steps:
        with pytest.raises(SpecdecError, match=word) as caught:
            checked(target, **arguments)
        assert "\n" not in str(caught.value)


def test_settings_are_checked():
    for wrong in ({"batch_size": 0}, {"batch_size": 1, "min_coverage": 1.5}, {"batch_size": 1, "texts": 0}):
        with pytest.raises(ValidationError):
            PreflightSettings(**wrong)


def test_texts_are_chosen_from_all_of_the_data():
    examples = [Example(f"{at}", (5,), (True,)) for at in range(10)]
    assert [example.key for example in evenly(examples, 4)] == ["0", "2", "5", "7"]
    assert evenly(examples, 20) == examples
