"""The folder of a draft model that was made from its target: its own layers, and what it takes from the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specdec_lab.errors import InputError, one_line
from specdec_lab.heads.draft_lm import DraftLM
from specdec_lab.heads.formats.files import BLOCK, CONFIG, write_folder
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

FORMAT = "specdec_lab draft model 1"
WEIGHTS, VOCABULARY = "model.safetensors", "d2t"


def is_draft_model(source: str) -> bool:
    """Return whether a folder holds such a model, and no model of its own."""
    return _config(source).get("format") == FORMAT


def refuse_head(source: str) -> None:
    """Refuse the folder of a head, which looks like that of a model until its weights are read.

    Raises:
        InputError: with the bare field ``model``; names the strategy that the head is for.
    """
    block = _config(source).get(BLOCK)
    kind = block.get("kind") if isinstance(block, dict) else None
    if kind is not None:
        remedy = f"this is a head for the strategy {kind}; use it as one of those, or give the folder of a causal LM"
        raise InputError("model", source, remedy)


def _config(source: str) -> dict[str, Any]:
    try:
        found = json.loads((Path(source) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def save_draft_model(
    draft: DraftLM, folder: Path, facts: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a draft model; the folder gets its name only when it is complete.

    Args:
        facts: provenance and measurements, plain JSON.
        dtype: of the stored weights.

    Raises:
        InputError: the folder holds something that is no checkpoint.
    """
    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in draft.state_dict().items()}
    if not draft.vocabulary.is_whole:
        weights[VOCABULARY] = draft.vocabulary.offsets()
    config = {
        "format": FORMAT,
        "origin_layers": list(draft.origin),
        "target_vocab": draft.vocabulary.target_vocab,
        "draft_vocab": len(draft.vocabulary),
        "facts": dict(facts),
    }
    write_folder(folder, WEIGHTS, weights, config)


def load_draft_model(source: str, target: Target) -> tuple[DraftLM, dict[str, Any]]:
    """Return the model, in evaluation mode, and its facts.

    Raises:
        InputError: damaged files, or a model that was made from another target; with the bare field ``model``.
    """
    folder = Path(source)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
        origin, offsets = [int(layer) for layer in config["origin_layers"]], weights.pop(VOCABULARY, None)
        vocabulary = (
            DraftVocabulary.whole(config["target_vocab"])
            if offsets is None
            else DraftVocabulary.from_offsets(offsets, config["target_vocab"])
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        remedy = f"its files cannot be read ({one_line(error)}); copy the folder again"
        raise InputError("model", source, remedy) from error
    if config.get("target_vocab") != target.vocab_size:
        remedy = (
            f"it was made from a target of {config.get('target_vocab')} ids and {target.name} has {target.vocab_size}"
        )
        raise InputError("model", source, remedy)
    try:
        own = [f"{part}.weight" in weights for part in ("embedding", "output")]
        draft = DraftLM(target, origin, vocabulary, *own)
    except InputError as error:
        raise InputError("model", source, f"it was made from layers {origin}; {error.remedy}") from error
    expected = {name: tuple(weight.shape) for name, weight in draft.state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if expected != found:
        differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        remedy = f"{differ[0]} is {found.get(differ[0])} there and {expected.get(differ[0])} in {target.name}"
        raise InputError("model", source, f"{remedy}; it was made from another target")
    draft.load_state_dict(weights)
    facts = config.get("facts", {})
    return draft.eval(), facts if isinstance(facts, dict) else {}
