"""The run folder: which files a run writes there, and how they survive a kill or a full disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from specdec_lab.errors import InputError, SpecdecError, listed, one_line

CONFIG, REQUESTS, SUMMARY, TABLE, LOG = "config.yaml", "requests.jsonl", "summary.json", "summary.csv", "benchmark.log"
COMPARISON, COMPARISON_TABLE, REPORT = "comparison.json", "comparison.csv", "report.html"
TRACKING = "wandb"
MOST_PROCESSES = 64
"""Processes that can share one run folder."""

_TEMPORARY = ".tmp"


def part_name(rank: int) -> str:
    """Return the name of the file in which a process keeps its rows while several run one benchmark."""
    return f"requests.{rank}.jsonl"


WRITTEN_BY_A_RUN = frozenset(
    {CONFIG, REQUESTS, SUMMARY, TABLE, LOG, COMPARISON, COMPARISON_TABLE, REPORT, TRACKING}
    | {part_name(rank) for rank in range(MOST_PROCESSES)}
)


class StorageError(SpecdecError):
    """The run folder cannot be written: a full disk, a missing right."""


def check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Decide whether a benchmark may write into a folder; see ``check_folder_of``."""
    check_folder_of(CONFIG, WRITTEN_BY_A_RUN, folder, resume=resume, overwrite=overwrite)


def check_folder_of(mark: str, written: frozenset[str], folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Decide whether a run may write into a folder; nothing is changed.

    Args:
        mark: the file by which an earlier run is known.
        written: what such a run writes.

    Raises:
        InputError: it holds something, and neither ``resume`` nor ``overwrite`` says what to do with that; or
            ``overwrite`` would have to remove something that no run writes; or ``resume`` finds no run.
    """
    if resume and overwrite:
        raise InputError("overwrite", True, "resume=true keeps what overwrite=true removes; give one of the two")
    held = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    if not held or (resume and mark in held):
        return
    if resume:
        raise InputError("resume", True, f"{folder} holds no {mark} of an earlier run; give the folder of a run")
    if not overwrite:
        ways = "add resume=true, overwrite=true or give another folder" if mark in held else "give another folder"
        raise InputError("hydra.run.dir", str(folder), f"the folder holds {listed(held, most=3)}; {ways}")
    if mark not in held and any(name.removesuffix(_TEMPORARY) != mark for name in held):
        remedy = f"{folder} holds {listed(held, most=3)} and no {mark} of an earlier run; give another folder"
        raise InputError("overwrite", True, remedy)
    foreign = [name for name in held if name.removesuffix(_TEMPORARY) not in written]
    if foreign:
        remedy = f"overwrite=true only removes what a run writes, and {folder} also holds {listed(foreign, most=3)}"
        raise InputError("overwrite", True, f"{remedy}; give another folder")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the ``config.yaml`` of an earlier run.

    Raises:
        InputError: it is damaged.
    """
    path = folder / CONFIG
    try:
        found = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bytes or a date that cannot be
        raise InputError("resume", True, f"{path} is damaged ({one_line(error)}); {_RESTORE}") from None
    if not isinstance(found, dict) or not found:
        raise InputError("resume", True, f"{path} states no settings; {_RESTORE}")
    return found


_RESTORE = "restore it, start anew with overwrite=true or give another folder"


def clear_folder(folder: Path, written: frozenset[str] = WRITTEN_BY_A_RUN) -> None:
    """Remove the files that a run writes. The folders of earlier tracking runs stay: they are runs of their own."""
    for name in written - {TRACKING}:
        for path in (folder / name, folder / (name + _TEMPORARY)):
            path.unlink(missing_ok=True)


GO_ON = "what was computed stays, so make room and start again with resume=true"
START_ANEW = "make room or give another folder"


@contextmanager
def storage(folder: Path, remedy: str = GO_ON, option: str = "hydra.run.dir") -> Iterator[None]:
    """Turn a failure to write into one sentence.

    Args:
        folder: that is written to.
        remedy: what its user can do; ``START_ANEW`` where nothing can be resumed.
        option: by which its user named the folder.

    Raises:
        StorageError: what the system said, and what to do.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{option}={str(folder)!r}: writing failed ({error.strerror or error}); {remedy}") from error


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by a complete new one, or leave it as it was."""
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with temporary.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
