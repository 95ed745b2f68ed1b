"""The head of EAGLE-3: three hidden states of the target in, draft tokens out (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec_lab.errors import InputError
from specdec_lab.heads.decoder import MLP, Attend, Attention, RMSNorm, Rotation
from specdec_lab.heads.packed import PackedLinear
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """Return a low, a middle and a high hidden state of a target, as the published heads use: 2, n // 2 and n - 3.

    Raises:
        InputError: a target so shallow that they would coincide.
    """
    picks = (2, layers // 2, layers - 3)
    if not picks[0] < picks[1] < picks[2]:
        remedy = f"a target of {layers} layers has no three distinct ones at 2, n // 2 and n - 3; state them"
        raise InputError("layers", list(picks), remedy)
    return picks


def check_feature_layers(layers: Sequence[int], target: Target) -> None:
    """Refuse hidden states that a target does not have, none at all, or one that is fused twice.

    Raises:
        InputError: with the bare field ``layers``.
    """
    target.check_states(layers, "layers")
    if not layers:
        raise InputError("layers", [], f"name hidden states of the target, from 0 to {target.depth}")
    if len({layer % (target.depth + 1) for layer in layers}) != len(layers):
        raise InputError("layers", list(layers), "a hidden state is in the list twice; name distinct ones")


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads the normed embedding beside the normed state; the residual is the state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size, bias=bool(config.attention_bias))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, state: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return ``[rows, tokens, hidden]``."""
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), dim=-1)
        state = state + self.self_attn(x, rotation, attend)
        return state + self.mlp(self.post_attention_layernorm(state))


class Eagle3Head(nn.Module):
    """Fuses the target's states once, then runs on its own; it has an output layer of its own.

    Args:
        config: shape; ``hidden_size`` is that of the embedding.
        vocabulary: what it can draft.
        feature_layers: the target's hidden states that are fused, in this order.
        target_hidden: width of each of them; ``None``: as the head's own.
        context_vocab: whether it can also draft what the text holds already; the target has to be as wide as the head.
    """

    own_output = True

    def __init__(
        self,
        config: LlamaConfig,
        vocabulary: DraftVocabulary,
        feature_layers: tuple[int, ...],
        target_hidden: int | None = None,
        context_vocab: bool = False,
    ) -> None:
        super().__init__()
        self.context_vocab = context_vocab
        self.config, self.vocabulary, self.rotation = config, vocabulary, Rotation(config)
        self.feature_layers = tuple(feature_layers)
        width = len(self.feature_layers) * (target_hidden or config.hidden_size)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(vocabulary), bias=False)

    @property
    def attention(self) -> Attention:
        """Its layer's attention."""
        return self.midlayer.self_attn

    def begin(self, features: Mapping[int, Tensor]) -> Tensor:
        """Return the fused states, ``[..., hidden]``."""
        return self.fc(torch.cat([features[layer] for layer in self.feature_layers], dim=-1))

    def step(self, state: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the layer's output before the norm, which the next step is fed too, ``[rows, tokens, hidden]``."""
        return self.midlayer(state, embedded, rotation, attend)

    def logits(self, state: Tensor, shared_output: Tensor | PackedLinear) -> Tensor:
        """Return ``[..., draft_vocab]`` through the head's own norm and output layer."""
        return self.lm_head(self.norm(state))

    def context_logits(self, state: Tensor, output_rows: Tensor) -> Tensor:
        """Return ``[..., beyond]`` through its norm and rows of the target's output layer, with which its own began."""
        return F.linear(self.norm(state), output_rows)
