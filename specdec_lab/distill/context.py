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
        vocabulary: what can be drafted anyway.
        parts: of the target.

    Attributes:
        token_ids: ascending, ``[beyond]``.
        output_rows: of the target's output layer, ``[beyond, hidden]``.
        said: whether an id stands at a position or before it, ``[rows, tokens, beyond]``, bool.
        draft_ids: of every token; those of the context start behind the vocabulary, ``[rows, tokens]``.
        labels: the same, and -1 where the token could not be drafted, since it is said for the first time.
    """

    def __init__(self, ids: Tensor, vocabulary: DraftVocabulary, parts: SharedParts) -> None:
        self.token_ids = vocabulary.beyond(ids)
        self.output_rows = parts.output_at(self.token_ids)
        here = ids[:, :, None] == self.token_ids  # [rows, tokens, beyond]
        self.said = here.cumsum(dim=1) > 0
        known = vocabulary.draft_ids(ids)
        place = len(vocabulary) + torch.searchsorted(self.token_ids, ids)
        self.draft_ids = torch.where(known >= 0, known, place)
        before = self.said.roll(1, dims=1)  # by the token before; nothing is said before the first one
        before[:, 0] = False
        again = (here & before).any(dim=-1)
        self.labels = torch.where((known >= 0) | again, self.draft_ids, -1)

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
