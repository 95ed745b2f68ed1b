"""Decoder layers of the Llama family whose input may be wider than their output; their attention is given to them.

Training and decoding attend to different things (several steps at once; a cache and a tree), so that a layer hands out
queries, keys and values and takes back what the attention made of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer's index, its query ``[rows, heads, tokens, head_dim]``, its key and value ``[rows, kv_heads, tokens,
head_dim]`` to what is like the query."""


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight (arXiv 1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over its last axis."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class Rotation:
    """Cosines and sines of rotary positions (arXiv 2104.09864), with whatever scaling the configuration states."""

    def __init__(self, config: LlamaConfig) -> None:
        self._embedding = LlamaRotaryEmbedding(config)
        self._tables: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def reserve(self, positions: int, like: Tensor) -> None:
        """Have the first positions ready, in the dtype and on the device of a tensor."""
        cos = self._tables[0]
        if cos.shape[0] < positions or cos.dtype != like.dtype or cos.device != like.device:
            self._embedding.to(like.device)
            steps = torch.arange(positions, device=like.device)[None]
            self._tables = tuple(table[0].clone() for table in self._embedding(like.new_empty(1), steps))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[rows, 1, tokens, head_dim]`` of reserved positions ``[rows, tokens]``."""
        cos, sin = self._tables
        return cos[positions][:, None], sin[positions][:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``[rows, heads, tokens, head_dim]`` turned by its position, halves paired as in Llama."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def attention_shape(config: LlamaConfig) -> tuple[int, int, int]:
    """Return query heads, KV heads and the width of a head; some configurations leave the last two to the others."""
    heads = config.num_attention_heads
    return heads, config.num_key_value_heads or heads, config.head_dim or config.hidden_size // heads


class Attention(nn.Module):
    """Projections of grouped-query attention; the attention itself is the caller's.

    Args:
        input_size: width of what queries, keys and values are made of.
        bias: whether the projections of queries, keys and values have one.
        layer: index by which the caller tells the layers of one head apart.
    """

    def __init__(self, config: LlamaConfig, input_size: int, bias: bool = False, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = attention_shape(config)
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return ``[rows, tokens, hidden]`` for ``x [rows, tokens, input_size]``."""
        rows, tokens, _ = x.shape
        # [rows, tokens, heads * head_dim] -> [rows, heads, tokens, head_dim]
        query = self.q_proj(x).view(rows, tokens, self.heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(rows, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(rows, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        query, key = (rotate(x, *rotation).to(value.dtype) for x in (query, key))
        mixed = attend(self.layer, query, key, value)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., hidden]``."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def start_small(module: nn.Module, generator: torch.Generator, spread: float = 0.02) -> None:
    """Draw all matrices of a module from a normal law, set biases to zero; norms stay at one."""
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
