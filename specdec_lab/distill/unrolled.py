"""Training-time test (arXiv 2503.01840): a recurrent head is run several steps on its own outputs, as in decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdec_lab.distill.batch import Batch, ahead
from specdec_lab.distill.copying import copy_loss
from specdec_lab.heads.recurrent import RecurrentHead, SharedParts


class UnrolledAttention:
    """Attention of the steps that start from every position at once; call it once per step, in order.

    At step *i* the query that started from position *t* stands for position *t + i*. It sees what decoding would show
    it: the keys that were made from true states, up to *t*, and one key of each later step of its own.

    Args:
        sources: where the last group of query heads of a layer is to look in the first step, see ``copying``, by the
            layer's index; other layers look wherever they like.

    Attributes:
        copy_loss: how far it is from that, see ``copying.copy_loss``; 0 before the first step and without sources.
        value: of the last layer in the first step, ``[rows, kv_heads, tokens, head_dim]``; empty before it.
    """

    def __init__(self, sources: Mapping[int, Tensor] | None = None) -> None:
        self._sources = sources or {}
        self.copy_loss = torch.zeros(())
        self.value = torch.empty(0)
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # keys and values of each step, by layer

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return ``[rows, heads, tokens, head_dim]``; see ``specdec_lab.heads.decoder.Attend``."""
        groups = query.shape[1] // key.shape[1]
        keys, values = self._kept.setdefault(layer, ([], []))
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        if len(keys) == 1:
            self.value = value
            if layer in self._sources:
                self.copy_loss = self.copy_loss + copy_loss(query, key, self._sources[layer])
            return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        own_keys, own_values = torch.stack(keys[1:], dim=3), torch.stack(values[1:], dim=3)
        attend = merged_attention if query.device.type == "cpu" else plain_attention
        return attend(query, keys[0], values[0], own_keys, own_values)


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """Attend to the keys up to each position, and to some of its own, ``[rows, heads, tokens, head_dim]``.

    Args:
        query: ``[rows, heads, tokens, head_dim]``.
        keys: at every position, like the query; so are the values.
        own_keys: of each position alone, ``[rows, heads, tokens, steps, head_dim]``; so are the values.
    """
    tokens, scale = query.shape[2], query.shape[3] ** -0.5
    first = query @ keys.transpose(-1, -2)  # [rows, heads, tokens, tokens]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    first = first.masked_fill(future, torch.finfo(first.dtype).min)
    own = torch.einsum("rhtd,rhtsd->rhts", query, own_keys)
    weights = (torch.cat((first, own), dim=-1).to(accumulated(query)) * scale).softmax(dim=-1).to(values.dtype)
    return weights[..., :tokens] @ values + torch.einsum("rhts,rhtsd->rhtd", weights[..., tokens:], own_values)


def merged_attention(query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """Do what ``plain_attention`` does without a matrix of scores: on a CPU most of a long text's time went there."""
    mixed = _MergedAttention.apply(query, keys, values, own_keys, own_values)
    assert isinstance(mixed, Tensor)
    return mixed


def accumulated(values: Tensor) -> torch.dtype:
    """Return the dtype that sums over half-precision values are made in."""
    return torch.promote_types(values.dtype, torch.float32)


class _MergedAttention(torch.autograd.Function):
    """One softmax over two sets of keys, the first of which goes through PyTorch's fused kernel for CPUs.

    The kernel returns the logarithm of its softmax's sum, from which the share of each set follows. Its own backward
    takes the sum and the output of both sets, and so gives the first set's part of the true gradient.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
        """Return ``[rows, heads, tokens, head_dim]``."""
        exact = accumulated(query)
        ctx.scale = query.shape[3] ** -0.5
        mixed, norm = _FUSED(query, keys, values, 0.0, True, scale=ctx.scale)
        scores = (query[:, :, :, None] * own_keys).sum(dim=-1, dtype=exact) * ctx.scale  # [rows, heads, tokens, steps]
        total = torch.logaddexp(norm, scores.logsumexp(dim=-1))  # [rows, heads, tokens]
        weights = (scores - total[..., None]).exp()
        own = (weights[..., None] * own_values).sum(dim=3)
        mixed = (mixed * (norm - total).exp()[..., None] + own).to(query.dtype)
        ctx.save_for_backward(query, keys, values, own_keys, own_values, mixed, total, weights)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of all five."""
        query, keys, values, own_keys, own_values, mixed, total, weights = ctx.saved_tensors
        grad, exact = grads[0], accumulated(query)
        to_query, to_keys, to_values = _FUSED_BACKWARD(
            grad, query, keys, values, mixed, total, 0.0, True, scale=ctx.scale
        )
        mean = (grad * mixed).sum(dim=-1, dtype=exact)  # [rows, heads, tokens]
        slopes = (grad[:, :, :, None] * own_values).sum(dim=-1, dtype=exact)
        slopes = (weights * (slopes - mean[..., None]) * ctx.scale)[..., None]  # [rows, heads, tokens, steps, 1]
        to_query = to_query + (slopes * own_keys).sum(dim=3).to(query.dtype)
        to_own_keys = (slopes * query[:, :, :, None]).to(query.dtype)
        to_own_values = (weights[..., None] * grad[:, :, :, None]).to(query.dtype)
        return to_query, to_keys, to_values, to_own_keys, to_own_values


_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
