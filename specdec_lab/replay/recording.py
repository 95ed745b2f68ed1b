"""A recording: the texts that the target wrote in a run, and its hidden states along them.

The states are in the cache format of ``specdec_lab.distill.feature_cache``; logits are not stored, since the output
layer gives them back from the last state. ``recording.json`` has the texts and names the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec_lab.bench.files import START_ANEW, storage, write_atomically
from specdec_lab.bench.settings import BASELINE
from specdec_lab.compare.runs import Run
from specdec_lab.distill.batch import Example
from specdec_lab.distill.feature_cache import prepare_cache
from specdec_lab.distill.features import CachedFeatures
from specdec_lab.errors import InputError, one_line
from specdec_lab.target import Target

RECORDING, STATES = "recording.json", "states"
RECORDING_VERSION = 1
LAST = -1
"""The hidden state that the output layer reads; every recording has it."""


@dataclass(frozen=True)
class Text:
    """One answer of the target.

    Attributes:
        prompt_ids: what it answered to, ``[tokens]``.
        output_ids: the answer, EOS included, ``[tokens]``.
    """

    question_id: int | str
    turn: int
    repeat: int
    category: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.prompt_ids, *self.output_ids)

    def example(self) -> Example:
        """Return the text as the cache of hidden states knows it."""
        marks = (False,) * len(self.prompt_ids) + (True,) * len(self.output_ids)
        return Example(f"{self.question_id}/{self.turn}/{self.repeat}", self.ids, marks)


@dataclass(frozen=True)
class Recording:
    """What a folder of ``scripts/record.py`` holds.

    Attributes:
        target: node of the configuration that loads it.
        layers: hidden states that are there.
        states: folder of the cache.
    """

    target: Mapping[str, Any]
    layers: tuple[int, ...]
    texts: tuple[Text, ...]
    states: Path


def baseline_texts(run: Run) -> tuple[Text, ...]:
    """Return the baseline's answers: the target's own texts, whatever a lossy strategy would have made of them.

    Raises:
        InputError: the run has none.
    """
    rows = run.rows_of(BASELINE)
    texts = tuple(
        Text(
            row["question_id"], row["turn"], row["repeat"], row["category"], tuple(row["prompt_ids"]),
            tuple(row["output_ids"]),
        )
        for row in rows
        if row["output_ids"]
    )  # fmt: skip
    if not texts:
        raise InputError("run", str(run.folder), f"it has no answer of {BASELINE}; give a run with one")
    return texts


def record(
    folder: Path,
    target: Target,
    target_node: Mapping[str, Any],
    texts: Sequence[Text],
    layers: Sequence[int],
    console: Console,
    budget_bytes: int | None = None,
) -> Recording:
    """Write a recording; its size is printed and checked before anything is written, and a kill loses one shard.

    Args:
        target_node: of the configuration, by which a replay loads the same target.
        layers: that drafters will read, besides the last.
        budget_bytes: most bytes of the states.

    Raises:
        InputError: it does not fit.
        StorageError: it cannot be written.
    """
    kept = tuple(sorted({LAST, *layers}))
    states = prepare_cache(target, kept, [text.example() for text in texts], console, folder / STATES, budget_bytes)
    document = {
        "recording_version": RECORDING_VERSION,
        "target": dict(target_node),
        "layers": list(kept),
        "states": str(states.relative_to(folder)),
        "texts": [asdict(text) for text in texts],
    }
    with storage(folder, START_ANEW):
        write_atomically(folder / RECORDING, json.dumps(document, ensure_ascii=False) + "\n")
    return Recording(target_node, kept, tuple(texts), states)


def read_recording(folder: Path) -> Recording:
    """Read what ``record`` wrote.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = folder / RECORDING
    if not path.is_file():
        raise InputError("recording", str(folder), f"it holds no {RECORDING}; give a folder of scripts/record.py")
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["recording_version"] != RECORDING_VERSION:
            raise ValueError(f"version {document['recording_version']}, and this program reads {RECORDING_VERSION}")
        texts = tuple(
            Text(**{**one, "prompt_ids": tuple(one["prompt_ids"]), "output_ids": tuple(one["output_ids"])})
            for one in document["texts"]
        )
        return Recording(document["target"], tuple(document["layers"]), texts, folder / document["states"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "recording", str(folder), f"{RECORDING} is damaged ({one_line(error)}); record again"
        ) from None


def states_of(recording: Recording, target: Target) -> CachedFeatures:
    """Return the recorded hidden states.

    Raises:
        InputError: files are damaged or missing.
    """
    return CachedFeatures(recording.states, recording.layers, target.device)
