"""Tiny fp32 models that cross their window edge."""

from __future__ import annotations

from typing import Any

import torch
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
