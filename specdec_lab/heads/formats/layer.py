"""The shape of a head's decoder layer in ``config.json``: read field by field, so that nothing else in it has a say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from transformers import LlamaConfig
from transformers.activations import ACT2FN

from specdec_lab.config import PositiveInt, validate
from specdec_lab.errors import InputError, one_line
from specdec_lab.heads.formats.files import CONFIG, Checkpoint
from specdec_lab.target import Target


class LayerFields(BaseModel):
    """Fields of a Llama configuration that shape one layer; what may be absent has the value of published heads."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: PositiveInt = 2048
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


def read_layer(
    checkpoint: Checkpoint, fields: Mapping[str, Any], target: Target, *, bias: bool, layers: int = 1
) -> LlamaConfig:
    """Return the configuration of a head's layers.

    Args:
        checkpoint: for messages.
        fields: the part of its configuration that states the layer.
        target: whose vocabulary it has to have.
        bias: whether the projections of queries, keys and values have one, as the weights show.
        layers: as counted in the weights; published configurations state that of another model at times.

    Raises:
        InputError: a field that is missing or cannot be, or is that of another target.
    """
    try:
        layer = validate(LayerFields, fields)
    except InputError as error:
        raise checkpoint.refusal(f"{error.field}={error.value!r} in {CONFIG}: {error.remedy}") from None
    if layer.vocab_size != target.vocab_size:
        remedy = f"vocab_size={layer.vocab_size} in {CONFIG}, and the target has {target.vocab_size} ids"
        raise checkpoint.refusal(f"{remedy}; use a head that was trained for this target")
    if layer.hidden_size != target.hidden_size:
        remedy = f"hidden_size={layer.hidden_size} in {CONFIG}, and the target's states have {target.hidden_size}"
        raise checkpoint.refusal(f"{remedy}; use a head that was trained for this target")
    if layer.hidden_act not in ACT2FN:
        raise checkpoint.refusal(f"hidden_act={layer.hidden_act!r} in {CONFIG} is no activation of transformers")
    given = {name: value for name, value in layer.model_dump().items() if value is not None}
    try:
        return LlamaConfig(**given, num_hidden_layers=layers, attention_bias=bias, tie_word_embeddings=False)
    except Exception as error:  # transformers checks heads against widths, and rotary parameters
        raise checkpoint.refusal(f"{CONFIG} states no layer that can be ({one_line(error)}); mend it") from error


def layer_fields(config: LlamaConfig, vocab_size: int) -> dict[str, Any]:
    """Return a layer's configuration as every loader reads it: rotary parameters under their older names."""
    ropes: dict[str, Any] = dict(config.rope_parameters or {})
    theta = ropes.pop("rope_theta")
    scaling = {} if ropes.get("rope_type", "default") == "default" else {"rope_scaling": ropes}
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": theta,
        **scaling,
        "tie_word_embeddings": False,
    }


def refuse_stated_bias(checkpoint: Checkpoint, stated: Mapping[str, Any], keys: tuple[str, ...], held: bool) -> bool:
    """Return whether there is a bias: as the weights say, unless the configuration says otherwise.

    Args:
        checkpoint: for messages.
        stated: the configuration.
        keys: its fields that state the bias, the one that counts first.
        held: whether the weights hold one.

    Raises:
        InputError: the two contradict each other.
    """
    key = next((name for name in keys if stated.get(name) is not None), None)
    if key is not None and bool(stated[key]) != held:
        remedy = f"the weights hold {'a' if held else 'no'} bias; one of them is of another head"
        raise checkpoint.refusal(f'"{key}" is {str(bool(stated[key])).lower()} in {CONFIG}, and {remedy}')
    return held
