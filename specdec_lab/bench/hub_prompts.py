"""Prompts out of a data set of the hub, or a folder of data files, through ``datasets``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_lab.bench.prompts import Prompt, parse_prompts
from specdec_lab.errors import InputError, one_line

log = logging.getLogger(__name__)

KNOWN = ({"question_id", "category", "turns"}, {"task_id", "prompt"}, {"question", "answer"})
"""Columns of which a row is a prompt by itself; see ``specdec_lab.bench.prompts.load_prompts``."""


def read_hub_prompts(
    dataset: str, subset: str | None, split: str, revision: str | None, column: str | None, category: str | None
) -> tuple[Prompt, ...]:
    """Return the prompts of one split, in its order.

    Args:
        dataset: hub id, or folder of data files.
        subset: configuration of the data set, where it has several.
        split: of it.
        revision: branch, tag or commit of a hub id.
        column: of the prompts: texts, lists of texts (turns), or messages, whose user turns are taken; ``None`` for a
            data set in one of the known shapes.
        category: column of the categories, or one category for all; ``None``: the last part of the data set's name.

    Raises:
        InputError: it cannot be loaded, or a column is missing or holds something else.
    """
    rows, columns = _rows(dataset, subset, split, revision)
    if column is None:
        if not any(shape <= set(columns) for shape in KNOWN):
            remedy = f"name the column of the prompts; there are {', '.join(columns)}"
            raise InputError("prompts.column", None, remedy)
        text = "\n".join(json.dumps(row, ensure_ascii=False, default=str) for row in rows)
        return parse_prompts(text.encode(), dataset)
    if column not in columns:
        raise InputError("prompts.column", column, f"there is no such column; there are {', '.join(columns)}")
    fixed = dataset.rstrip("/").rpartition("/")[2] if category is None else category
    return tuple(
        Prompt(
            number,
            str(row[category]) if category is not None and category in columns else fixed,
            _turns(row[column], f"{dataset}, row {number}, {column}"),
        )
        for number, row in enumerate(rows, start=1)
    )


def _rows(
    dataset: str, subset: str | None, split: str, revision: str | None
) -> tuple[Sequence[Mapping[str, Any]], list[str]]:
    import datasets  # slow to import, and needed here alone

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(dataset, subset, split=split, revision=revision)
    except Exception as error:  # of the hub, the network, a parser or an unknown split: all kinds
        remedy = f"it cannot be loaded ({one_line(error)}); see prompts.subset, prompts.split and prompts.revision"
        raise InputError("prompts.dataset", dataset, remedy) from None
    if not isinstance(loaded, datasets.Dataset) or not len(loaded):
        raise InputError("prompts.split", split, "it holds no rows; name one that does")
    licence = loaded.info.license or "not stated by the data set"
    log.info("prompts of %s, split %s; licence: %s", dataset, split, licence)
    return list(loaded), list(loaded.column_names)  # pyright: ignore[reportReturnType]


def _turns(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        turns = [value]
    elif isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        speaker = next((name for name in ("role", "from") if value and name in value[0]), None)
        words = next((name for name in ("content", "value") if value and name in value[0]), None)
        if speaker is None or words is None:
            raise InputError(where, value[:1], "give messages with role and content, or from and value")
        turns = [one[words] for one in value if one[speaker] in ("user", "human")]
    else:
        turns = value if isinstance(value, list) else []
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InputError(where, str(value)[:60], "give a text, a list of texts, or messages with a user's turn")
    return tuple(turns)
