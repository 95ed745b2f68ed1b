"""The reduced vocabulary of a head in its checkpoint: ``d2t`` and ``t2d``, as EAGLE-3 has them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_lab.heads.formats.files import Checkpoint
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target


def read_vocabulary(checkpoint: Checkpoint, rows: int | None, target: Target) -> DraftVocabulary:
    """Return what a head can draft, from ``d2t`` (offsets) and ``t2d``; without ``d2t`` it has to be everything.

    Args:
        checkpoint: may hold ``d2t``, int64, ``[draft_vocab]``, and ``t2d``, bool, ``[target_vocab]``.
        rows: rows of the head's own output layer; ``None`` if it has none.
        target: whose ids are meant.

    Raises:
        InputError: they contradict each other or the target.
    """
    size, names = target.vocab_size, set(checkpoint.names)
    members = None
    if "t2d" in names:
        members = checkpoint.tensor("t2d").bool()
        if members.shape != (size,):
            remedy = f"t2d is {list(members.shape)} and the target has {size} ids"
            raise checkpoint.refusal(f"{remedy}; use a head that was trained for this target")
    if "d2t" not in names:
        if rows not in (None, size):
            remedy = f"its output layer has {rows} rows, the target {size} ids, and no d2t says which they are"
            raise checkpoint.refusal(f"{remedy}; use a head that was trained for this target")
        if members is not None and not members.all():
            raise checkpoint.refusal("the weights hold t2d and lack d2t; copy the whole checkpoint again")
        return DraftVocabulary.whole(size)
    offsets = checkpoint.tensor("d2t")
    if offsets.dim() != 1 or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise checkpoint.refusal(f"d2t is {offsets.dtype} of {list(offsets.shape)} and has to be a list of offsets")
    if rows is not None and len(offsets) != rows:
        raise checkpoint.refusal(f"d2t has {len(offsets)} offsets and the output layer {rows} rows; copy them again")
    ids = torch.arange(len(offsets)) + offsets.long()
    marked = None if members is None else members.nonzero().flatten()
    if marked is not None and not torch.equal(marked, ids):
        if torch.equal(marked, offsets.long()):
            raise checkpoint.refusal(
                "d2t holds target ids and has to hold offsets: target id = draft id + d2t[draft id]"
            )
        raise checkpoint.refusal("d2t and t2d name different ids; copy the whole checkpoint again")
    try:
        return DraftVocabulary(ids, size)
    except ValueError as error:
        raise checkpoint.refusal(f"d2t does not fit the target: {error}") from error


def offset_tensors(vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """Return ``d2t`` of a reduced vocabulary, int64, ``[draft_vocab]``; nothing for a whole one."""
    return {} if vocabulary.is_whole else {"d2t": vocabulary.offsets()}


def both_tensors(vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """Return ``d2t`` and ``t2d`` of a reduced vocabulary, bool, ``[target_vocab]``; nothing for a whole one."""
    return {} if vocabulary.is_whole else {"d2t": vocabulary.offsets(), "t2d": vocabulary.members()}
