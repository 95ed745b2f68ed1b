"""Training-time test (arXiv 2503.01840): a recurrent head is run several steps on its own outputs, as in decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.distill.batch import Batch, ahead
from specdec_lab.distill.copying import copy_loss
from specdec_lab.heads.recurrent import RecurrentHead, SharedParts


class UnrolledAttention:
    """Attention of the steps that start from every position at once; call it once per step, in order.

    At step *i* the query that started from position *t* stands for position *t + i*. It sees what decoding would show
    it: the keys that were made from true states, up to *t*, and one key of each later step of its own.

    Args:
        sources: where the last group of query heads is to look in the first step, see ``copy_sources``; ``None``:
            wherever it likes.

    Attributes:
        copy_loss: how far it is from that, see ``copying.copy_loss``; 0 before the first step and without sources.
    """

    def __init__(self, sources: Tensor | None = None) -> None:
        self._sources = sources
        self.copy_loss = torch.zeros(())
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return ``[rows, heads, tokens, head_dim]``; see ``specdec_lab.heads.decoder.Attend``."""
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, dim=1))
        self._values.append(value.repeat_interleave(groups, dim=1))
        if len(self._keys) == 1:
            if self._sources is not None:
                self.copy_loss = copy_loss(query[:, -groups:], self._keys[0][:, -groups:], self._sources)
            return F.scaled_dot_product_attention(query, self._keys[0], self._values[0], is_causal=True)
        tokens, scale = query.shape[2], query.shape[3] ** -0.5
        first = query @ self._keys[0].transpose(-1, -2)  # [rows, heads, tokens, tokens]
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
        first = first.masked_fill(future, torch.finfo(first.dtype).min)
        later = torch.stack(self._keys[1:], dim=3)  # [rows, heads, tokens, steps, head_dim]
        own = torch.einsum("rhtd,rhtsd->rhts", query, later)
        weights = (torch.cat((first, own), dim=-1).float() * scale).softmax(dim=-1).to(value.dtype)
        mixed = weights[..., :tokens] @ self._values[0]
        for at, step in enumerate(self._values[1:]):
            mixed = mixed + weights[..., tokens + at, None] * step
        return mixed


def unrolled(
    head: RecurrentHead, parts: SharedParts, batch: Batch, steps: int, attend: UnrolledAttention | None = None
) -> Iterator[Tensor]:
    """Yield the head's states of each step, ``[rows, tokens, hidden]``.

    Step *i* at position *t* has seen the target's states up to *t* and the tokens up to *t + 1 + i*; it stands for the
    state after token *t + 1 + i* and drafts token *t + 2 + i*.

    Args:
        attend: new for every batch; ``None``: one without sources to look at.
    """
    rows, tokens = batch.ids.shape
    state = head.begin(batch.features)
    head.rotation.reserve(tokens + steps, state)
    positions = torch.arange(tokens, device=batch.ids.device).expand(rows, tokens)
    attend = attend or UnrolledAttention()
    for step in range(steps):
        embedded = parts.embed(ahead(batch.ids, 1 + step)).to(state.dtype)
        state = head.step(state, embedded, head.rotation.at(positions + step), attend)
        yield state
