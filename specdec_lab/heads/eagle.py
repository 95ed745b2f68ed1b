"""The head of EAGLE-1 and EAGLE-2: it predicts the target's next last hidden state (arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec_lab.heads.decoder import MLP, Attend, Attention, RMSNorm, Rotation
from specdec_lab.heads.packed import PackedLinear, linear
from specdec_lab.heads.vocabulary import DraftVocabulary


class EagleLayer(nn.Module):
    """A decoder layer; the first of a head has no norm before its attention, as in the published checkpoints."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if layer else nn.Identity()
        self.self_attn = Attention(config, config.hidden_size, bias=bool(config.attention_bias), layer=layer)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return ``[rows, tokens, hidden]``."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    @torch.no_grad()
    def add_nothing(self) -> None:
        """Let it hand on its input as it is; what it adds can be learnt from there."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()


class EagleHead(nn.Module):
    """One layer or more over the fused embedding and state; the output is read by the target's own output layer.

    Args:
        config: shape; ``hidden_size`` is the target's, ``num_hidden_layers`` the head's own.
        vocabulary: ids whose rows of the target's output layer are used.
        fc_bias: whether the fusing layer has a bias: yes for Llama-2 and Vicuna heads, no for later ones.
        context_vocab: whether it can also draft what the text holds already.
    """

    feature_layers: tuple[int, ...] = (-1,)
    own_output = False

    def __init__(
        self, config: LlamaConfig, vocabulary: DraftVocabulary, fc_bias: bool = False, context_vocab: bool = False
    ) -> None:
        super().__init__()
        self.context_vocab = context_vocab
        self.config, self.vocabulary, self.rotation = config, vocabulary, Rotation(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList(EagleLayer(config, layer) for layer in range(config.num_hidden_layers))

    @property
    def attention(self) -> Attention:
        """Its last layer's attention."""
        return self.layers[-1].self_attn  # pyright: ignore[reportReturnType]

    def begin(self, features: Mapping[int, Tensor]) -> Tensor:
        """Return the target's last hidden state as it is."""
        return features[-1]

    def step(self, state: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the predicted last hidden states, ``[rows, tokens, hidden]``."""
        state = self.fc(torch.cat((embedded, state), dim=-1))
        for layer in self.layers:
            state = layer(state, rotation, attend)
        return state

    def logits(self, state: Tensor, shared_output: Tensor | PackedLinear) -> Tensor:
        """Return ``[..., draft_vocab]`` through the target's output layer."""
        return linear(state, shared_output)

    def context_logits(self, state: Tensor, output_rows: Tensor) -> Tensor:
        """Return ``[..., beyond]`` through other rows of the same layer."""
        return linear(state, output_rows)
