"""Responses of a target on disk: rows appended while they are generated, and a packed file of a few bytes per token.

Neither holds prompts, except those that the target wrote itself: a response is keyed by the ``question_id`` of a prompt
file, and the manifest has that file's hash.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specdec_lab.bench import files
from specdec_lab.bench.files import write_atomically
from specdec_lab.errors import InputError, one_line

RESPONSES, WRITTEN, MANIFEST, PACKED = "responses.jsonl", "written.jsonl", "manifest.json", "responses.safetensors"
WRITTEN_BY_A_RUN = frozenset({RESPONSES, WRITTEN, MANIFEST, PACKED})
FORMAT = "specdec_lab.responses.1"
"""Names the layout of a packed file; another number means another layout."""

_TEMPORARY, _METADATA = ".tmp", "specdec_lab"

Count = Annotated[int, Field(ge=0)]


class ResponseKey(NamedTuple):
    """What identifies a response within its prompts."""

    question_id: int | str
    turn: int
    sample: int


class Response(BaseModel):
    """One answer of a target.

    Attributes:
        turn: of the prompt, from 0.
        sample: 0 for the greedy answer, others are drawn.
        response_ids: with EOS if ``finished``, ``[tokens]``.
        finished: whether the target ended it, and not the budget.
        prompt: the prompt's text, if the target wrote that too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    question_id: int | str
    turn: Count = 0
    sample: Count = 0
    response_ids: Annotated[tuple[Count, ...], Field(min_length=1)]
    finished: bool
    prompt: str | None = None

    @property
    def key(self) -> ResponseKey:
        """What identifies it."""
        return ResponseKey(self.question_id, self.turn, self.sample)


@dataclass(frozen=True)
class ResponseSet:
    """The responses of one run or file.

    Attributes:
        name: of the file.
        manifest: what was answered, by what and how; ``None`` for a file that comes without.
    """

    name: str
    responses: tuple[Response, ...]
    manifest: Mapping[str, Any] | None


# --- rows -------------------------------------------------------------------------------------------------------------


class ResponseLog:
    """The rows of a run, on disk as soon as each is finished.

    To make one reads the file and changes nothing. To enter it drops a line that a kill tore off and opens the file.

    Args:
        path: of the rows.
        resume: whether to keep the rows of an existing file.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        found = read_rows(path) if resume and path.exists() else ()
        self.rows = {row.key: row for row in found}

    def __enter__(self) -> Self:
        write_atomically(self.path, "".join(_line(row) for row in self.rows.values()))
        self._stream = self.path.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def append(self, row: Response) -> None:
        """Hand a row to the system, so that it outlives this process.

        Raises:
            OSError: it cannot be written.
            ValueError: a row of the same key is there.
        """
        if row.key in self.rows:
            raise ValueError(f"{row.key} is there already")
        self._stream.write(_line(row).encode())
        self._stream.flush()
        self.rows[row.key] = row


def read_rows(path: Path) -> tuple[Response, ...]:
    """Read the rows of a file; a last line that a kill tore off in the middle is left out.

    Raises:
        InputError: any other line is no row, or a row is there twice.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    if torn and _parsed(torn) is not None:  # complete, only its line end is missing
        lines.append(torn)
    rows: dict[ResponseKey, Response] = {}
    for number, line in enumerate(lines, start=1):
        row = _parsed(line)
        if row is None:
            raise InputError(str(path), f"line {number}", "this is no response; mend or remove the line")
        if row.key in rows:
            raise InputError(str(path), f"line {number}", "this response is there twice; remove one of the two")
        rows[row.key] = row
    return tuple(rows.values())


def _line(row: Response) -> str:
    return row.model_dump_json(exclude_none=True) + "\n"


def _parsed(line: bytes) -> Response | None:
    try:
        return Response.model_validate_json(line)
    except ValidationError:
        return None


def counts_of(rows: Iterable[Response]) -> dict[str, Any]:
    """Return how many rows, finished ones, tokens, and rows per sample there are."""
    rows = list(rows)
    samples = Counter(row.sample for row in rows)
    return {
        "rows": len(rows),
        "finished": sum(row.finished for row in rows),
        "response_tokens": sum(len(row.response_ids) for row in rows),
        "rows_per_sample": {str(sample): samples[sample] for sample in sorted(samples)},
    }


# --- the run folder ---------------------------------------------------------------------------------------------------


def check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Decide whether a run may write into a folder; nothing is changed.

    Raises:
        InputError: see ``specdec_lab.bench.files.check_folder_of``.
    """
    files.check_folder_of(MANIFEST, WRITTEN_BY_A_RUN, folder, resume=resume, overwrite=overwrite)


def clear_folder(folder: Path) -> None:
    """Remove the files that a run writes."""
    files.clear_folder(folder, WRITTEN_BY_A_RUN)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run folder.

    Raises:
        InputError: it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        remedy = f"it cannot be read ({one_line(error)}); restore it or generate anew with overwrite=true"
        raise InputError(str(path), None, remedy) from None
    if not isinstance(found, dict):
        raise InputError(str(path), None, "it states nothing; restore it or generate anew with overwrite=true")
    return found


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest of a run folder."""
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


# --- the packed form --------------------------------------------------------------------------------------------------


def pack(folder: Path) -> Path:
    """Write the responses of a run folder as one safetensors file with its manifest, and return its path.

    Tensors: ``response_ids [tokens]`` uint16 (uint32 for ids above 65535), all responses one after the other;
    ``offsets [responses + 1]`` int64; ``question_id`` and ``turn`` and ``sample [responses]`` int32; ``finished
    [responses]`` uint8. Rows are sorted, so that one run gives one file in whichever order its answers were finished.
    Where an id is a text, ``question_id`` counts in the manifest's ``question_ids``.

    Raises:
        InputError: the folder holds no run, or a damaged one.
    """
    found = read_responses(folder)
    rows = sorted(found.responses, key=lambda row: (isinstance(row.question_id, str), *row.key))
    manifest = dict(found.manifest or {})
    manifest["counts"] = {**manifest.get("counts", {}), **counts_of(rows)}
    ids = [row.question_id for row in rows]
    numbers = ids
    if not all(isinstance(one, int) and abs(one) < 2**31 for one in ids):
        manifest["question_ids"] = list(dict.fromkeys(ids))
        index = {one: at for at, one in enumerate(manifest["question_ids"])}
        numbers = [index[one] for one in ids]
    manifest["written_prompts"] = {str(row.question_id): row.prompt for row in rows if row.prompt is not None}
    largest = max((max(row.response_ids) for row in rows), default=0)
    lengths = [len(row.response_ids) for row in rows]
    tensors = {
        "response_ids": np.array(
            [token for row in rows for token in row.response_ids], dtype=np.uint16 if largest < 2**16 else np.uint32
        ),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "question_id": np.array(numbers, dtype=np.int32),
        "turn": np.array([row.turn for row in rows], dtype=np.int32),
        "sample": np.array([row.sample for row in rows], dtype=np.int32),
        "finished": np.array([row.finished for row in rows], dtype=np.uint8),
    }
    path = folder / PACKED
    temporary = path.with_name(PACKED + _TEMPORARY)
    stated = json.dumps({"format": FORMAT, **manifest}, ensure_ascii=False)
    with temporary.open("wb") as stream:
        stream.write(save(tensors, metadata={_METADATA: stated}))  # one entry: several have no fixed order
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    return path


def read_responses(path: str | Path, where: str = "data.responses") -> ResponseSet:
    """Read responses: a run folder, a packed file, or lines of ``question_id``, ``response_ids``, ``finished``.

    Lines may also state ``turn`` and ``sample``, which are 0 otherwise. A run folder is read by its lines where it has
    them, else by its packed file.

    Args:
        where: the setting that names the path, for messages.

    Raises:
        InputError: it cannot be read, or something in it is no response.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        path = path / (RESPONSES if (path / RESPONSES).exists() else PACKED)
    if not path.is_file():
        remedy = "there is no such file; relative paths start at the folder of the launch"
        raise InputError(where, str(path), remedy)
    if path.suffix == ".safetensors":
        return _unpacked(path)
    manifest = path.with_name(MANIFEST)
    of_a_run = path.name == RESPONSES and manifest.exists()
    try:
        return ResponseSet(path.name, read_rows(path), read_manifest(path.parent) if of_a_run else None)
    except OSError as error:
        raise InputError(where, str(path), f"it cannot be read ({one_line(error)}); give another file") from None


def _unpacked(path: Path) -> ResponseSet:
    try:
        with safe_open(path, framework="numpy") as file:
            manifest = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
            if manifest.pop("format", None) != FORMAT:
                raise InputError(str(path), None, f"its format is not {FORMAT}; give a file of generate_responses.py")
            columns = {name: file.get_tensor(name).tolist() for name in _COLUMNS}
        return ResponseSet(path.name, _rows_of(columns, manifest), manifest)
    except (SafetensorError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        remedy = f"the file is damaged ({one_line(error)}); restore it or pack the responses again"
        raise InputError(str(path), None, remedy) from None


_COLUMNS = ("response_ids", "offsets", "question_id", "turn", "sample", "finished")


def _rows_of(columns: Mapping[str, Sequence[int]], manifest: Mapping[str, Any]) -> tuple[Response, ...]:
    table, written = manifest.get("question_ids"), manifest.get("written_prompts", {})
    tokens, offsets = columns["response_ids"], columns["offsets"]
    if offsets[-1] != len(tokens):
        raise ValueError(f"{len(tokens)} tokens where {offsets[-1]} are stated")
    heads = zip(*(columns[name] for name in ("question_id", "turn", "sample", "finished")), strict=True)
    rows: list[Response] = []
    for (number, turn, sample, finished), start, end in zip(heads, offsets[:-1], offsets[1:], strict=True):
        question_id = number if table is None else table[number]
        rows.append(
            Response(
                question_id=question_id,
                turn=turn,
                sample=sample,
                response_ids=tuple(tokens[start:end]),
                finished=bool(finished),
                prompt=written.get(str(question_id)),
            )
        )
    return tuple(rows)
