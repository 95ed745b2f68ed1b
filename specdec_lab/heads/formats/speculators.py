"""The layout of the speculators package for EAGLE-3: nested configuration, tensors under ``layers.0.``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec_lab.errors import InputError
from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.formats.eagle3 import LAYER_IDS, OTHER, OWN, STANDARD, outer_fields, read_eagle3_with
from specdec_lab.heads.formats.files import CONFIG, Checkpoint, named_target
from specdec_lab.heads.formats.layer import layer_fields
from specdec_lab.heads.formats.vocabularies import both_tensors
from specdec_lab.target import Target

VERSION = "0.9.0"
"""Release of speculators whose layout is written."""

TYPE = "speculators_model_type"
LAYER = "transformer_layer_config"
DRAFTED = 3
"""Draft tokens that the written configuration proposes; each loader can be told another number."""


def is_speculators(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has this layout."""
    return TYPE in checkpoint.config


def read_speculators(checkpoint: Checkpoint, target: Target) -> tuple[Eagle3Head, dict[str, str]]:
    """Return a hollow head and the checkpoint's names of its tensors.

    Raises:
        InputError: another kind of head, a variant, or a field without which there would be two ways to read it.
    """
    kind, layer = checkpoint.config[TYPE], checkpoint.config.get(LAYER)
    if kind != "eagle3":
        raise checkpoint.refusal(f"{TYPE}={kind!r} in {CONFIG} is not supported; of this layout only eagle3 is read")
    if not isinstance(layer, dict):
        raise checkpoint.refusal(f"{CONFIG} lacks {LAYER}, the group of fields of its layer; copy it again")
    if checkpoint.config.get("norm_before_residual") is None:
        remedy = "which loaders take for true or false; state what it was trained with"
        raise checkpoint.refusal(f"{CONFIG} lacks norm_before_residual, {remedy}")
    return read_eagle3_with(checkpoint, layer, target)


def speculators_files(head: Eagle3Head, facts: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and ``config.json`` of a head in this layout.

    Args:
        head: what is written.
        facts: name the target (``target``, or ``target.model`` and ``target.architectures``).

    Raises:
        InputError: the layout has no place for what the head is, or a field that it needs is not known.
    """
    fields = outer_fields(head)
    if LAYER_IDS not in fields:
        remedy = "the speculators layout counts states from the start; train the head on states that are counted so"
        raise InputError("head", list(head.feature_layers), remedy)
    if fields.pop("qkv_bias", False):
        raise InputError("head", "qkv_bias", "the speculators layout has no bias of queries, keys and values alone")
    target = facts.get("target")
    architectures = target.get("architectures", []) if isinstance(target, Mapping) else []
    config = {
        "architectures": ["Eagle3Speculator"],
        TYPE: "eagle3",
        "speculators_version": VERSION,
        **fields,
        **STANDARD,
        "embed_requires_grad": False,
        LAYER: layer_fields(head.config, head.vocabulary.target_vocab),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": DRAFTED,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": named_target(facts), "architectures": list(architectures)},
        },
    }
    tensors = {
        OTHER + name.removeprefix(OWN) if name.startswith(OWN) else name: tensor
        for name, tensor in head.state_dict().items()
    }
    return {**tensors, **both_tensors(head.vocabulary)}, config
