"""Medusa checkpoints: heads with output layers of their own, heads that share the target's, and Medusa-2 (2401.10774).

=============  =======================================================================================================
first version  ``{head}.{block}.linear.{weight,bias}`` and ``{head}.{blocks}.weight``
version 2      the former alone; ``"version": "2"`` in ``config.json`` says that the output layer is the target's
Medusa-2       a whole base model with the first version's tensors under ``medusa_head.``
=============  =======================================================================================================

Heads and blocks are counted in the weights: published configurations state other numbers. An extension of this package
is ``d2t``, the offsets of a reduced vocabulary, as EAGLE-3 has them; others are ``root``, by which heads see the token
after the state, and pairs of tokens that follow each other (``transitions.``), beside which they may have been trained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec_lab.errors import listed
from specdec_lab.heads.formats.checks import hollow, refuse_other_values, refuse_variant
from specdec_lab.heads.formats.files import CONFIG, Checkpoint
from specdec_lab.heads.formats.vocabularies import offset_tensors, read_vocabulary
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.transitions import Transitions
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

WEIGHTS = "medusa_lm_head.safetensors"

TENSOR = re.compile(r"(?P<prefix>medusa_heads?\.)?(?P<name>(?P<head>\d+)\.(?P<part>\d+)\.(?P<leaf>linear\.\w+|weight))")

BASE = re.compile(r"model\.\w.*|lm_head\.weight")
"""Tensors of the base model that a Medusa-2 checkpoint holds beside its heads."""

PAIRS, PARTS = "transitions.", ("previous", "following", "counts")
"""Tensors of which tokens follow which, see ``specdec_lab.heads.transitions``."""

ROOT = "root"
"""Tensor of what the embedding of the token after the state adds to it, see ``MedusaHeads``."""

WEIGHT, MOST_WEIGHT = "transitions", 2
"""Field of what their ratios are raised to."""

VARIANTS = {"blocks.": "the layout of an old server, without published trees", "token_map": "that layout's vocabulary"}


def read_medusa(checkpoint: Checkpoint, target: Target) -> tuple[MedusaHeads, dict[str, str]]:
    """Return hollow heads and the checkpoint's names of their tensors.

    Raises:
        InputError: tensors that are missing or left over, a base model that is not the target.
    """
    refuse_variant(checkpoint, [name for name in checkpoint.names if not BASE.fullmatch(name)], VARIANTS)
    names: dict[str, str] = {}
    others: list[str] = []
    prefixed = False
    for stored in checkpoint.names:
        found = TENSOR.fullmatch(stored)
        if found is None:
            others.append(stored)
        elif found["name"] in names:
            raise checkpoint.refusal(f"{names[found['name']]} and {stored} are one tensor; keep one of them")
        else:
            names[found["name"]] = stored
            prefixed = prefixed or found["prefix"] is not None
    base = [name for name in others if BASE.fullmatch(name)] if prefixed else []
    own = (*base, "d2t", ROOT)
    unexpected = [name for name in others if name not in own and not name.startswith(PAIRS)]
    if unexpected:
        raise checkpoint.refusal(f"the weights hold {listed(unexpected, most=3)}, which Medusa heads do not have")
    refuse_other_base(checkpoint, base, target)
    heads, blocks, own_output = counted(checkpoint, list(names))
    rows = checkpoint.shape(names[f"0.{blocks}.weight"])[0] if own_output else None
    vocabulary = read_vocabulary(checkpoint, rows, target)
    sees_root = ROOT in checkpoint.names
    made = hollow(lambda: MedusaHeads(target.hidden_size, vocabulary, heads, blocks, own_output, sees_root))
    made.transitions = read_transitions(checkpoint, vocabulary)
    return made, names | ({ROOT: ROOT} if sees_root else {})


def read_transitions(checkpoint: Checkpoint, vocabulary: DraftVocabulary) -> Transitions | None:
    """Return which tokens follow which, for heads that were trained beside that; only this package states it.

    Raises:
        InputError: a part is missing, or is nothing that pairs can be.
    """
    weight = checkpoint.block.get(WEIGHT)
    held = [name for name in checkpoint.names if name.startswith(PAIRS)]
    if weight is None and not held:
        return None
    wanted = [PAIRS + part for part in PARTS]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MOST_WEIGHT:
        raise checkpoint.refusal(
            f"{WEIGHT}={weight!r} in {CONFIG} is no number above 0, at most {MOST_WEIGHT}; mend it"
        )
    if sorted(held) != sorted(wanted):
        raise checkpoint.refusal(f"the pairs of tokens need {', '.join(wanted)}; copy the whole checkpoint again")
    try:
        previous, following, counts = (checkpoint.tensor(name) for name in wanted)
        return Transitions(previous, following, counts, vocabulary, float(weight))
    except ValueError as error:
        raise checkpoint.refusal(f"{error}; copy the whole checkpoint again") from None


def counted(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[int, int, bool]:
    """Return how many heads and blocks the weights hold, and whether there are output layers.

    Trainers that repeat one block object train and store one block where the configuration says several: then the
    others are missing here, and what was trained cannot be told from a file that was cut.

    Raises:
        InputError: blocks are missing, or output layers that the configuration speaks of.
    """
    found = [TENSOR.fullmatch(name) for name in names]
    heads = 1 + max(int(one["head"]) for one in found if one)
    linear = {int(one["part"]) for one in found if one and one["head"] == "0" and one["leaf"] != "weight"}
    outputs = {int(one["part"]) for one in found if one and one["head"] == "0" and one["leaf"] == "weight"}
    stated = checkpoint.config.get("medusa") or checkpoint.config
    layers = stated.get("medusa_num_layers", stated.get("num_medusa_layers")) if isinstance(stated, dict) else None
    blocks = max(outputs) if outputs else max([1 + max(linear, default=0), layers if isinstance(layers, int) else 1])
    lacking = sorted(set(range(blocks)) - linear)
    if lacking:
        remedy = "a trainer that repeats one block stores it once; if this one did, copy that block's tensors"
        raise checkpoint.refusal(f"the weights lack 0.{lacking[0]}.linear.weight; {remedy} under the missing names")
    shares = str(checkpoint.config.get("version", "1")) == "2"
    if shares and outputs:
        raise checkpoint.refusal(
            f'"version" is "2" in {CONFIG}, and the weights hold output layers, which it does without'
        )
    if not shares and not outputs:
        remedy = 'state "version": "2" there if the heads share the target\'s, or copy the whole checkpoint'
        raise checkpoint.refusal(f"the weights hold no output layers, and {CONFIG} does not say why; {remedy}")
    return heads, blocks, bool(outputs)


def refuse_other_base(checkpoint: Checkpoint, base: Sequence[str], target: Target) -> None:
    """Compare the base model of a Medusa-2 checkpoint with the target: its heads were trained together with it.

    The output layer and the last decoder layer are compared; joint training changes them all.

    Raises:
        InputError: the target is another model.
    """
    if not base:
        return
    remedy = "its heads were trained together with the base model beside them, so give it as the target too"
    own = target.model.state_dict()
    last = f".layers.{target.depth - 1}."
    compared = [name for name in base if name in own and (last in name or name == "lm_head.weight")]
    if not compared:
        raise checkpoint.refusal(f"its base model is not the target; {remedy}")
    for name in compared:
        refuse_other_values(checkpoint, name, own[name], remedy)


def medusa_files(heads: MedusaHeads, base_model: str | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and ``config.json`` of heads in the published layout.

    Args:
        heads: what is written.
        base_model: hub id or folder of the target; left out where it is not known.
    """
    config: dict[str, Any] = {"medusa_num_heads": heads.heads, "medusa_num_layers": heads.blocks}
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
    if not heads.own_output:
        config["version"] = "2"
    pairs = heads.transitions
    held = {} if pairs is None else {PAIRS + part: getattr(pairs, part) for part in PARTS}
    return {**heads.state_dict(), **offset_tensors(heads.vocabulary), **held}, config


def own_fields(heads: MedusaHeads) -> dict[str, Any]:
    """Return what this package states about heads in its own part of ``config.json``."""
    return {} if heads.transitions is None else {WEIGHT: heads.transitions.weight}
