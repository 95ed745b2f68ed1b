"""What a text holds beyond a reduced draft vocabulary: an EAGLE head can be trained to draft that too.

A reduced vocabulary lacks just what is worth copying, names and rare words of the prompt. Their rows of the target's
output layer are at hand, so a round can offer them besides: as many as the text holds, a few hundred.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_lab.heads.recurrent import RecurrentHead, SharedParts
from specdec_lab.heads.vocabulary import DraftVocabulary

UNSAID_LOGIT = -1e4
"""Logit of what cannot be drafted yet: no chance, and a finite number, so that losses and gradients stay finite."""


class TextContext:
    """The ids beyond the draft vocabulary in a batch of texts, and where each of them can be drafted.

    As in decoding, an id can be drafted once it has been said in the same text; ids of the other texts never.

    Args:
        ids: of the texts, ``[rows, tokens]``.
        lengths: tokens of each row without padding, ``[rows]``.
        vocabulary: what can be drafted anyway.
        parts: of the target.

    Attributes:
        token_ids: ascending, ``[beyond]``.
        output_rows: of the target's output layer, ``[beyond, hidden]``.
        draft_ids: of every token; those of the context start behind the vocabulary, ``[rows, tokens]``.
        labels: the same, and -1 where the token could not be drafted, since it is said for the first time.
    """

    def __init__(self, ids: Tensor, lengths: Tensor, vocabulary: DraftVocabulary, parts: SharedParts) -> None:
        width = ids.shape[1]
        at = torch.arange(width, device=ids.device).expand_as(ids)
        known = vocabulary.draft_ids(ids)
        new = (known < 0) & (at < lengths.to(ids.device)[:, None])
        self.token_ids = ids[new].unique()
        self.output_rows = parts.output_at(self.token_ids)
        place = torch.searchsorted(self.token_ids, ids)  # of what is not new, anywhere
        first = at.new_full((len(ids), len(self.token_ids) + 1), width)  # the last column for what is not new
        where = torch.where(new, place, len(self.token_ids))
        first.scatter_reduce_(1, where, at, "amin")
        self._first = first[:, :-1]  # [rows, beyond]: where an id is said first, width where it is not
        self.draft_ids = torch.where(new, len(vocabulary) + place, known)
        self.labels = torch.where(new & (first.gather(1, where) == at), -1, self.draft_ids)

    def unsaid(self, marks: Tensor) -> Tensor:
        """Return which ids a text does not hold up to and with each marked token, ``[marked, beyond]``, bool.

        Args:
            marks: ``[rows, tokens]``, bool.
        """
        row, at = marks.nonzero(as_tuple=True)
        return self._first[row] > at[:, None]

    def foreign(self, marks: Tensor) -> Tensor:
        """Return which ids are nowhere in each marked token's own text, ``[marked, beyond]``, bool.

        Args:
            marks: ``[rows, tokens]``, bool.
        """
        return self._first[marks.nonzero(as_tuple=True)[0]] == marks.shape[1]

    def widened(self, logits: Tensor, head: RecurrentHead, states: Tensor, unsaid: Tensor | None = None) -> Tensor:
        """Return logits with those of the context behind them, ``[labels, draft_vocab + beyond]``.

        Args:
            logits: of the head from these states, ``[labels, draft_vocab]``.
            states: ``[labels, hidden]``.
            unsaid: what cannot be drafted there, ``[labels, beyond]``; ``None``: all can.
        """
        more = head.context_logits(states, self.output_rows.to(states.dtype))
        if unsaid is not None:
            more = more.masked_fill(unsaid, UNSAID_LOGIT)
        return torch.cat((logits, more), dim=-1)
