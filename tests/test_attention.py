"""Packed attention against plain arithmetic and against transformers' own eager function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from specdec_lab.attention import PACKED_ATTENTION, causal_mark, packed_attention

HEADS, HEAD_DIM = 4, 8


def layer(kv_heads: int) -> LlamaAttention:
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, num_key_value_heads=kv_heads, num_hidden_layers=1
    )
    config._attn_implementation = "eager"
    return LlamaAttention(config, layer_idx=0).eval()


def inputs(kv_heads: int, queries: int, slots: int, value_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(kv_heads * 100 + queries)
    query = torch.randn(2, HEADS, queries, HEAD_DIM, generator=generator)
    key = torch.randn(2, kv_heads, slots, HEAD_DIM, generator=generator)
    value = torch.randn(2, kv_heads, slots, value_dim, generator=generator)
    seen = torch.rand(2, 1, queries, slots, generator=generator) < 0.6
    seen[..., :1] = True
    return query, key, value, seen


def additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("mask", ["additive", "repeated", "bool", "none", "causal mark"])
def test_equals_eager_attention(kv_heads: int, queries: int, mask: str):
    """Each query head attends to the keys of its own group, under every form in which a mask can arrive."""
    query, key, value, seen = inputs(kv_heads, queries, slots=queries if mask in ("none", "causal mark") else 7)
    module, scaling = layer(kv_heads), 0.3
    if mask in ("none", "causal mark"):  # causal by agreement, as in a plain forward
        causal = torch.ones(queries, queries, dtype=torch.bool).tril_().expand(2, 1, -1, -1)
        wanted, _ = eager_attention_forward(module, query, key, value, additive(causal), scaling)
        mark = None if mask == "none" else causal_mark(query.device)
        got, weights = packed_attention(module, query, key, value, mark, scaling=scaling)
    else:
        wanted, _ = eager_attention_forward(module, query, key, value, additive(seen), scaling)
        groups = HEADS // kv_heads
        given = {
            "additive": additive(seen),
            "repeated": additive(seen).repeat(1, 1, groups, 1),
            "bool": seen,
        }[mask]
        got, weights = packed_attention(module, query, key, value, given, scaling=scaling)
    assert weights is None
    assert got.shape == (2, queries, HEADS, HEAD_DIM)
    assert torch.allclose(got, wanted, atol=1e-6)


def test_a_mask_repeated_for_other_groups_is_repeated_anew():
    """A model may expand its keys before attention (latent attention), so that groups differ from the cache's."""
    query, key, value, seen = inputs(4, 3, 7)
    wanted, _ = packed_attention(layer(4), query, key, value, additive(seen))
    got, _ = packed_attention(layer(4), query, key, value, additive(seen).repeat(1, 1, 2, 1))
    assert torch.equal(got, wanted)


def test_values_may_be_narrower_than_keys():
    query, key, value, seen = inputs(2, 3, 7, value_dim=5)
    got, _ = packed_attention(layer(2), query, key, value, additive(seen))
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * HEAD_DIM**-0.5 + additive(seen)
    wanted = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert got.shape == (2, 3, HEADS, 5)
    assert torch.allclose(got, wanted, atol=1e-6)


def test_a_query_that_sees_nothing_gives_numbers():
    """Guards CP-13: masks carry the finite minimum, so that even a row with every key masked is no NaN."""
    query, key, value, seen = inputs(2, 3, 7)
    seen[0, :, 1] = False
    got, _ = packed_attention(layer(2), query, key, value, additive(seen))
    assert got.isfinite().all()


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias"])
def test_refuses_what_it_cannot_compute(option: str):
    """A soft cap or an attention sink that is left out would change the model without a word."""
    query, key, value, seen = inputs(2, 3, 7)
    asked: dict[str, Any] = {option: torch.ones(1)}
    with pytest.raises(ValueError, match=option):
        packed_attention(layer(2), query, key, value, additive(seen), **asked)
    absent: dict[str, Any] = {option: None}
    packed_attention(layer(2), query, key, value, additive(seen), **absent)


def test_is_registered_under_its_name():
    assert AttentionInterface()[PACKED_ATTENTION] is packed_attention


def test_inputs_are_not_edited():
    query, key, value, seen = inputs(2, 3, 7)
    mask = additive(seen)
    before = [tensor.clone() for tensor in (query, key, value, mask)]
    packed_attention(nn.Identity(), query, key, value, mask)
    assert all(torch.equal(old, new) for old, new in zip(before, (query, key, value, mask), strict=True))
