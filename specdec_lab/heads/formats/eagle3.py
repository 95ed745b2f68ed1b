"""EAGLE-3 checkpoints (arXiv 2503.01840), under ``midlayer.`` or ``layers.0.``, and which hidden states they fuse.

Hidden states are counted in two ways. Here, in transformers and in vLLM number *i* is what layer *i* reads, and 0 is
the embedding; other trainers number the layers, and *i* is what layer *i* writes, which is one more here. A
configuration that does not say which one it means is refused, since a head on the wrong states drafts badly and says
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from specdec_lab.errors import InputError
from specdec_lab.heads.eagle3 import Eagle3Head, default_feature_layers
from specdec_lab.heads.formats.checks import DERIVED, hollow, refuse_other_values, refuse_variant
from specdec_lab.heads.formats.eagle import copied_parts, stated_context_vocab
from specdec_lab.heads.formats.files import BLOCK, CONFIG, Checkpoint
from specdec_lab.heads.formats.layer import layer_fields, read_layer, refuse_stated_bias
from specdec_lab.heads.formats.vocabularies import both_tensors, read_vocabulary
from specdec_lab.target import Target

WEIGHTS = "model.safetensors"
OWN, OTHER = "midlayer.", "layers.0."
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FEATURE_LAYERS = "feature_layers"

VARIANTS = {
    "mask_hidden": "parallel drafting (P-EAGLE)",
    "fc_norm.": "fc_norm, norms of each fused state",
    "input_norm.": "norm_before_fc, a norm of all fused states",
    "embed_layernorm.": "a norm of the embeddings outside of the layer",
    "hidden_layernorm.": "a norm of the hidden states outside of the layer",
    "lm_head_layernorm.": "a norm before the output layer besides norm",
    ".q_norm.": "attention with norms of queries and keys",
    "layers.1.": "a head of more than one layer",
}

STANDARD: Mapping[str, Any] = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Fields that name a variant, with the value that means none."""

STANDARD_EAGLE_CONFIG: Mapping[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""The same within ``eagle_config``."""


def read_eagle3(checkpoint: Checkpoint, target: Target) -> tuple[Eagle3Head, dict[str, str]]:
    """Return a hollow head and the checkpoint's names of its tensors, from the layout of EAGLE's own repository."""
    return read_eagle3_with(checkpoint, checkpoint.config, target)


def read_eagle3_with(
    checkpoint: Checkpoint, fields: Mapping[str, Any], target: Target
) -> tuple[Eagle3Head, dict[str, str]]:
    """Return a hollow head and the checkpoint's names of its tensors.

    Args:
        checkpoint: its weights, and fields outside of the layer.
        fields: the part of the configuration that states the layer.
        target: what it drafts for.

    Raises:
        InputError: a variant that is not supported, or parts of another target.
    """
    refuse_variant(checkpoint, checkpoint.names, VARIANTS)
    refuse_stated_variant(checkpoint)
    embedding = "embed_tokens.weight"
    skipped = {embedding, "d2t", "t2d"}
    kept = [name for name in checkpoint.names if name not in skipped and not name.endswith(DERIVED)]
    names: dict[str, str] = {}
    for stored in kept:
        name = OWN + stored.removeprefix(OTHER) if stored.startswith(OTHER) else stored
        if name in names:
            raise checkpoint.refusal(f"{names[name]} and {stored} are one tensor; keep one of them")
        names[name] = stored
    for name in ("fc.weight", "lm_head.weight"):
        if name not in names:
            raise checkpoint.refusal(f"the weights lack {name}; copy the whole checkpoint again")
    bias = refuse_stated_bias(
        checkpoint, fields, ("qkv_bias", "attention_bias"), f"{OWN}self_attn.q_proj.bias" in names
    )
    config = read_layer(checkpoint, fields, target, bias=bias)
    stated_width = checkpoint.config.get("target_hidden_size")
    if stated_width not in (None, target.hidden_size):
        remedy = f"target_hidden_size={stated_width!r} in {CONFIG}, and the target's states have {target.hidden_size}"
        raise checkpoint.refusal(f"{remedy}; use a head that was trained for this target")
    layers = read_feature_layers(checkpoint, target.depth)
    width = checkpoint.shape(names["fc.weight"])[-1]
    if width != len(layers) * target.hidden_size:
        remedy = f"its fc.weight fuses {width} numbers, and {len(layers)} states of the target have"
        raise checkpoint.refusal(f"{remedy} {len(layers) * target.hidden_size}; {_STATE}")
    rows = checkpoint.shape(names["lm_head.weight"])[0]
    stated_rows = checkpoint.config.get("draft_vocab_size")
    if stated_rows not in (None, rows):
        remedy = f"draft_vocab_size={stated_rows!r} in {CONFIG}, and lm_head.weight has {rows}"
        raise checkpoint.refusal(f"{remedy} rows; one of them is of another head")
    vocabulary = read_vocabulary(checkpoint, rows, target)
    if embedding in checkpoint.names:
        remedy = "a head with an embedding of its own is not supported"
        refuse_other_values(checkpoint, embedding, copied_parts(target)[embedding], remedy)
    context = stated_context_vocab(checkpoint)
    return hollow(lambda: Eagle3Head(config, vocabulary, layers, target.hidden_size, context)), names


def refuse_stated_variant(checkpoint: Checkpoint) -> None:
    """Refuse a configuration that names a variant.

    Raises:
        InputError: names the field.
    """
    inner = checkpoint.config.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise checkpoint.refusal(f'"eagle_config" in {CONFIG} is no group of fields; mend it')
    for stated, standard in ((checkpoint.config, STANDARD), (inner, STANDARD_EAGLE_CONFIG)):
        for name, value in standard.items():
            if stated.get(name) not in (None, value):
                remedy = f"{name}={stated[name]!r} in {CONFIG} is a variant that is not supported"
                raise checkpoint.refusal(f"{remedy}; use a head with {name}={value!r}")


# --- which hidden states ----------------------------------------------------------------------------------------------


def read_feature_layers(checkpoint: Checkpoint, layers: int) -> tuple[int, ...]:
    """Return the hidden states that a head fuses, as transformers counts them.

    What this package wrote counts first. Without any statement they are the published ones, 2, n // 2 and n - 3.

    Args:
        checkpoint: whose configuration states them.
        layers: decoder layers of the target.

    Raises:
        InputError: states that the target does not have, or a statement that can be read in two ways.
    """
    if FEATURE_LAYERS in checkpoint.block:
        own = _ids(checkpoint, checkpoint.block[FEATURE_LAYERS], FEATURE_LAYERS)
        strange = [layer for layer in own if not -layers - 1 <= layer <= layers]
        if strange:
            raise checkpoint.refusal(f"{FEATURE_LAYERS} names state {strange[0]}, and the target has {layers} layers")
        return own
    outer = checkpoint.config.get(LAYER_IDS)
    inner = (checkpoint.config.get("eagle_config") or {}).get(LAYER_IDS)
    found = {_counted_as_states(checkpoint, outer, layers)} if outer is not None else set()
    found |= {_counted_as_either(checkpoint, inner, layers)} if inner is not None else set()
    if len(found) > 1:
        raise checkpoint.refusal(f"{LAYER_IDS} stands in {CONFIG} twice, with different states; {_STATE}")
    for stated in found:
        strange = [layer for layer in stated if not 0 <= layer < layers]
        if strange:
            remedy = f"state {strange[0]} of a target of {layers} layers is none that transformers returns"
            raise checkpoint.refusal(f"{LAYER_IDS} names {remedy}; use a head on states 0 to {layers - 1}")
        return stated
    try:
        return default_feature_layers(layers)
    except InputError as error:
        raise checkpoint.refusal(f"{CONFIG} names no hidden states, and {error.remedy}: {_STATE}") from None


_STATE = f'state them in {CONFIG} as "{BLOCK}": {{"{FEATURE_LAYERS}": [..]}}, where 0 is the embedding'


def _counted_as_states(checkpoint: Checkpoint, value: object, layers: int) -> tuple[int, ...]:
    """Read the list that vLLM reads; the published default with every number one too low is most likely no accident."""
    ids = _ids(checkpoint, value, LAYER_IDS)
    if ids == (1, layers // 2 - 1, layers - 4):
        raise checkpoint.refusal(_either_way(ids))
    return ids


def _counted_as_either(checkpoint: Checkpoint, value: object, layers: int) -> tuple[int, ...]:
    """Read the list in ``eagle_config``: layers that write, known by their first number 1; or the default's states."""
    ids = _ids(checkpoint, value, LAYER_IDS)
    if ids[0] == 1:
        return tuple(layer + 1 for layer in ids)
    if ids == (2, layers // 2, layers - 3):
        return ids
    raise checkpoint.refusal(_either_way(ids))


def _either_way(ids: Sequence[int]) -> str:
    shifted = [layer + 1 for layer in ids]
    how = f"can mean states {list(ids)} or, one further, what these layers write, states {shifted}"
    return f"{LAYER_IDS}={list(ids)} in {CONFIG} {how}; {_STATE}"


def _ids(checkpoint: Checkpoint, value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(one) is int for one in value):
        raise checkpoint.refusal(f"{name}={value!r} in {CONFIG} is no list of numbers of hidden states; mend it")
    return tuple(value)


# --- writing ----------------------------------------------------------------------------------------------------------


def eagle3_files(head: Eagle3Head) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and ``config.json`` of a head in the layout of EAGLE's own repository.

    States that are counted from the end go into this package's own fields alone: no other loader knows of them.
    """
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layer_fields(head.config, head.vocabulary.target_vocab)}
    config |= outer_fields(head)
    return {**head.state_dict(), **both_tensors(head.vocabulary)}, config


def outer_fields(head: Eagle3Head) -> dict[str, Any]:
    """Return the fields about a head that are not about its layer."""
    width = head.fc.in_features // len(head.feature_layers)
    fields: dict[str, Any] = {"draft_vocab_size": len(head.vocabulary), "target_hidden_size": width}
    if head.midlayer.self_attn.q_proj.bias is not None:
        fields["qkv_bias"] = True
    if all(layer >= 0 for layer in head.feature_layers):
        fields[LAYER_IDS] = list(head.feature_layers)
    return fields


def own_fields(head: Eagle3Head) -> dict[str, Any]:
    """Return what this package states about a head in its own part of ``config.json``."""
    return {FEATURE_LAYERS: list(head.feature_layers), "counted_as": "hidden_states of transformers, 0 the embedding"}
