"""Attention for tree verification that does not copy keys and values for grouped queries.

With a mask and more than one query, transformers' stock ``sdpa`` function repeats every key and value head for its
group of query heads: at 8 k tokens that copy is a quarter to two thirds of a verify forward of 8 nodes. Here the
queries of a group are stacked along the query axis instead, so each key is read once; the measured table is in
``docs/decisions/0001-attention.md``.

The function is registered through transformers' public ``AttentionInterface``; no model is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "specdec_packed"
WATCHED_ATTENTION = "specdec_watched"
"""Attention of a draft model in training, which may be told where to look."""


def causal_mark(device: torch.device) -> Tensor:
    """Return the mask of one entry, ``[1, 1, 1, 1]``, that stands for plain causal attention in ``packed_attention``.

    A real mask would be read for every head and would hide from the kernel that half of the scores are not needed.
    """
    return torch.zeros(1, 1, 1, 1, device=device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with the query heads of a group stacked along the query axis.

    Args:
        query: ``[rows, query_heads, queries, head_dim]``.
        key: ``[rows, kv_heads, slots, head_dim]``.
        value: ``[rows, kv_heads, slots, value_dim]``.
        attention_mask: additive or bool, ``[rows, 1, queries, slots]``, or already repeated per group,
            ``[rows, 1, groups * queries, slots]``. ``None``, or ``causal_mark`` for a prompt in an empty row, leaves
            the call to the stock function, which is causal then.
        scaling: factor on the scores before the softmax.

    Returns:
        ``([rows, queries, query_heads, value_dim], None)``.

    Raises:
        ValueError: the layer asks for a soft cap, attention sinks or a position bias, which this function has not.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{PACKED_ATTENTION} has no {name}; load this model with attention=eager")
    if attention_mask is None or (attention_mask.numel() == 1 and query.shape[2] > 1):
        return sdpa_attention_forward(module, query, key, value, None, dropout, scaling, **kwargs)
    rows, query_heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = query_heads // kv_heads
    if attention_mask.shape[2] != groups * queries:  # plain, or repeated for other groups than these keys have
        attention_mask = attention_mask[:, :, :queries].repeat(1, 1, groups, 1)  # [rows, 1, groups * queries, slots]
    stacked = query.reshape(rows, kv_heads, groups * queries, head_dim)
    attended = torch.nn.functional.scaled_dot_product_attention(
        stacked, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )  # [rows, kv_heads, groups * queries, value_dim]
    attended = attended.reshape(rows, query_heads, queries, value.shape[-1])
    return attended.transpose(1, 2).contiguous(), None


def watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    watch: Callable[[int, Tensor, Tensor, Tensor], None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa`` does, after ``watch`` has seen the layer's index, queries, keys and values."""
    if watch is not None:
        assert isinstance(module.layer_idx, int)
        scale = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5  # a watch knows the usual scores alone
        watch(module.layer_idx, query * scale, key, value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(WATCHED_ATTENTION, watched_attention)
AttentionMaskInterface.register(WATCHED_ATTENTION, sdpa_mask)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
