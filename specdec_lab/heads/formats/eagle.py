"""Checkpoints of EAGLE-1 and EAGLE-2, which differ in the tree alone (arXiv 2401.15077, 2406.16858).

Tensors: ``fc.weight [hidden, 2 * hidden]``, ``fc.bias`` in some, and ``layers.0.`` of a Llama without a norm before its
attention; further layers are whole ones, as the published code builds them where a configuration asks for more. Many
hold a copy of the target's embedding, and exports for an old server one of its output layer: both are compared and then
left alone. An extension of this package is ``d2t``, the offsets of a reduced vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.formats.checks import DERIVED, hollow, refuse_other_values, refuse_variant
from specdec_lab.heads.formats.files import CONFIG, Checkpoint
from specdec_lab.heads.formats.layer import layer_fields, read_layer, refuse_stated_bias
from specdec_lab.heads.formats.vocabularies import offset_tensors, read_vocabulary
from specdec_lab.target import Target

WEIGHTS = "model.safetensors"

VARIANTS = {
    "embed_layernorm.": "a head with a norm of its embeddings (HASS and others)",
    "hidden_layernorm.": "a head with a norm of its hidden states (HASS and others)",
    "lm_head_layernorm.": "a head with a norm before its output layer (HASS and others)",
    "layers.0.input_layernorm.": "a head with a norm before its attention",
    ".q_norm.": "attention with norms of queries and keys",
    "token_map": "the reduced vocabulary of an old server",
}

CONTEXT_VOCAB = "context_vocab"

LAYER = re.compile(r"layers\.(\d{1,2})\.")

PROJECTION_BIAS = "layers.0.self_attn.q_proj.bias"


def read_eagle(checkpoint: Checkpoint, target: Target) -> tuple[EagleHead, dict[str, str]]:
    """Return a hollow head and the checkpoint's names of its tensors.

    Raises:
        InputError: a variant that is not supported, or parts of another target.
    """
    refuse_variant(checkpoint, checkpoint.names, VARIANTS)
    copies = copied_parts(target)
    names = [name for name in checkpoint.names if name not in (*copies, "d2t") and not name.endswith(DERIVED)]
    fields = layer_group(checkpoint)
    fc_bias = stated_fc_bias(checkpoint, held="fc.bias" in names)
    bias = refuse_stated_bias(checkpoint, fields, ("qkv_bias", "attention_bias"), PROJECTION_BIAS in names)
    config = read_layer(checkpoint, fields, target, bias=bias, layers=count_layers(names))
    vocabulary = read_vocabulary(checkpoint, None, target)
    for name, own in copies.items():
        if name in checkpoint.names:
            refuse_other_values(checkpoint, name, own, "use a head that was trained for this target")
    context = stated_context_vocab(checkpoint)
    return hollow(lambda: EagleHead(config, vocabulary, fc_bias, context)), {name: name for name in names}


def count_layers(names: Sequence[str]) -> int:
    """Return how many layers a checkpoint holds; at least one, so that a missing one is missed by its tensors."""
    return 1 + max((int(found.group(1)) for name in names if (found := LAYER.match(name))), default=0)


def copied_parts(target: Target) -> dict[str, Tensor]:
    """Return the target's parts that checkpoints may hold a copy of, by the copy's name."""
    embedding, output = target.model.get_input_embeddings().weight, target.model.get_output_embeddings()
    assert output is not None
    assert isinstance(embedding, Tensor)
    assert isinstance(output.weight, Tensor)
    return {"embed_tokens.weight": embedding.detach(), "lm_head.weight": output.weight.detach()}


def layer_group(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the fields of the layer: all of the configuration, or the group that an old server put them in."""
    group = checkpoint.config.get("model") if checkpoint.config.get("model_type") == "eagle" else None
    if group is None:
        return checkpoint.config
    if not isinstance(group, dict):
        raise checkpoint.refusal(f'"model" in {CONFIG} is no group of fields; mend it')
    return group


def stated_fc_bias(checkpoint: Checkpoint, held: bool) -> bool:
    """Return whether the fusing layer has a bias, which the weights and the configuration have to agree on.

    Published configurations say ``"bias"``, and a missing one means that there is a bias; those of an old server say
    ``"eagle_fc_bias"``, and a missing one means that there is none.

    Raises:
        InputError: they do not agree.
    """
    if checkpoint.config.get("model_type") == "eagle":
        return refuse_stated_bias(checkpoint, {"eagle_fc_bias": False} | checkpoint.config, ("eagle_fc_bias",), held)
    if checkpoint.config.get("bias") is None and not held:
        remedy = f'{CONFIG} has no "bias", which means that there is one; state "bias": false if it was trained so'
        raise checkpoint.refusal(f"the weights hold no fc.bias, and {remedy}")
    return refuse_stated_bias(checkpoint, checkpoint.config, ("bias",), held)


def stated_context_vocab(checkpoint: Checkpoint) -> bool:
    """Return whether a head was trained to draft what the text holds too; only this package states it.

    Raises:
        InputError: what is stated is neither true nor false.
    """
    stated = checkpoint.block.get(CONTEXT_VOCAB, False)
    if not isinstance(stated, bool):
        raise checkpoint.refusal(f"{CONTEXT_VOCAB}={stated!r} in {CONFIG} is neither true nor false; mend it")
    return stated


def eagle_files(head: EagleHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and ``config.json`` of a head in the published layout, without any part of the target."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        **layer_fields(head.config, head.vocabulary.target_vocab),
        "bias": head.fc.bias is not None,
        "qkv_bias": head.layers[0].self_attn.q_proj.bias is not None,  # pyright: ignore[reportAttributeAccessIssue]
    }
    return {**head.state_dict(), **offset_tensors(head.vocabulary)}, config
