"""What a training writes down about itself: sums over batches, rows of ``metrics.jsonl``, and the curve at its end."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from specdec_lab.bench.files import write_atomically
from specdec_lab.distill.batch import Batch
from specdec_lab.distill.learner import Outcome
from specdec_lab.distill.train_files import CURVE_PLOT, CURVE_TABLE
from specdec_lab.errors import InputError

log = logging.getLogger(__name__)

Sums = dict[str, float]
"""Sums over batches: ``loss``, ``labels``, ``tokens``, ``examples``, ``parts/NAME``, ``hits/NAME``, ``seen/NAME``."""

Row = dict[str, Any]
"""One line of ``metrics.jsonl``: ``kind`` is ``train`` or ``evaluation``, ``optimizer_step`` the steps done."""


# --- sums ------------------------------------------------------------------------------------------------------------


def outcome_sums(outcome: Outcome, batch: Batch) -> Sums:
    """Return a batch's sums as floats, so that nothing holds on to a graph; one synchronisation with the device."""
    tensors = {"loss": outcome.loss}
    for group, values in (("parts", outcome.parts), ("hits", outcome.hits), ("seen", outcome.seen)):
        tensors |= {f"{group}/{name}": value for name, value in values.items()}
    floats = torch.stack([value.detach().float().reshape(()) for value in tensors.values()]).tolist()
    sums: Sums = dict(zip(tensors, floats, strict=True))
    return sums | {"labels": batch.labels, "tokens": int(batch.lengths.sum()), "examples": len(batch.keys)}


def added(*all_sums: Mapping[str, float]) -> Sums:
    """Return the sums of sums, name by name."""
    names = dict.fromkeys(name for sums in all_sums for name in sums)
    return {name: sum(sums.get(name, 0) for sums in all_sums) for name in names}


def averages(sums: Mapping[str, float]) -> dict[str, float]:
    """Return ``loss`` and ``parts/NAME`` per label and ``accuracy/NAME`` per position; undefined ones are left out."""
    labels = sums.get("labels", 0)
    found: dict[str, float] = {}
    for name, value in sums.items():
        group, _, rest = name.partition("/")
        if group in ("loss", "parts") and labels:
            found[name] = value / labels
        elif group == "hits" and (seen := sums.get(f"seen/{rest.partition('/')[0]}")):
            found[f"accuracy/{rest}"] = value / seen
    return found


def simulated_acceptance_length(accuracy: Mapping[str, float]) -> float | None:
    """Return the tokens that a round with a chain of top-1 drafts would emit on these texts, bonus token included.

    1 plus, per depth, the share of positions at which all drafts down to it are right. Where a head counts such chains
    (``accuracy/chainD/right``) that share is as counted; else it is the product of the top-1 accuracies.

    Args:
        accuracy: see ``averages``.

    Returns:
        ``None`` if no depth was counted.
    """
    length, product, depth = 1.0, 1.0, 1
    while (top1 := accuracy.get(f"accuracy/depth{depth}/top1")) is not None:
        product *= top1
        length += accuracy.get(f"accuracy/chain{depth}/right", product)
        depth += 1
    return length if depth > 1 else None


def accuracy_by_rank(accuracy: Mapping[str, float]) -> list[list[float]]:
    """Return how often the choice of each rank was right at each depth, ``[depths][ranks]``; see ``averages``."""
    found: list[list[float]] = []
    while (first := accuracy.get(f"accuracy/depth{len(found) + 1}/top1")) is not None:
        within, depth = [first], len(found) + 1
        while (more := accuracy.get(f"accuracy/depth{depth}/top{len(within) + 1}")) is not None:
            within.append(more)
        found.append([first, *(more - less for less, more in pairwise(within))])
    return found


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


def read_history(path: Path) -> list[Row]:
    """Read the rows of a file; a last line that a kill tore off in the middle is left out.

    Raises:
        InputError: another line is no row.
    """
    if not path.exists():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    rows = [_parsed(line) for line in lines]
    for number, row in enumerate(rows, start=1):
        if row is None:
            raise InputError(str(path), f"line {number}", "this is no row of a training; mend or remove the line")
    last = _parsed(torn)
    return [row for row in (*rows, last) if row is not None]


def last_evaluation(rows: Sequence[Row]) -> Row | None:
    """Return the row of the last evaluation; ``None`` without one."""
    return next((row for row in reversed(rows) if row["kind"] == "evaluation"), None)


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("optimizer_step"), int) else None


class History:
    """The rows of a training, on disk as soon as each is made.

    Args:
        path: of ``metrics.jsonl``.
        step: rows of later optimizer steps are cut: the training is about to make them again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.rows = [row for row in read_history(path) if row["optimizer_step"] <= step] if step else []
        write_atomically(path, "".join(_line(row) for row in self.rows))

    def append(self, row: Row) -> None:
        """Write a row and wait until it is on disk."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(_line(row))
            stream.flush()
            os.fsync(stream.fileno())
        self.rows.append(row)


def _line(row: Row) -> str:
    """Return a row as JSON, which has no NaN and no infinity."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"


# --- the curve -------------------------------------------------------------------------------------------------------


def write_curve(folder: Path, rows: Sequence[Row]) -> None:
    """Write ``training_curve.csv``, and ``training_curve.png`` where matplotlib is installed."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, names)
    table.writeheader()
    table.writerows(rows)
    write_atomically(folder / CURVE_TABLE, text.getvalue())
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.info("without matplotlib there is no %s; the numbers are in %s", CURVE_PLOT, CURVE_TABLE)
        return
    panels = [panel for panel in _panels(rows) if panel[1]]
    if not panels:
        return
    figure = Figure(figsize=(5 * len(panels), 3.5), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
        axes.set(title=title, xlabel="optimizer step")
        axes.legend(fontsize="small")
    figure.savefig(folder / CURVE_PLOT, dpi=120)


Curves = dict[str, list[tuple[float, float]]]


def _panels(rows: Sequence[Row]) -> list[tuple[str, Curves]]:
    """Return title and curves of each panel; a curve is a list of ``(optimizer step, value)``."""
    training = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    losses = {"training": _points(training, "loss"), "validation": _points(evaluations, "loss")}
    lengths = {
        name.removesuffix("_acceptance_length"): _points(evaluations, name)
        for name in dict.fromkeys(name for row in evaluations for name in row)
        if name.endswith("acceptance_length")
    }
    accuracies = {
        name.split("/")[1]: _points(evaluations, name)
        for name in dict.fromkeys(name for row in evaluations for name in row)
        if name.startswith("accuracy/") and name.endswith("/top1")
    }
    panels = (("loss per label", losses), ("acceptance length", lengths), ("top-1 accuracy, validation", accuracies))
    return [(title, {name: points for name, points in curves.items() if points}) for title, curves in panels]


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    return [(row["optimizer_step"], row[name]) for row in rows if row.get(name) is not None]
