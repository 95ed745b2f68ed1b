"""A small causal LM cut from the target and distilled from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specdec_lab.distill import losses as token_losses
from specdec_lab.distill.batch import Batch
from specdec_lab.distill.copying import CopyWatch, carried, carried_states
from specdec_lab.distill.hits import HitCounter
from specdec_lab.distill.learner import Learner, Outcome
from specdec_lab.distill.learners.recurrent import chosen_vocabulary, covered
from specdec_lab.distill.teacher import Teacher
from specdec_lab.drafters.draft_model import DraftModelDrafter
from specdec_lab.errors import InputError
from specdec_lab.heads.draft_lm import DraftLM
from specdec_lab.heads.draft_lm_files import save_draft_model
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.target import Target

FORWARD_KL: Mapping[str, float] = {"forward_kl": 1.0}


class DraftModelLearner(Learner):
    """Distils a draft model from the target whose layers it was cut from (arXiv 2310.08461 trains drafts alike).

    Embedding and output layer stay the target's own, frozen, unless it gets its own.

    Args:
        layers: of the target, which the draft starts as, in this order; ``None``: the first two and the last one.
        draft_vocab: ids it can draft, the most frequent labels; ``None``: all.
        own_embedding: whether it trains an embedding of its own, which starts as the target's.
        own_output: whether it trains an output layer of its own, which starts as the target's at the draft vocabulary.
        losses: weights of token losses.
        copying: weight of the attention's loss where a label can be copied, see ``specdec_lab.distill.copying``.

    Raises:
        InputError: ``copying`` with one layer, or for a target with eager attention or with windows.
    """

    kind = "draft_model"
    feature_layers = (-1,)
    offsets = (1,)

    def __init__(
        self,
        target: Target,
        counts: Tensor,
        *,
        layers: list[int] | None = None,
        draft_vocab: Annotated[int, Field(ge=1)] | None = 8192,
        own_embedding: bool = False,
        own_output: bool = False,
        losses: dict[str, float] | None = None,
        copying: Annotated[float, Field(ge=0)] = 0.0,
    ) -> None:
        super().__init__(target)
        self.copying = copying
        self.mix = dict(FORWARD_KL if losses is None else losses)
        token_losses.check_mix(self.mix)
        last = target.depth - 1
        chosen = layers if layers is not None else sorted({0, min(1, last), last})
        self.vocabulary = chosen_vocabulary(target, counts, draft_vocab)
        self._parts = (SharedParts(target, self.vocabulary),)
        draft = DraftLM(target, chosen, self.vocabulary, own_embedding, own_output)
        if copying and len(chosen) < 2:
            raise InputError("copying", copying, "one layer cannot find what it is to copy; give layers two or more")
        if copying and not draft.watchable:
            remedy = "the target's attention cannot be watched (eager, or without o_proj); give head.copying=0"
            raise InputError("copying", copying, remedy)
        kinds = getattr(target.model.config.get_text_config(), "layer_types", None) or ()
        if copying and any(kind != "full_attention" for kind in kinds):
            raise InputError("copying", copying, "layers with a window do not see all of a text; give head.copying=0")
        self.head: nn.Module = draft

    def forward(self, batch: Batch) -> Outcome:
        """Return the sum of the losses over the labels."""
        draft, parts = self._draft(), self._parts[0]
        teacher = Teacher(batch, parts, self.vocabulary)
        rows = teacher.at(1)
        watch = CopyWatch(batch.ids, batch.supervised, len(draft.layers)) if self.copying else None
        logits = draft.logits(draft.states(batch.ids, watch)[rows.marked], parts.output)
        token = token_losses.mixed(self.mix, rows.target_probs, logits).sum()
        shown = {"token": token.detach()}
        loss = token
        if watch is not None:
            if not watch.value.numel():
                remedy = "the target's layers do not let their attention be watched; give head.copying=0"
                raise InputError("head.copying", self.copying, remedy)
            carried_loss = self._carried_loss(watch.value, batch)
            shown.update({"copying/where": watch.loss.detach(), "copying/what": carried_loss.detach()})
            loss = loss + self.copying * (watch.loss + carried_loss)
        counter = HitCounter(batch.supervised)
        counter.count(1, rows.marked, logits, rows.labels, None if self.training else teacher.takes_likeliest(1))
        return Outcome(loss, shown, counter.hits, counter.seen, counter.ranked)

    def _carried_loss(self, value: Tensor, batch: Batch) -> Tensor:
        """Return how badly the copying heads of the last layer bring back the token of a position, in nats."""
        draft = self._draft()
        tokens = self.vocabulary.draft_ids(batch.ids)
        at = carried(tokens, batch.supervised)
        states = carried_states(value, draft.last_output)[at]
        logits = draft.logits(draft.norm(states), self._parts[0].output)
        return F.cross_entropy(logits.float(), tokens[at], reduction="sum")

    def tables(self) -> list[nn.Module]:
        """Return embedding and output layer, where they are the draft's own."""
        draft = self._draft()
        return [one for one in (draft.embedding, draft.output) if one is not None]

    def coverage(self, batch: Batch) -> float:
        """Return the share of labels that the draft vocabulary holds."""
        return covered(self.vocabulary, batch)

    def drafter(self, **settings: Any) -> DraftModelDrafter:
        """Return the strategy with the draft as it is now."""
        return DraftModelDrafter(self.target, model=self._draft(), **settings)

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the draft's own weights."""
        save_draft_model(self._draft(), folder, provenance)

    def _draft(self) -> DraftLM:
        assert isinstance(self.head, DraftLM)
        return self.head
