"""What EAGLE heads have in common for those who train them and draft with them, and the target's parts they lean on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from specdec_lab.errors import UnsupportedModelError
from specdec_lab.heads.decoder import Attend, Attention, Rotation
from specdec_lab.heads.packed import PackedLinear, packed
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target


class RecurrentHead(Protocol):
    """A decoder layer, or a few, that run along the text on hidden states and the tokens that followed them.

    The input at position *t* is what is known of the state after token *t* and the embedding of token *t + 1*; the
    output stands for the state after token *t + 1*, from which token *t + 2* is drafted. It is the input of the next
    step where the target's own state is not known yet.

    Attributes:
        config: shape of the layers, and how many there are.
        vocabulary: what it can draft.
        feature_layers: hidden states of the target that ``begin`` reads.
        rotation: of its positions.
        own_output: whether it has an output layer of its own.
        context_vocab: whether it can also draft what the text holds already, whatever its vocabulary
            (``docs/decisions/0017-context-vocabulary.md``).
    """

    config: LlamaConfig
    vocabulary: DraftVocabulary
    feature_layers: tuple[int, ...]
    rotation: Rotation
    own_output: bool
    context_vocab: bool

    @property
    def attention(self) -> Attention:
        """Its last layer's attention."""
        ...

    def begin(self, features: Mapping[int, Tensor]) -> Tensor:
        """Return the first layer's input from the target's, ``{layer: [..., target hidden]} -> [..., hidden]``."""
        ...

    def step(self, state: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the next states, ``[rows, tokens, hidden]`` from states and embedded tokens of the same shape."""
        ...

    def logits(self, state: Tensor, shared_output: Tensor | PackedLinear) -> Tensor:
        """Return ``[..., draft_vocab]`` of states that ``step`` returned.

        Args:
            shared_output: the target's output layer at the draft vocabulary, ``[draft_vocab, target hidden]``, in the
                states' dtype; not read by a head with an output layer of its own.
        """
        ...

    def context_logits(self, state: Tensor, output_rows: Tensor) -> Tensor:
        """Return ``[..., beyond]`` of states that ``step`` returned, to stand beside their ``logits``.

        Args:
            output_rows: the target's output layer at ids beyond the draft vocabulary, ``[beyond, target hidden]``.
        """
        ...


class SharedParts:
    """The target's embedding, and its output layer at a draft vocabulary: frozen, never copied into a checkpoint.

    Raises:
        UnsupportedModelError: an output layer with a bias, which no published head accounts for, or one on another
            device than the embedding.
    """

    def __init__(self, target: Target, vocabulary: DraftVocabulary) -> None:
        output = target.model.get_output_embeddings()
        assert output is not None
        if getattr(output, "bias", None) is not None:
            raise UnsupportedModelError(f"the output layer of {target.name} has a bias; draft heads cannot share it")
        weight, embedding = output.weight, target.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        assert isinstance(embedding, Tensor)
        if weight.device != embedding.device:
            raise UnsupportedModelError(f"{target.name} lies on several devices; draft heads need it on one")
        self._embedding, self._weight, self._vocabulary = embedding.detach(), weight.detach(), vocabulary

    @cached_property
    def output(self) -> Tensor:
        """The output layer at the vocabulary, ``[draft_vocab, hidden]``; a copy where the vocabulary is reduced."""
        if self._vocabulary.is_whole:
            return self._weight
        return self._weight[self._vocabulary.token_ids.to(self._weight.device)].contiguous()

    def drafting_output(self, dtype: torch.dtype) -> Tensor | PackedLinear:
        """Return the output layer at the vocabulary for those who draft, ``[draft_vocab, hidden]``.

        The target's own weight where the vocabulary is whole and the dtype is the target's; otherwise a copy, packed
        where the vocabulary is reduced and that is faster.
        """
        if self._vocabulary.is_whole:
            return self._weight.to(dtype)
        return packed(self.output_at(self._vocabulary.token_ids).to(dtype))

    def likeliest(self, states: Tensor) -> Tensor:
        """Return the target's likeliest tokens of all, ``[positions]``, from its last hidden states."""
        at_once = 256  # the whole output layer times all positions of a batch would be gigabytes
        parts = states.to(self._weight.dtype).split(at_once)
        return torch.cat([F.linear(some, self._weight).argmax(dim=-1) for some in parts])

    def is_own(self, output: Tensor | PackedLinear) -> bool:
        """Return whether an output layer takes no memory besides the target's."""
        return isinstance(output, Tensor) and output.data_ptr() == self._weight.data_ptr()

    def output_at(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer, ``[ids, hidden]``."""
        return self._weight[token_ids.to(self._weight.device)]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return ``[..., hidden]`` in the target's dtype."""
        return F.embedding(token_ids, self._embedding)
