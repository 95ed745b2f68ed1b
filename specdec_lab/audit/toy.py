"""A real model whose next-token law is a table, so that the law of every text is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdec_lab.attention import PACKED_ATTENTION

TOY_VOCAB = 16
"""A power of 4, so that the final norm restores one-hot embeddings bit for bit."""

IMPOSSIBLE_LOGIT = -1e4
"""Far enough below the others for probability 0 in float32."""


def bigram_model(table: Tensor, *, eos: int | None = None, positions: int = 256) -> PreTrainedModel:
    """Return a one-layer Llama whose logits are exactly ``table[last token]``; global random state stays as it is.

    One-hot embeddings pass a norm that restores them, attention and MLP write zeros to the residual stream but keys and
    values to the cache, and the output layer is the table.

    Args:
        table: ``[16, 16]`` logits of the next token.
        eos: id of the end-of-sequence token, if there is to be one.
        positions: longest text.
    """
    if tuple(table.shape) != (TOY_VOCAB, TOY_VOCAB):
        raise ValueError(f"the table has shape {tuple(table.shape)}, not {(TOY_VOCAB, TOY_VOCAB)}")
    config = LlamaConfig(
        vocab_size=TOY_VOCAB,
        hidden_size=TOY_VOCAB,
        intermediate_size=TOY_VOCAB,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=eos,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION, dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = eos
    generator = torch.Generator().manual_seed(0)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            if weight.dim() > 1:  # keys and values are to be told apart
                weight.normal_(0.0, 0.5, generator=generator)
        weights["model.embed_tokens.weight"].copy_(torch.eye(TOY_VOCAB))
        weights["model.layers.0.self_attn.o_proj.weight"].zero_()
        weights["model.layers.0.mlp.down_proj.weight"].zero_()
        weights["model.norm.weight"].fill_(TOY_VOCAB**-0.5)
        weights["lm_head.weight"].copy_(table.T)
    return model


def law_table(laws: Mapping[int, Sequence[float]]) -> Tensor:
    """Return logits whose softmax after token *i* is ``laws[i]`` over the first ids; other tokens go to token 0."""
    table = torch.full((TOY_VOCAB, TOY_VOCAB), IMPOSSIBLE_LOGIT)
    table[:, 0] = 0.0
    for token, law in laws.items():
        table[token] = IMPOSSIBLE_LOGIT
        table[token, : len(law)] = torch.tensor(law).log().clamp(min=IMPOSSIBLE_LOGIT)
    return table


def successor_table(successor: Sequence[int]) -> Tensor:
    """Return logits under which token *i* is followed by ``successor[i]`` for certain, ``[16, 16]``."""
    table = torch.zeros(TOY_VOCAB, TOY_VOCAB)
    table[torch.arange(TOY_VOCAB), torch.tensor(list(successor))] = 20.0
    return table
