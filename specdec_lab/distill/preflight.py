"""Checks before the first training step: each failure is one sentence, instead of a head that learnt something else.

They run in a fixed order, cheap ones first: marks, labels, template and BOS, features, draft vocabulary, memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from specdec_lab.config import PositiveInt
from specdec_lab.distill.batch import Batch, Example, collate
from specdec_lab.distill.feature_cache import size_text
from specdec_lab.distill.features import FeatureSource, on_device
from specdec_lab.distill.learner import Learner
from specdec_lab.distill.memory import Memory, check_memory
from specdec_lab.errors import InputError, SpecdecError, UnsupportedModelError, listed
from specdec_lab.target import Target
from specdec_lab.tree import chain

COMPARED_TOKENS = 128
"""Tokens of a text whose features and logits are compared with those of decoding."""

COVERAGE_TEXTS = 1024
"""Texts, spread evenly over the data, that the coverage of the draft vocabulary is measured on."""

STATES_WITHIN = {torch.float32: 1e-3, torch.float16: 0.015, torch.bfloat16: 0.06}
"""Relative difference of states that another shape of forward explains, by dtype.

In bfloat16 a 30-layer target differs by 0.02 to 0.03 between shapes, and by 0.2 from its own state one token earlier.
"""

LOGITS_WITHIN = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The same for the output layer alone, which is applied to the very states that the model applied it to."""

_LOGIT_FACTORS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PreflightError(SpecdecError):
    """Labels or features that are not what decoding will see: a fault of the data's source, of no single setting."""


class PreflightSettings(BaseModel):
    """What the checks need to know about the training.

    Attributes:
        batch_size: texts per forward of the head.
        texts: how many texts are compared token by token.
        min_coverage: least share of the labels that the draft vocabulary must hold.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: PositiveInt
    texts: PositiveInt = 4
    min_coverage: Annotated[float, Field(ge=0, le=1)] = 0.8


@dataclass(frozen=True)
class Rendering:
    """How texts became token ids.

    Attributes:
        tokenizer: fingerprint of the tokenizer.
        template: hash of the chat template.
    """

    tokenizer: str
    template: str


@dataclass(frozen=True)
class Marks:
    """What the supervised marks of the data come to.

    Attributes:
        texts: how many there are.
        without: how many of them have no mark; the training skips those.
        tokens: of all texts.
        labels: tokens that the head's first depth learns.
    """

    texts: int
    without: int
    tokens: int
    labels: int


@dataclass(frozen=True)
class PreflightReport:
    """What the checks found.

    Attributes:
        marks: of the data.
        features_off: largest ``relative_difference`` of a text from the features of decoding, by layer.
        logits_off: the same of the logits that the output layer makes of the last hidden state.
        coverage: share of the labels that the draft vocabulary holds.
        memory: what training takes.
    """

    marks: Marks
    features_off: Mapping[int, float]
    logits_off: float
    coverage: float
    memory: Memory


def run_preflight(
    learner: Learner,
    examples: Sequence[Example],
    source: FeatureSource,
    settings: PreflightSettings,
    report: Callable[[str], None],
    *,
    data: Rendering,
    target: Rendering,
) -> PreflightReport:
    """Run all checks in order.

    Args:
        learner: the head, before its first step.
        examples: what it will be trained on.
        source: where its features come from.
        settings: see ``PreflightSettings``.
        report: is given one line per check that passed.
        data: how the examples were made.
        target: how the target's texts are made when it decodes.

    Raises:
        InputError: a setting or data that cannot be trained with.
        PreflightError: labels or features differ from what decoding will see.
        UnsupportedModelError: the target's logits are more than its output layer applied to its last hidden state.
    """
    marks = check_marks(examples, min(learner.offsets))
    report(
        f"marks: {marks.labels} labels in {marks.tokens} tokens of {marks.texts} texts "
        f"({100 * marks.labels / marks.tokens:.1f} %), {marks.without} texts without any are skipped"
    )
    few = evenly([example for example in examples if any(example.supervised)], settings.texts)
    batch = source.batch(few)
    check_labels(batch, few, learner.offsets)
    report(f"labels: as in the texts, at {', '.join(f'+{offset}' for offset in learner.offsets)} tokens")
    check_rendering(data, target)
    bos = None if learner.target.tokenizer is None else learner.target.tokenizer.bos_token_id
    starting = check_bos(examples, bos if isinstance(bos, int) else None)
    report(f"template: the target's own; {starting} of {marks.texts} texts start with BOS, none with two")
    features_off, logits_off = check_features(learner, batch, few)
    worst = max([logits_off, *features_off.values()])
    report(f"features: those of decoding, and with the output layer its logits (relative difference {worst:.1e})")
    coverage = check_coverage(learner, examples, settings.min_coverage)
    report(f"draft vocabulary: holds {100 * coverage:.2f} % of the labels")
    memory = check_memory(learner, examples, source, settings.batch_size)
    report(
        f"memory: about {size_text(memory.needed)} of {size_text(memory.free)} free (gradients "
        f"{size_text(memory.gradients)}, optimizer {size_text(memory.optimizer)}, activations "
        f"{size_text(memory.activations)}, features {size_text(memory.features)})"
    )
    return PreflightReport(marks, features_off, logits_off, coverage, memory)


# --- marks and labels -------------------------------------------------------------------------------------------------


def check_marks(examples: Sequence[Example], first_offset: int) -> Marks:
    """Count labels, and refuse data without any.

    Args:
        examples: the texts.
        first_offset: how many tokens after a position the head's nearest label lies.

    Raises:
        InputError: no text, no mark in any text, or a text whose marks are all before the first label.
    """
    if not examples:
        raise InputError("data", 0, "there is no text to train on; check the files, limits and skipped rows")
    marked = [example for example in examples if any(example.supervised)]
    if not marked:
        remedy = "no token is marked as the target's own; check the chat template, the roles and the length limit"
        raise InputError("data", f"{len(examples)} texts", remedy)
    labels = {example.key: sum(example.supervised[first_offset:]) for example in marked}
    hollow = [key for key, count in labels.items() if not count]
    if hollow:
        remedy = f"these texts have marks, but none from token {first_offset} on, where the first label is; check them"
        raise InputError("data", listed(hollow, most=3), remedy)
    tokens = sum(len(example.ids) for example in examples)
    labelled = sum(sum(example.supervised[first_offset:]) for example in marked)
    return Marks(len(examples), len(examples) - len(marked), tokens, labelled)


def check_labels(batch: Batch, examples: Sequence[Example], offsets: Sequence[int]) -> None:
    """Compare a batch's labels at each depth with the texts themselves.

    Args:
        batch: the examples as the training sees them.
        examples: the same texts.
        offsets: see ``Learner.offsets``.

    Raises:
        PreflightError: an offset that looks at no later token, or a label or mark that is not the text's own.
    """
    for offset in offsets:
        if offset < 1:
            raise PreflightError(f"a label at offset {offset} is no later token; the learner's offsets are wrong")
        labels, marks = batch.labels_at(offset)
        for row, example in enumerate(examples):
            wanted = {at: example.ids[at + offset] for at in _learnt(example, offset)}
            found = {at: int(labels[row, at]) for at in marks[row].nonzero().flatten().tolist()}
            if found != wanted:
                at = min(place for place in {*found, *wanted} if found.get(place) != wanted.get(place))
                raise PreflightError(
                    f"text {example.key}: the label {offset} tokens after position {at} is {found.get(at)} in the "
                    f"batch and {wanted.get(at)} in the text; ids, marks or padding are shifted"
                )


def _learnt(example: Example, offset: int) -> list[int]:
    """Return the positions whose label is a marked token."""
    return [at for at in range(len(example.ids)) if at + offset < len(example.ids) and example.supervised[at + offset]]


# --- template and BOS -------------------------------------------------------------------------------------------------


def check_rendering(data: Rendering, target: Rendering) -> None:
    """Refuse data that was made with another tokenizer or chat template than the target uses.

    Raises:
        InputError: names which.
    """
    for what, found, wanted in (
        ("tokenizer", data.tokenizer, target.tokenizer),
        ("chat template", data.template, target.template),
    ):
        if found != wanted:
            remedy = f"these texts were made with another {what} than the target's ({wanted[:12]}); make them anew"
            raise InputError("data", f"{what} {found[:12]}", remedy)


def check_bos(examples: Sequence[Example], bos: int | None) -> int:
    """Return how many texts start with BOS.

    Raises:
        InputError: a text that starts with two.
    """
    if bos is None:
        return 0
    doubled = [example.key for example in examples if example.ids[:2] == (bos, bos)]
    if doubled:
        remedy = "these texts start with BOS twice; render them with specdec_lab.chat.render_chat, which writes one"
        raise InputError("data", listed(doubled, most=3), remedy)
    return sum(example.ids[:1] == (bos,) for example in examples)


# --- features ---------------------------------------------------------------------------------------------------------


def check_features(learner: Learner, batch: Batch, examples: Sequence[Example]) -> tuple[dict[int, float], float]:
    """Compare a batch's features with those of decoding, and these with the target's logits through its output layer.

    Args:
        learner: tells the target and the layers.
        batch: the examples with their features.
        examples: the same texts.

    Returns:
        The largest ``relative_difference`` of a text by layer, and that of the logits.

    Raises:
        InputError: the batch lacks a layer that the head reads.
        PreflightError: features that are not those of decoding.
        UnsupportedModelError: the output layer alone does not make the target's logits.
    """
    target, layers = learner.target, learner.feature_layers
    lacking = [layer for layer in layers if layer not in batch.features]
    if lacking:
        raise InputError("features", lacking, "the features lack these layers, which the head reads; make them anew")
    features_off = dict.fromkeys(layers, 0.0)
    logits_off = 0.0
    for row, example in enumerate(examples):
        ids = example.ids[:COMPARED_TOKENS]
        target.allocate(1, len(ids), len(ids))
        output = target.forward({0: chain(ids[0], ids[1:])}, sorted({*layers, -1}))
        decoded = output.row_features(0)
        for layer in layers:
            off = relative_difference(batch.features[layer][row, : len(ids)], decoded[layer])
            features_off[layer] = max(features_off[layer], off)
            if not off <= STATES_WITHIN[target.model.dtype]:
                raise PreflightError(
                    f"text {example.key}: the features of layer {layer} differ from those of decoding by {off:.2g} "
                    f"(relative), more than rounding explains; write the cache again or use features=online"
                )
        off = relative_difference(output_logits(target, decoded[-1]), output.row_logits(0))
        logits_off = max(logits_off, off)
        if not off <= LOGITS_WITHIN[target.model.dtype]:
            raise UnsupportedModelError(
                f"{target.model.config.model_type}: its output layer makes other logits of its last hidden state than "
                f"the model itself, by {off:.2g}{_known_reason(target)}; heads cannot be trained for it"
            )
    return features_off, logits_off


def output_logits(target: Target, states: Tensor) -> Tensor:
    """Apply the target's output layer to states after the final norm, ``[..., hidden]``, and return ``[..., vocab]``.

    Raises:
        UnsupportedModelError: the model has no output layer.
    """
    layer = target.model.get_output_embeddings()
    if layer is None:
        raise UnsupportedModelError(
            f"{target.model.config.model_type}: it has no output layer; heads cannot be trained"
        )
    with torch.inference_mode():
        return layer(states.to(device=layer.weight.device, dtype=layer.weight.dtype))


def _known_reason(target: Target) -> str:
    config = target.model.config.get_text_config()
    values = {name: getattr(config, name, None) for name in _LOGIT_FACTORS}
    named = [f"{name}={value}" for name, value in values.items() if value not in (None, 1)]
    return f" (its configuration has {', '.join(named)})" if named else ""


def relative_difference(got: Tensor, wanted: Tensor) -> float:
    """Return how far two tensors ``[tokens, numbers]`` are apart, each row as a share of the wanted row's length.

    Nine rows in ten differ by at most that: a fault moves all of them, rounding now and then moves one far.
    """
    got, wanted = got.float().to(wanted.device), wanted.float()
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)).quantile(0.9))


# --- draft vocabulary -------------------------------------------------------------------------------------------------


def check_coverage(learner: Learner, examples: Sequence[Example], least: float) -> float:
    """Return the share of the labels that can be drafted, over texts spread evenly over the data.

    Raises:
        InputError: it is less than ``least``.
    """
    device = next(learner.head.parameters()).device
    some = evenly([example for example in examples if example.labels], COVERAGE_TEXTS)
    covered, labels = 0.0, 0
    for first in range(0, len(some), 64):
        batch = on_device(collate(some[first : first + 64]), device)
        covered += learner.coverage(batch) * batch.labels
        labels += batch.labels
    share = covered / labels
    if share < least:
        remedy = f"the head can draft {100 * share:.1f} % of the labels; make head.draft_vocab larger or lower this"
        raise InputError("min_coverage", least, remedy)
    return share


# --- a choice of texts ------------------------------------------------------------------------------------------------


def evenly(examples: Sequence[Example], count: int) -> list[Example]:
    """Return at most ``count`` examples, spread evenly over all of them, the first among them."""
    return [examples[at * len(examples) // count] for at in range(count)] if count < len(examples) else list(examples)
