"""EAGLE-1 and EAGLE-3: recurrent heads, trained through several steps of their own outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specdec_lab.distill import losses
from specdec_lab.distill.batch import Batch, ahead
from specdec_lab.distill.context import TextContext
from specdec_lab.distill.copying import carried, carried_states, recurrent_sources
from specdec_lab.distill.hits import HitCounter
from specdec_lab.distill.learner import Learner, Outcome
from specdec_lab.distill.teacher import Teacher
from specdec_lab.distill.unrolled import UnrolledAttention, unrolled
from specdec_lab.drafters.eagle import EagleDrafter
from specdec_lab.heads.decoder import start_small
from specdec_lab.heads.eagle import EagleHead, EagleLayer
from specdec_lab.heads.eagle3 import Eagle3Head, check_feature_layers, default_feature_layers
from specdec_lab.heads.formats import save_head
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.shape import layer_config
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

CROSS_ENTROPY: Mapping[str, float] = {"cross_entropy": 1.0}


class RecurrentLearner(Learner):
    """What both have in common: the unrolled steps and their losses.

    The loss of step *i* is weighted with ``decay ** i``; at each step it is the token loss against the teacher's law on
    the draft vocabulary, and, where ``regression`` is above 0, the distance to the target's own next state. Where
    ``copying`` is above 0, the last group of query heads learns to look where the label can be copied, and to bring it.
    """

    def __init__(
        self,
        target: Target,
        head: EagleHead | Eagle3Head,
        *,
        steps: int,
        decay: float,
        mix: Mapping[str, float],
        regression: float,
        noise: float,
        copying: float,
    ) -> None:
        super().__init__(target)
        losses.check_mix(mix)
        self.head: nn.Module = head
        self._parts = (SharedParts(target, head.vocabulary),)
        self.vocabulary, self.steps, self.decay, self.mix = head.vocabulary, steps, decay, dict(mix)
        self.context_vocab = head.context_vocab
        self.regression, self.noise, self.copying = regression, noise, copying
        self.offsets = tuple(2 + step for step in range(steps))

    def forward(self, batch: Batch) -> Outcome:
        """Return the sums of the losses of all steps."""
        head, parts = self._recurrent(), self._parts[0]
        context = self._context(batch)
        teacher = Teacher(batch, parts, self.vocabulary, context)
        counter = HitCounter(batch.supervised)
        total = torch.zeros((), device=batch.ids.device)
        shown: dict[str, Tensor] = {}
        layers = head.config.num_hidden_layers
        sources = recurrent_sources(batch.ids, batch.supervised, layers) if self.copying else None
        attend = UnrolledAttention(sources)
        for step, states in enumerate(unrolled(head, parts, self._disturbed(batch), self.steps, attend)):
            rows = teacher.at(self.offsets[step])
            drafted = states[rows.marked]
            logits = head.logits(drafted, parts.output.to(drafted.dtype))
            if context is not None:
                logits = context.widened(logits, head, drafted, rows.unsaid)
            token = losses.mixed(self.mix, rows.target_probs, logits).sum()
            shown[f"step{step + 1}/token"] = token.detach()
            loss = token
            if self.regression:
                distance = losses.smooth_l1(drafted, rows.states).sum()
                shown[f"step{step + 1}/regression"] = distance.detach()
                loss = loss + self.regression * distance
            total = total + self.decay**step * loss
            greedy = None if self.training else teacher.takes_likeliest(self.offsets[step])
            counter.count(step + 1, rows.marked, logits, rows.labels, greedy)
        if self.copying:
            carried_loss = self._carried_loss(attend.value, batch, context)
            shown.update({"copying/where": attend.copy_loss.detach(), "copying/what": carried_loss.detach()})
            total = total + self.copying * (attend.copy_loss + carried_loss)
        return Outcome(total, shown, counter.hits, counter.seen, counter.ranked)

    def _carried_loss(self, value: Tensor, batch: Batch, context: TextContext | None) -> Tensor:
        """Return how badly the copying heads bring back the token that followed a position, in nats."""
        head, parts = self._recurrent(), self._parts[0]
        draft_ids = self.vocabulary.draft_ids(batch.ids) if context is None else context.draft_ids
        following = ahead(draft_ids + 1, 1) - 1
        at = carried(following, ahead(batch.supervised, 1))
        states = carried_states(value, head.attention.o_proj.weight)[at]
        logits = head.logits(states, parts.output.to(states.dtype))
        if context is not None:
            logits = context.widened(logits, head, states, context.foreign(at))
        return F.cross_entropy(logits.float(), following[at], reduction="sum")

    def coverage(self, batch: Batch) -> float:
        """Return the share of labels that can be drafted."""
        context = self._context(batch)
        if context is None:
            return covered(self.vocabulary, batch)
        labels = context.labels[batch.supervised]
        return float((labels >= 0).double().mean()) if len(labels) else 1.0

    def _context(self, batch: Batch) -> TextContext | None:
        return TextContext(batch.ids, batch.lengths, self.vocabulary, self._parts[0]) if self.context_vocab else None

    def drafter(self, **settings: Any) -> EagleDrafter:
        """Return the strategy with the head as it is now."""
        return EagleDrafter(self.target, head=self._recurrent(), **settings)

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the head in its published layout."""
        save_head(self.head, folder, provenance)

    def _recurrent(self) -> EagleHead | Eagle3Head:
        assert isinstance(self.head, EagleHead | Eagle3Head)
        return self.head

    def _disturbed(self, batch: Batch) -> Batch:
        """Add uniform noise to the target's states in training, as EAGLE does, so that own errors are no surprise."""
        states = {layer: state.to(self.dtype) for layer, state in batch.features.items()}
        if self.training and self.noise:
            states = {
                layer: state + self.noise * (2 * torch.rand_like(state) - 1) * state.std()
                for layer, state in states.items()
            }
        return Batch(batch.ids, batch.supervised, batch.lengths, states, batch.keys)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that are trained."""
        return next(self.head.parameters()).dtype


class EagleLearner(RecurrentLearner):
    """EAGLE-1: feature regression and soft cross-entropy (arXiv 2401.15077), through several steps.

    Deviations: the head is run several steps, as HASS (arXiv 2408.15766) and EAGLE-3 do, where the paper trains one;
    the noise is a share of the states' spread, where the paper adds 0.1 to unscaled ones.

    Args:
        draft_vocab: ids it can draft, the most frequent labels; ``None``: all.
        steps: of the unrolling.
        decay: weight of a step over the one before.
        losses: weights of token losses.
        regression: weight of the feature loss.
        noise: half-width of uniform noise on the target's states, in standard deviations.
        copying: weight of the attention's loss where a label can be copied, see ``specdec_lab.distill.copying``.
        context_vocab: whether it can also draft what the text holds already, see ``specdec_lab.distill.context``.
        layers: of the head; the papers' heads have one.
        intermediate_size: of the feed-forward network; ``None``: the target's.
        seed: of the first weights.
    """

    kind = "eagle"

    def __init__(
        self,
        target: Target,
        counts: Tensor,
        *,
        draft_vocab: Annotated[int, Field(ge=1)] | None = 8192,
        steps: Annotated[int, Field(ge=1, le=16)] = 3,
        decay: Annotated[float, Field(gt=0, le=1)] = 0.8,
        losses: dict[str, float] | None = None,
        regression: Annotated[float, Field(ge=0)] = 1.0,
        noise: Annotated[float, Field(ge=0)] = 0.0,
        copying: Annotated[float, Field(ge=0)] = 0.0,
        context_vocab: bool = False,
        layers: Annotated[int, Field(ge=1, le=8)] = 1,
        intermediate_size: Annotated[int, Field(ge=1)] | None = None,
        seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        vocabulary = chosen_vocabulary(target, counts, draft_vocab)
        head = EagleHead(layer_config(target, intermediate_size, layers), vocabulary, context_vocab=context_vocab)
        start_small(head, torch.Generator().manual_seed(seed))
        self.feature_layers = head.feature_layers
        mix = CROSS_ENTROPY if losses is None else losses
        super().__init__(
            target, head, steps=steps, decay=decay, mix=mix, regression=regression, noise=noise, copying=copying
        )

    def begin_at(self, head: nn.Module) -> None:
        """Take over the weights of a head of as many layers, or of fewer: those it lacks begin as doing nothing.

        Raises:
            RuntimeError: it has other weights.
        """
        assert isinstance(head, EagleHead)
        assert isinstance(self.head, EagleHead)
        more = list(enumerate(self.head.layers))[len(head.layers) :]
        for _, layer in more:
            assert isinstance(layer, EagleLayer)
            layer.add_nothing()
        own = {f"layers.{at}.{name}": tensor for at, layer in more for name, tensor in layer.state_dict().items()}
        self.head.load_state_dict({**own, **head.state_dict()})


class Eagle3Learner(RecurrentLearner):
    """EAGLE-3: direct token loss through the training-time test (arXiv 2503.01840).

    Args:
        draft_vocab: ids it can draft, the most frequent labels; ``None``: all.
        steps: of the training-time test.
        decay: weight of a step over the one before.
        losses: weights of token losses.
        layers: hidden states of the target that are fused; ``None``: 2, n // 2 and n - 3.
        start_output: whether the output layer starts as the target's rows rather than at random.
        copying: weight of the attention's loss where a label can be copied, see ``specdec_lab.distill.copying``.
        context_vocab: whether it can also draft what the text holds already, see ``specdec_lab.distill.context``.
        intermediate_size: of the feed-forward network; ``None``: the target's.
        seed: of the first weights.
    """

    kind = "eagle3"

    def __init__(
        self,
        target: Target,
        counts: Tensor,
        *,
        draft_vocab: Annotated[int, Field(ge=1)] | None = 8192,
        steps: Annotated[int, Field(ge=1, le=16)] = 3,
        decay: Annotated[float, Field(gt=0, le=1)] = 0.8,
        losses: dict[str, float] | None = None,
        layers: list[int] | None = None,
        start_output: bool = True,
        copying: Annotated[float, Field(ge=0)] = 0.0,
        context_vocab: bool = False,
        intermediate_size: Annotated[int, Field(ge=1)] | None = None,
        seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        vocabulary = chosen_vocabulary(target, counts, draft_vocab)
        picks = default_feature_layers(target.depth) if layers is None else tuple(layers)
        check_feature_layers(picks, target)
        head = Eagle3Head(layer_config(target, intermediate_size), vocabulary, picks, context_vocab=context_vocab)
        start_small(head, torch.Generator().manual_seed(seed))
        if start_output:
            with torch.no_grad():
                head.lm_head.weight.copy_(SharedParts(target, vocabulary).output)
        self.feature_layers = tuple(dict.fromkeys((*picks, -1)))  # the last for the teacher's own logits
        mix = CROSS_ENTROPY if losses is None else losses
        super().__init__(target, head, steps=steps, decay=decay, mix=mix, regression=0.0, noise=0.0, copying=copying)

    def tables(self) -> list[nn.Module]:
        """Return the output layer."""
        assert isinstance(self.head, Eagle3Head)
        return [self.head.lm_head]


def chosen_vocabulary(target: Target, counts: Tensor, size: int | None) -> DraftVocabulary:
    """Return the whole vocabulary, or the most frequent labels with every EOS among them."""
    if size is None or size >= target.vocab_size:
        return DraftVocabulary.whole(target.vocab_size)
    return DraftVocabulary.most_frequent(counts, size, target.eos_ids)


def covered(vocabulary: DraftVocabulary, batch: Batch) -> float:
    """Return the share of a batch's labels that a vocabulary holds; 1 without labels."""
    labels = batch.ids[batch.supervised]
    return float((vocabulary.draft_ids(labels) >= 0).double().mean()) if len(labels) else 1.0
