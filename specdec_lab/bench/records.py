"""``requests.jsonl``: rows made from generations, appended one by one, read back after a kill."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from specdec_lab.bench import metrics
from specdec_lab.bench.files import write_atomically
from specdec_lab.bench.prompts import Prompt
from specdec_lab.bench.schemas import dumps, fault, loads
from specdec_lab.decode import Generation
from specdec_lab.errors import InputError


class RowKey(NamedTuple):
    """What identifies a row: one per strategy, prompt, turn and repeat."""

    strategy: str
    question_id: int | str
    turn: int
    repeat: int


def key_of(row: metrics.Row) -> RowKey:
    """Return a row's key."""
    return RowKey(row["strategy"], row["question_id"], row["turn"], row["repeat"])


def make_row(key: RowKey, prompt: Prompt, generation: Generation, peak_memory_bytes: int | None) -> dict[str, Any]:
    """Return the row of a finished request.

    Raises:
        AssertionError: its counters or times contradict each other.
    """
    if generation.error is not None:
        return failed_row(key, prompt, generation.request.prompt_ids, generation.error)
    played = generation.rounds
    row = {
        **_identity(key, prompt),
        "status": "ok",
        "error": None,
        "finish_reason": generation.finish_reason,
        "prompt_ids": list(generation.request.prompt_ids),
        "output_ids": list(generation.output_ids),
        "text": generation.text,
        "accepted_per_round": [one.accepted for one in played],
        "proposed_per_round": [one.proposed for one in played],
        "time_seconds": {**asdict(generation.time_seconds), "total": generation.time_seconds.total},
        "exact": None,
        "proposed_nodes_per_round": [one.proposed_nodes for one in played],
        "bonus_per_round": [one.bonus for one in played],
        "round_seconds": [one.seconds for one in played],
        "decode_elapsed_seconds": generation.decode_elapsed_seconds,
        "peak_memory_bytes": peak_memory_bytes,
        "divergence": None,
        "altered_per_round": None if generation.lossless else [one.altered for one in played],
    }
    metrics.check_identities(row)
    return row


def failed_row(key: RowKey, prompt: Prompt, prompt_ids: Sequence[int], error: str) -> dict[str, Any]:
    """Return the row of a request that has no answer, and why."""
    return {
        **_identity(key, prompt),
        "status": "failed",
        "error": error,
        "finish_reason": None,
        "prompt_ids": list(prompt_ids),
        "output_ids": [],
        "text": "",
        "accepted_per_round": [],
        "proposed_per_round": [],
        "time_seconds": None,
        "exact": None,
        "proposed_nodes_per_round": [],
        "bonus_per_round": [],
        "round_seconds": [],
        "decode_elapsed_seconds": None,
        "peak_memory_bytes": None,
        "divergence": None,
        "altered_per_round": None,
    }


def _identity(key: RowKey, prompt: Prompt) -> dict[str, Any]:
    return {
        "strategy": key.strategy,
        "question_id": prompt.question_id,
        "category": prompt.category,
        "turn": key.turn,
        "repeat": key.repeat,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file; a last line that a kill tore off in the middle is left out.

    Raises:
        InputError: any other line is not a row.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    if torn and _parsed(torn) is not None:  # complete, only its line end is missing
        lines.append(torn)
    rows: dict[RowKey, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        row = _parsed(line)
        if row is None:
            raise InputError(str(path), f"line {number}", "this is no row of a run; mend or remove the line")
        if key_of(row) in rows:
            raise InputError(str(path), f"line {number}", "this row is there twice; remove one of the two")
        rows[key_of(row)] = row
    return list(rows.values())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and fault("request", row) is None else None


def write_rows(path: Path, rows: Iterable[metrics.Row]) -> None:
    """Replace the file by one with these rows."""
    write_atomically(path, "".join(dumps("request", row) + "\n" for row in rows))


class RequestLog:
    """The rows of a run, on disk as soon as each is finished.

    To make one reads the file and changes nothing. To enter it drops the rows that are not kept and opens the file.

    Args:
        path: of ``requests.jsonl``.
        resume: whether to keep the successful rows of an existing file; failed rows are to be run again.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        found = read_rows(path) if resume and path.exists() else []
        self.rows = {key_of(row): row for row in found if row["status"] == "ok"}

    def __enter__(self) -> Self:
        write_rows(self.path, self.rows.values())
        self._stream = self.path.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def append(self, row: dict[str, Any]) -> None:
        """Write a row and wait until it is on disk.

        Raises:
            OSError: it cannot be written.
            ValueError: the row breaks its schema, or a row of the same key is there.
        """
        if key_of(row) in self.rows:
            raise ValueError(f"{key_of(row)} is there already")
        self._stream.write(dumps("request", row).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.rows[key_of(row)] = row

    def rewrite(self) -> None:
        """Write all rows again, for fields that are only known at the end."""
        write_rows(self.path, self.rows.values())
