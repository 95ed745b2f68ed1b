"""The teacher's law at the positions that serve as labels, on a draft vocabulary."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.distill.batch import Batch, ahead
from specdec_lab.distill.context import TextContext
from specdec_lab.distill.losses import row_chunks
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.vocabulary import DraftVocabulary


class Teacher:
    """The target's law for every supervised token of a batch, made once for all depths.

    Only positions whose next token is marked as a label go through the output layer.

    Args:
        batch: with the target's last hidden states, layer -1.
        parts: of the target; its output layer at the vocabulary.
        context: what else of these texts can be drafted; its ids stand behind the draft vocabulary.
    """

    def __init__(
        self, batch: Batch, parts: SharedParts, vocabulary: DraftVocabulary, context: TextContext | None = None
    ) -> None:
        says = ahead(batch.supervised, 1)  # [rows, tokens]: position t predicts a token of the target's
        self._parts, self._says = parts, says
        self.states = batch.features[-1]
        with torch.no_grad():
            states = self.states[says].to(parts.output.dtype)
            logits = F.linear(states, parts.output)
            if context is not None:
                more = F.linear(states, context.output_rows).masked_fill(context.unsaid(says), -torch.inf)
                logits = torch.cat((logits, more), dim=-1)
            self._probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            for some in row_chunks(logits):
                self._probs[some] = logits[some].float().softmax(dim=-1)
        self._at = torch.full(says.shape, -1, dtype=torch.long, device=says.device)
        self._at[says] = torch.arange(int(says.sum()), device=says.device)
        self._ids = batch.ids
        self._draft_labels = vocabulary.draft_ids(batch.ids) if context is None else context.labels
        self._unsaid = None if context is None else context.unsaid(says)

    def at(self, offset: int) -> Rows:
        """Return the teacher for a head that predicts, at position *t*, token *t + offset*.

        Positions whose label is missing from the draft vocabulary are known to it as marked rows without a label: the
        head cannot be right there, and its law is compared on the vocabulary that it has.
        """
        source = self._source(offset)
        marked = source >= 0
        target_probs = self._probs.index_select(0, source[marked])
        labels = ahead(self._draft_labels + 1, offset)[marked] - 1
        states = ahead(self.states, offset - 1)[marked]
        unsaid = None if self._unsaid is None else self._unsaid[source[marked]]
        return Rows(marked, target_probs, labels, states, unsaid)

    @torch.no_grad()
    def takes_likeliest(self, offset: int) -> Tensor:
        """Return whether the text goes on with the target's likeliest token of all, ``[marked]``, bool; see ``at``."""
        source = self._source(offset)
        said = ahead(self._ids, 1)[self._says] == self._likeliest
        return said[source[source >= 0]]

    def _source(self, offset: int) -> Tensor:
        """Return the row of the teacher's law for each position, -1 where there is no label, past the end too."""
        return ahead(self._at + 1, offset - 1) - 1

    @cached_property
    def _likeliest(self) -> Tensor:
        return self._parts.likeliest(self.states[self._says])


class Rows:
    """What is to be learnt at the marked positions of one depth.

    Attributes:
        marked: ``[rows, tokens]``, bool; the other attributes have one row per mark, in order.
        target_probs: the target's law, renormalised on what can be drafted there, ``[marked, draft_vocab]``.
        labels: draft ids of the text's own tokens, -1 where they cannot be drafted, ``[marked]``.
        states: the target's last hidden states from which it predicts them, ``[marked, hidden]``.
        unsaid: ids of the context that the text does not hold yet, ``[marked, beyond]``, bool; ``None`` without one.
    """

    def __init__(
        self, marked: Tensor, target_probs: Tensor, labels: Tensor, states: Tensor, unsaid: Tensor | None = None
    ) -> None:
        self.marked, self.target_probs, self.labels, self.states = marked, target_probs, labels, states
        self.unsaid = unsaid
