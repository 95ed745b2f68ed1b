"""What data, epochs and parameters bring a head: finished trainings side by side, as a table and a plot."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from rich.console import Console

from specdec_lab.bench.console import plain_table, result_console
from specdec_lab.bench.files import CONFIG, START_ANEW, storage, write_atomically
from specdec_lab.command import SUCCESS, concluded, parsed, say
from specdec_lab.config import locate
from specdec_lab.distill.history import last_evaluation, read_history
from specdec_lab.distill.loop import completed
from specdec_lab.distill.train_files import EXPORT, METRICS
from specdec_lab.errors import InputError, SpecdecError, one_line
from specdec_lab.heads.facts import facts_within

TABLE, PLOT = "learning_curves.csv", "learning_curves.png"
FIELD = "RUN_DIR"
CAPTION = "Lengths in tokens per round, bonus token included; first choice: share right on held-out answers."


@dataclass(frozen=True)
class TrainedHead:
    """A finished training, as far as its curve needs it.

    Attributes:
        run: its folder.
        kind: of the head.
        parameters: numbers in the exported head's weights.
        response_tokens: tokens of the target's answers in its training texts, each counted once.
        epochs: over those texts; with a part of the last one.
        labels: tokens whose prediction was learnt, over all epochs, also those of prompts and repeats.
        first_choice: share of held-out labels at which the head's first choice was right.
        simulated_acceptance_length: of chains of first choices on held-out answers, bonus token included.
        real_acceptance_length: in the engine, on a few of the package's prompts; ``None`` where it was not measured.
        settings: hash of everything else that was set, in eight digits: trainings of one hash differ in data and epochs
            alone, or in the seed.
    """

    run: str
    kind: str
    parameters: int
    response_tokens: int
    epochs: float
    labels: int
    first_choice: float
    simulated_acceptance_length: float
    real_acceptance_length: float | None
    settings: str


def learning_curves_main(words: Sequence[str] | None = None) -> int:
    """Write table and plot of the trainings that the command line names, and return the exit code.

    Args:
        words: of the command line without the program's name; ``None`` takes this process's.
    """
    parser = argparse.ArgumentParser(
        prog="learning_curves.py", description="Compare finished trainings of heads.", allow_abbrev=False
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar=FIELD, help="folder of a finished training")
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help=f"where {TABLE} and {PLOT} go")
    options = parsed(parser, words)
    if isinstance(options, int):
        return options
    return concluded(lambda: _write(options.run_dirs, options.out, result_console()), Console(stderr=True))


def _write(runs: Sequence[Path], folder: Path, out: Console) -> int:
    heads = sorted((read_training(run) for run in runs), key=lambda head: astuple(head)[1:6])
    with storage(folder, START_ANEW, "--out"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / TABLE, as_csv(heads))
        draw(heads, folder / PLOT)
    table = plain_table("Trainings", CAPTION)
    for one in fields(TrainedHead):
        table.add_column(one.name.replace("_", " "), justify="left" if one.name in ("run", "kind") else "right")
    for head in heads:
        table.add_row(*(_cell(value) for value in astuple(head)))
    out.print(table)
    say(out, f"table: {folder / TABLE}; plot: {folder / PLOT}")
    return SUCCESS


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_training(folder: Path) -> TrainedHead:
    """Read what a finished training has left.

    Raises:
        InputError: the folder holds none, or its head was not evaluated.
    """
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        kind = locate(config["head"]["_target_"], "head").kind
        stated = json.loads((folder / EXPORT / "config.json").read_text(encoding="utf-8"))
        facts = facts_within(stated)
        tokens, labels = facts["data"]["response_tokens"], facts["trained_on"]["labels"]
        settings = settings_hash(completed(facts["training"]))
        parameters = sum(count_parameters(path) for path in (folder / EXPORT).rglob("*.safetensors"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError, SpecdecError) as error:
        remedy = (
            f"this is no folder of a finished training ({one_line(error)}); give one that holds {CONFIG} and {EXPORT}/"
        )
        raise InputError(FIELD, str(folder), remedy) from None
    last = last_evaluation(read_history(folder / METRICS))
    if facts.get("optimizer_steps") == 0:
        raise InputError(FIELD, str(folder), "it has measured a head and trained none; give the training that made it")
    if last is None or last.get("simulated_acceptance_length") is None:
        remedy = "its head was not evaluated on held-out answers; train it with data.validation_share above 0"
        raise InputError(FIELD, str(folder), remedy)
    return TrainedHead(
        run=str(folder),
        kind=kind,
        parameters=parameters,
        response_tokens=int(tokens),
        epochs=float(last["epoch"]),
        labels=int(labels),
        first_choice=float(last["accuracy/depth1/top1"]),
        simulated_acceptance_length=float(last["simulated_acceptance_length"]),
        real_acceptance_length=last.get("real_acceptance_length"),
        settings=settings,
    )


def settings_hash(training: Mapping[str, Any]) -> str:
    """Return a hash of what a training was told, without its data, its length, the head's sizes and the seed."""
    sizes = {"intermediate_size", "heads", "blocks", "layers", "rank", "seed"}
    others = {"examples_sha256", "epochs", "max_steps", "warmup_steps", "seed"}
    kept = {name: value for name, value in training.items() if name not in others}
    kept["head"] = {name: value for name, value in training["head"].items() if name not in sizes}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def count_parameters(path: Path) -> int:
    """Return how many floating-point numbers a safetensors file holds; only its header is read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    return sum(prod(entry["shape"]) for entry in tensors if entry["dtype"] in FLOATS)


FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


# --- writing ----------------------------------------------------------------------------------------------------------


def as_csv(heads: Sequence[TrainedHead]) -> str:
    """Return the table, one row per training."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, [one.name for one in fields(TrainedHead)])
    table.writeheader()
    table.writerows(asdict(head) for head in heads)
    return text.getvalue()


AXES: tuple[tuple[str, Callable[[TrainedHead], float]], ...] = (
    ("response tokens in the data", lambda head: head.response_tokens),
    ("epochs", lambda head: head.epochs),
    ("parameters of the head", lambda head: head.parameters),
)
"""What a curve may be drawn over."""


LENGTHS: tuple[tuple[str, Callable[[TrainedHead], float | None]], ...] = (
    ("simulated acceptance length", lambda head: head.simulated_acceptance_length),
    ("real acceptance length", lambda head: head.real_acceptance_length),
)
"""What is drawn over it."""

Curves = dict[str, list[tuple[float, float]]]
"""Points ``(place on the axis, length)`` of each curve, by its legend."""


def curves(heads: Sequence[TrainedHead], axis: int, length: int = 0) -> Curves:
    """Return the curves of one of ``LENGTHS`` over one of ``AXES``; what has no such length is left out.

    A curve joins trainings of one kind of head with the same settings that are alike on the other axes. Which settings
    those are is told where a kind has several.
    """
    settings: dict[str, set[str]] = defaultdict(set)
    for head in heads:
        settings[head.kind].add(head.settings)
    grouped: Curves = defaultdict(list)
    for head in heads:
        tall = LENGTHS[length][1](head)
        if tall is None:
            continue
        epochs = "1 epoch" if head.epochs == 1 else f"{head.epochs:.3g} epochs"
        places = (f"{head.response_tokens:,} tokens", epochs, f"{head.parameters:,} parameters")
        others = [place for at, place in enumerate(places) if at != axis]
        others += [f"settings {head.settings}"] if len(settings[head.kind]) > 1 else []
        grouped[f"{head.kind}: {', '.join(others)}"].append((AXES[axis][1](head), tall))
    return {name: sorted(points) for name, points in sorted(grouped.items())}


def has_slope(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether the points of a curve lie at more than one place."""
    return len({place for place, _ in points}) > 1


def axes_to_draw(heads: Sequence[TrainedHead]) -> list[int]:
    """Return the axes that some curve has a slope over; that of the data where none has."""
    return [axis for axis in range(len(AXES)) if any(map(has_slope, curves(heads, axis).values()))] or [0]


def draw(heads: Sequence[TrainedHead], path: Path) -> None:
    """Draw acceptance lengths over what the trainings differ in: a row per length, a column per axis.

    A training that no curve joins to another is a grey point.
    """
    columns = axes_to_draw(heads)
    rows = [length for length, (_, of) in enumerate(LENGTHS) if any(of(head) is not None for head in heads)]
    figure = Figure(figsize=(6 * len(columns), 4.2 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row", sharex="col")
    for line, length in zip(panels, rows, strict=True):
        line[0].set(ylabel=f"{LENGTHS[length][0]}, tokens per round")
        for axes, axis in zip(line, columns, strict=True):
            for name, points in curves(heads, axis, length).items():
                joined = has_slope(points)
                look = {"label": name, "marker": "o"} if joined else {"color": "0.7", "marker": ".", "linestyle": ""}
                axes.plot(*zip(*points, strict=True), **look)
            axes.set(xscale="linear" if axis == 1 else "log")
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="x-small")
    for axes, axis in zip(panels[-1], columns, strict=True):
        axes.set(xlabel=AXES[axis][0])
    figure.savefig(path, dpi=120)
