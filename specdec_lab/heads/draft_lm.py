"""A small causal LM made from its target: some of its layers, and its embedding and output layer or copies of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec_lab.attention import WATCHED_ATTENTION
from specdec_lab.errors import InputError, UnsupportedModelError
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

_LAYER = re.compile(r"^(?P<stem>.*\blayers\.)(?P<index>\d+)\.(?P<rest>.*)$")


class DraftLM(nn.Module):
    """The part of such a model that is its own, in float32: decoder layers, the norm after them, and what it is told.

    Args:
        target: what it is made from and drafts for.
        origin: layers of the target that it starts as, in this order.
        vocabulary: what it can draft.
        own_embedding: whether it has an embedding of its own, which starts as the target's.
        own_output: whether it has an output layer of its own, which starts as the target's at the vocabulary.

    Raises:
        InputError: layers that the target does not have; with the bare field ``layers``.
        UnsupportedModelError: a target without ``layers`` and ``norm`` in its decoder.
    """

    def __init__(
        self,
        target: Target,
        origin: Sequence[int],
        vocabulary: DraftVocabulary,
        own_embedding: bool = False,
        own_output: bool = False,
    ) -> None:
        super().__init__()
        self.origin, self.vocabulary = tuple(origin), vocabulary
        lm = draft_from_layers(target, self.origin)
        fused = lm.config._attn_implementation != "eager"
        lm.set_attn_implementation(WATCHED_ATTENTION if fused else "eager")  # the rest has trees
        decoder: Any = lm.base_model
        if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
            raise UnsupportedModelError(f"the decoder of {target.name} has no layers and norm to make a draft from")
        self._decoder, self._embedding = (decoder,), (target.model.get_input_embeddings(),)
        self.layers, self.norm = decoder.layers.float(), decoder.norm.float()
        self.watchable = fused and hasattr(getattr(self.layers[-1], "self_attn", None), "o_proj")
        self.embedding = copy.deepcopy(self._embedding[0]).float().requires_grad_() if own_embedding else None
        self.output = copy.deepcopy(reduced_output(target, vocabulary)).float().requires_grad_() if own_output else None

    def states(self, ids: Tensor, watch: Callable[[int, Tensor, Tensor, Tensor], None] | None = None) -> Tensor:
        """Return the states that the output layer reads, ``[rows, tokens, hidden]``, for ids padded on the right.

        Args:
            watch: is shown the index, queries, keys and values of each layer, if ``watchable``.
        """
        own = self.embedding
        embedded = self._embedding[0](ids).detach() if own is None else own(ids)
        embedded = embedded.to(next(self.layers.parameters()).dtype)
        shown = {} if watch is None else {"watch": watch}
        return self._decoder[0](inputs_embeds=embedded, use_cache=False, **shown).last_hidden_state

    @property
    def last_output(self) -> Tensor:
        """The weight that turns the last layer's attention into a state, ``[hidden, query_heads * head_dim]``."""
        weight = self.layers[-1].self_attn.o_proj.weight
        assert isinstance(weight, Tensor)
        return weight

    def logits(self, states: Tensor, shared_output: Tensor) -> Tensor:
        """Return ``[..., draft_vocab]`` of ``[..., hidden]``.

        Args:
            shared_output: the target's output layer at the draft vocabulary; not read if there is one of its own.
        """
        return F.linear(states, shared_output.to(states.dtype)) if self.output is None else self.output(states)

    def served(self, target: Target) -> Target:
        """Return the model as a second target with the first one's dtype, and what is not its own of the first.

        Its logits are over the draft vocabulary, ``[..., draft_vocab]``.
        """
        lm = draft_from_layers(target, self.origin)
        decoder: Any = lm.base_model
        decoder.layers.load_state_dict(self.layers.state_dict())
        decoder.norm.load_state_dict(self.norm.state_dict())
        if not self.vocabulary.is_whole:
            lm.set_output_embeddings(reduced_output(target, self.vocabulary))
        dtype, device = target.dtype, target.device
        if self.embedding is not None:
            lm.set_input_embeddings(copy.deepcopy(self.embedding).to(device, dtype))
        if self.output is not None:
            lm.set_output_embeddings(copy.deepcopy(self.output).to(device, dtype))
        return Target(lm, target.tokenizer, name=f"{target.name}[{','.join(map(str, self.origin))}]")


def draft_from_layers(target: Target, layers: Sequence[int]) -> PreTrainedModel:
    """Return a model of the target's class whose layers are copies of some of the target's; the rest is the target's.

    Raises:
        InputError: layers that the target does not have; with the bare field ``layers``.
    """
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config()
    check_layers(layers, target.depth)
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = [kinds[layer] for layer in layers]
    text.num_hidden_layers = len(layers)
    attention = target.model.config._attn_implementation
    with torch.device("meta"):
        draft = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert isinstance(draft, PreTrainedModel)
    draft.load_state_dict(_chosen(target.model.state_dict(), layers), strict=False, assign=True)
    draft.set_input_embeddings(target.model.get_input_embeddings())
    draft.set_output_embeddings(target.model.get_output_embeddings())
    _copy_buffers(target.model, draft)
    missing = [name for name, weight in draft.named_parameters() if weight.is_meta]
    if missing:
        raise UnsupportedModelError(f"no layer of {target.name} could be copied to {missing[0]}")
    return draft.eval()


def check_layers(layers: Sequence[int], depth: int) -> None:
    """Refuse layers that the target does not have.

    Raises:
        InputError: with the bare field ``layers``.
    """
    if not layers or min(layers) < 0 or max(layers) >= depth:
        remedy = f"name layers of the target, from 0 to {depth - 1}, as [0,1,{depth - 1}]"
        raise InputError("layers", list(layers), remedy)


def reduced_output(target: Target, vocabulary: DraftVocabulary) -> nn.Linear:
    """Return the target's output layer at a draft vocabulary, frozen."""
    whole = target.model.get_output_embeddings()
    assert whole is not None
    weight = whole.weight
    assert isinstance(weight, Tensor)
    rows = weight.detach()[vocabulary.token_ids.to(weight.device)].contiguous()
    output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    output.weight = nn.Parameter(rows, requires_grad=False)
    return output


def _chosen(weights: dict[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
    """Return a state of as many layers as are named, each a copy of the layer of that index; the rest copied too."""
    chosen: dict[str, Tensor] = {}
    for name, weight in weights.items():
        found = _LAYER.match(name)
        if found is None:
            if weight.dim() == 1:  # norms; embedding and output layer are the target's own
                chosen[name] = weight.detach().clone()
            continue
        for place, layer in enumerate(layers):
            if int(found["index"]) == layer:
                chosen[f"{found['stem']}{place}.{found['rest']}"] = weight.detach().clone()
    return chosen


def _copy_buffers(source: nn.Module, draft: nn.Module) -> None:
    """Fill what is in no checkpoint, such as the frequencies of rotary positions."""
    known = dict(source.named_buffers())
    for name, buffer in list(draft.named_buffers()):
        if buffer.is_meta:
            place, _, last = name.rpartition(".")
            draft.get_submodule(place)._buffers[last] = known[name].clone()
