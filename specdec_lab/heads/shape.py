"""Shapes of heads taken from their target."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from specdec_lab.target import Target


def layer_config(target: Target, intermediate_size: int | None = None, layers: int = 1) -> LlamaConfig:
    """Return the configuration of Llama layers of the target's width, heads and rotary positions.

    Args:
        intermediate_size: of the feed-forward network; ``None``: the target's.
        layers: of the head.
    """
    config: Any = target.model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = getattr(config, "rope_parameters", None) or {}
    theta = ropes.get("rope_theta") or next((one["rope_theta"] for one in ropes.values() if isinstance(one, dict)), 1e4)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=target.max_length or 1 << 20,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
    )
