"""Checkpoints of draft heads in the layouts that their authors publish: read from folder or hub id, and written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specdec_lab.errors import InputError, listed
from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.formats import eagle, eagle3, medusa, speculators
from specdec_lab.heads.formats.checks import fill
from specdec_lab.heads.formats.files import (
    BLOCK,
    FORMAT_VERSION,
    Checkpoint,
    is_on_disk,
    named_target,
    open_checkpoint,
    write_folder,
)
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.target import Target

Kind = Literal["medusa", "eagle", "eagle3"]
Layout = Literal["native", "speculators"]

READERS: Mapping[Kind, Callable[[Checkpoint, Target], tuple[nn.Module, dict[str, str]]]] = {
    "medusa": medusa.read_medusa,
    "eagle": eagle.read_eagle,
    "eagle3": eagle3.read_eagle3,
}

WEIGHTS: Mapping[Kind, str] = {"medusa": medusa.WEIGHTS, "eagle": eagle.WEIGHTS, "eagle3": eagle3.WEIGHTS}

_MARKS: Mapping[Kind, re.Pattern[str]] = {
    "medusa": re.compile(rf"{medusa.TENSOR.pattern}|blocks\.\d.*"),
    "eagle3": re.compile(r"midlayer\..*|layers\.0\.hidden_norm\..*|t2d"),
    "eagle": re.compile(r"fc\.weight|layers\.0\..*"),
}
"""Names of tensors by which a kind is known, in the order in which they are tried."""


def load_head(
    kind: Kind, source: str, target: Target, revision: str | None = None, dtype: torch.dtype | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a head for a target.

    Args:
        kind: what it has to be.
        source: folder, hub id, or one file of weights beside its ``config.json``; a pickle only as such a file.
        target: what it drafts for; it is compared with every part of itself that the checkpoint holds.
        revision: branch, tag or commit of a hub id.
        dtype: of the head; ``None``: the target's.

    Returns:
        ``MedusaHeads``, ``EagleHead`` or ``Eagle3Head`` in evaluation mode on the target's device, and the facts that
        ``save_head`` was given (``{}`` for a checkpoint from elsewhere).

    Raises:
        InputError: nothing is there, it is damaged, a variant that is not supported, or made for another target.
    """
    checkpoint = _opened(kind, source, revision)
    block = checkpoint.block
    made_for = block.get("target_vocab_size")
    if made_for not in (None, target.vocab_size):
        remedy = f"it was trained for a target of {made_for} ids, and this one has {target.vocab_size}"
        raise checkpoint.refusal(f"{remedy}; use a head of this target")
    read = speculators.read_speculators if speculators.is_speculators(checkpoint) else READERS[kind]
    head, names = read(checkpoint, target)
    fill(head, names, checkpoint, dtype or target.dtype, target.device)
    facts = block.get("facts", {})
    return head.eval(), facts if isinstance(facts, dict) else {}


def check_source(kind: Kind, source: str, revision: str | None = None) -> None:
    """Refuse what can be seen to be wrong without a target; a hub id is not looked at yet.

    Raises:
        InputError: a folder or file that cannot be opened or is of another kind.
    """
    if is_on_disk(source):
        _opened(kind, source, revision)


def save_head(
    head: nn.Module,
    folder: Path,
    facts: Mapping[str, Any],
    layout: Layout = "native",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a head as a folder of safetensors and JSON; an earlier head there is replaced as a whole or not at all.

    Args:
        head: ``MedusaHeads``, ``EagleHead`` or ``Eagle3Head``.
        folder: where it goes.
        facts: how it was made and what it is worth, as JSON can hold it. ``facts["target"]``, a hub id or folder or a
            group of fields with ``model``, names the target in the layouts that have a place for it.
        layout: ``native`` is that of the head's authors; ``speculators`` is for EAGLE-3 alone.
        dtype: of the stored weights.

    Raises:
        InputError: weights that are not finite, a field without which others cannot open the folder, or a folder that
            holds something else.
    """
    block: dict[str, Any] = {"format_version": FORMAT_VERSION}
    if isinstance(head, Eagle3Head):
        kind: Kind = "eagle3"
        native = layout == "native"
        tensors, config = eagle3.eagle3_files(head) if native else speculators.speculators_files(head, facts)
        block |= eagle3.own_fields(head)
    elif layout != "native":
        raise InputError("layout", layout, "only EAGLE-3 heads have this layout; use native")
    elif isinstance(head, EagleHead):
        kind = "eagle"
        tensors, config = eagle.eagle_files(head)
    elif isinstance(head, MedusaHeads):
        kind = "medusa"
        tensors, config = medusa.medusa_files(head, named_target(facts))
        block |= medusa.own_fields(head)
    else:
        raise TypeError(f"{type(head).__name__} is no head that has a format")
    if isinstance(head, EagleHead | Eagle3Head) and head.context_vocab:
        block[eagle.CONTEXT_VOCAB] = True
    block |= {"kind": kind, "target_vocab_size": head.vocabulary.target_vocab, "facts": dict(facts)}
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), BLOCK: block}
    missing = next(_missing({name: value for name, value in config.items() if name != BLOCK}), None)
    if missing is not None:
        remedy = f"config.json would lack {missing}, which other loaders need; give the target's name in the facts"
        raise InputError("head", str(folder), remedy)
    write_folder(
        folder, WEIGHTS[kind], {name: _stored(name, tensor, dtype) for name, tensor in tensors.items()}, config
    )


def _opened(kind: Kind, source: str, revision: str | None) -> Checkpoint:
    checkpoint = open_checkpoint(source, revision, WEIGHTS[kind])
    version = checkpoint.block.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        remedy = f"it is of format {version!r}, and this version of the package reads {FORMAT_VERSION}"
        raise checkpoint.refusal(f"{remedy}; use the version that wrote it")
    found = checkpoint.block.get("kind") or next(
        (one for one, mark in _MARKS.items() if any(mark.fullmatch(name) for name in checkpoint.names)), None
    )
    if found is None:
        remedy = f"the weights hold {listed(checkpoint.names, most=3) or 'nothing'}, which no known head has"
        raise checkpoint.refusal(f"{remedy}; give a Medusa, EAGLE or EAGLE-3 head")
    if found != kind:
        raise checkpoint.refusal(f"this is a head for the strategy {found}, not {kind}; use it as one of those")
    return checkpoint


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as it is written.

    Raises:
        InputError: it is not finite, or not in that dtype.
    """
    if not tensor.is_floating_point():
        return tensor.detach().cpu().contiguous()
    stored = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    if not stored.isfinite().all():
        raise InputError("head", name, f"this tensor holds NaN or infinity as {dtype}; nothing was written")
    return stored


def _missing(config: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield the fields of a configuration that have no value."""
    for name, value in config.items():
        if value is None:
            yield where + name
        elif isinstance(value, Mapping):
            yield from _missing(value, f"{where}{name}.")
