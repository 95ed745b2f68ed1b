"""Tiny fp32 models that cross their window edge, and models whose logits are a chosen function of the last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from specdec_lab.attention import PACKED_ATTENTION

VOCAB, EOS, WINDOW, POSITIONS = 128, 2, 8, 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_GPT2_SIZES: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "qwen2": Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "mistral": MistralConfig(**_SIZES, sliding_window=WINDOW),
    "gemma2": Gemma2Config(**_SIZES, head_dim=8, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(
        **_SIZES,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt2": GPT2Config(**_GPT2_SIZES, vocab_size=VOCAB, eos_token_id=EOS, bos_token_id=1),
}
"""One small configuration per family; windows of 8 tokens where the family has them."""

ARCHITECTURES = tuple(CONFIGS)


def build(config: PreTrainedConfig, *, attention: str = PACKED_ATTENTION, seed: int = 0) -> PreTrainedModel:
    """Return a model with random weights, scaled up so that its greedy answers are not one token for ever."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def tiny_model(architecture: str, **changes: Any) -> PreTrainedModel:
    """Build one of ``ARCHITECTURES``, with other configuration values where they are given."""
    values = {**CONFIGS[architecture].to_dict(), **changes}
    config = type(CONFIGS[architecture])(**values)
    return build(config, attention="eager" if architecture == "gemma2" else PACKED_ATTENTION)


BIGRAM_VOCAB = 16


def bigram_model(table: Tensor, *, eos: int | None = None, positions: int = POSITIONS) -> PreTrainedModel:
    """Return a real one-layer model whose logits are exactly ``table[last token]``.

    One-hot embeddings pass a norm that restores them bit for bit (16 is a power of 4), attention and MLP write
    zeros to the residual stream but keys and values to the cache, and the output layer is the table.

    Args:
        table: ``[16, 16]`` logits of the next token.
    """
    assert table.shape == (BIGRAM_VOCAB, BIGRAM_VOCAB)
    sizes = {**_SIZES, "vocab_size": BIGRAM_VOCAB, "hidden_size": BIGRAM_VOCAB, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": positions, "eos_token_id": eos, "pad_token_id": None}
    model = build(LlamaConfig(**sizes, rms_norm_eps=0.0, tie_word_embeddings=False))
    model.generation_config.eos_token_id = eos  # type: ignore[union-attr]
    weights = dict(model.named_parameters())
    with torch.no_grad():
        weights["model.embed_tokens.weight"].copy_(torch.eye(BIGRAM_VOCAB))
        weights["model.layers.0.self_attn.o_proj.weight"].zero_()
        weights["model.layers.0.mlp.down_proj.weight"].zero_()
        weights["model.norm.weight"].fill_(BIGRAM_VOCAB**-0.5)
        weights["lm_head.weight"].copy_(table.T)
    return model


def successor_table(successor: Sequence[int]) -> Tensor:
    """Return logits under which token *i* is followed by ``successor[i]`` for certain, ``[16, 16]``."""
    table = torch.zeros(BIGRAM_VOCAB, BIGRAM_VOCAB)
    table[torch.arange(BIGRAM_VOCAB), torch.tensor(list(successor))] = 20.0
    return table


def law_table(laws: Mapping[int, Sequence[float]]) -> Tensor:
    """Return logits whose softmax after token *i* is ``laws[i]`` over the first ids; other tokens go to token 0."""
    table = torch.full((BIGRAM_VOCAB, BIGRAM_VOCAB), -1e4)
    table[:, 0] = 0.0
    for token, law in laws.items():
        table[token] = -1e4
        table[token, : len(law)] = torch.tensor(law).log().clamp(min=-1e4)
    return table
