"""Run folders, read back: the summary, the rows and the settings of finished benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdec_lab.bench import metrics
from specdec_lab.bench.files import CONFIG, REQUESTS, SUMMARY
from specdec_lab.bench.metrics import Row
from specdec_lab.bench.records import read_rows
from specdec_lab.bench.schemas import SCHEMA_VERSION, fault, loads
from specdec_lab.bench.statistics import RequestKey, request_key
from specdec_lab.errors import InputError, one_line

FIELD = "RUN_DIR"
"""How messages name the folders that the user gave."""


@dataclass(frozen=True)
class Run:
    """One finished benchmark.

    Attributes:
        folder: as the user gave it.
        summary: of ``summary.json``.
        rows: of ``requests.jsonl``.
        config: of ``config.yaml``.
    """

    folder: Path
    summary: Mapping[str, Any]
    rows: tuple[Row, ...]
    config: Mapping[str, Any]

    def rows_of(self, strategy: str) -> list[Row]:
        """Return a strategy's successful rows."""
        return [row for row in self.rows if row["strategy"] == strategy and row["status"] == "ok"]

    def texts(self) -> dict[RequestKey, tuple[int, ...]]:
        """Return the token ids of each request's prompt, as the target read them: the same for all strategies."""
        return {request_key(row): tuple(row["prompt_ids"]) for row in self.rows if row["status"] == "ok"}


def read_runs(folders: Sequence[Path]) -> tuple[Run, ...]:
    """Read run folders.

    Raises:
        InputError: none is given, one is given twice, or one holds no finished run.
    """
    if not folders:
        raise InputError(FIELD, None, "give the folder of at least one finished benchmark")
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise InputError(FIELD, str(folder), "this folder is given twice; a run cannot be compared with itself")
        seen.add(folder.resolve())
    return tuple(read_run(folder) for folder in folders)


def read_named_run(path: str) -> Run:
    """Read the run folder that an option ``run=`` names.

    Raises:
        InputError: see ``read_run``; the field is ``run``.
    """
    try:
        return read_run(Path(path))
    except InputError as error:
        raise InputError("run", error.value, error.remedy) from error


def read_run(folder: Path) -> Run:
    """Read one run folder and check that its files belong together.

    Raises:
        InputError: the folder holds no finished run of this version, or its files are damaged or of different runs.
    """
    _check_finished(folder)
    try:
        summary = loads((folder / SUMMARY).read_bytes())
    except (OSError, ValueError) as error:
        remedy = f"{SUMMARY} is damaged ({one_line(error)}); {_AGAIN}"
        raise InputError(FIELD, str(folder), remedy) from None
    version = summary.get("schema_version") if isinstance(summary, dict) else None
    if version != SCHEMA_VERSION:
        remedy = f"its files are of schema version {version}, and this program reads {SCHEMA_VERSION}; run it again"
        raise InputError(FIELD, str(folder), remedy)
    found = fault("summary", summary)
    if found is not None:
        raise InputError(FIELD, str(folder), f"{SUMMARY} breaks its schema at {found}; {_AGAIN}")
    run = Run(folder, summary, tuple(_rows(folder)), _config(folder))
    _check_same_run(run)
    return run


_AGAIN = "restore it, or make it again with resume=true"


def _check_finished(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(FIELD, str(folder), "there is no such folder; give the folder of a finished benchmark")
    missing = [name for name in (SUMMARY, REQUESTS, CONFIG) if not (folder / name).is_file()]
    if not missing:
        return
    if any(folder.glob(f"*/{SUMMARY}")):
        raise InputError(FIELD, str(folder), "this is the folder of several runs; give each of them, as FOLDER/*/")
    if missing == [SUMMARY]:
        way = f"hydra.run.dir='{folder}' resume=true"
        remedy = f"it holds no {SUMMARY}: the run did not end; go on with its own options and {way}"
        raise InputError(FIELD, str(folder), remedy)
    remedy = f"it holds no {', '.join(missing)}; give the folder of a finished benchmark"
    raise InputError(FIELD, str(folder), remedy)


def _rows(folder: Path) -> list[dict[str, Any]]:
    try:
        return read_rows(folder / REQUESTS)
    except OSError as error:
        raise InputError(FIELD, str(folder), f"{REQUESTS} cannot be read ({one_line(error)})") from None


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load((folder / CONFIG).read_bytes())
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(FIELD, str(folder), f"{CONFIG} is damaged ({one_line(error)}); restore it") from None
    if not isinstance(found, dict):
        raise InputError(FIELD, str(folder), f"{CONFIG} states no settings; restore it")
    return found


def _check_same_run(run: Run) -> None:
    """Check that the rows are those that the summary counts."""
    for entry in run.summary["strategies"]:
        rows = [row for row in run.rows if row["strategy"] == entry["name"]]
        good = run.rows_of(entry["name"])
        counted = {
            "requests": len(rows),
            "failed": len(rows) - len(good),
            "rounds": metrics.rounds(good),
            "emitted": metrics.emitted(good),
        }
        wrong = [name for name, value in counted.items() if entry[name] != value]
        if wrong:
            remedy = (
                f"{SUMMARY} and {REQUESTS} are not of one run: they disagree about {wrong[0]} of {entry['name']} "
                f"({entry[wrong[0]]} and {counted[wrong[0]]}); {_AGAIN}"
            )
            raise InputError(FIELD, str(run.folder), remedy)
