"""The command line of a prediction: from Hydra's configuration to a table, files and a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from specdec_lab.bench.benchmark import threads
from specdec_lab.bench.console import plain_table, result_console
from specdec_lab.bench.files import START_ANEW, storage, write_atomically
from specdec_lab.bench.run import enough_memory
from specdec_lab.command import SUCCESS, run_plain_job, say
from specdec_lab.compare.runs import Run
from specdec_lab.cost import measure_verify_cost
from specdec_lab.errors import InputError
from specdec_lab.predict.charts import draw_predicted, draw_projection
from specdec_lab.predict.projection import Place, measured_drafting, predict_here, project
from specdec_lab.predict.settings import PredictPlan, plan_prediction
from specdec_lab.strategies import plan_target

DOCUMENT, TABLE, PICTURE = "prediction.json", "prediction.csv", "prediction.svg"

WITHIN = 0.15
"""A prediction this close to the measured speed-up counts as good."""

ASSUMED = (
    "Assumed: acceptance and tree sizes stay those of the run; forwards take the longer of reading weights and "
    "computing, at the full rates of the data sheet, plus reading the cache; devices share a forward without loss; a "
    "head keeps its measured time in proportion to a forward of the target, and a drafter without weights its own "
    "time. Real machines are slower, on both sides of the ratio."
)


def predict_job(config: DictConfig) -> None:
    """Run one prediction inside Hydra; see ``specdec_lab.command.run_job``."""
    run_plain_job(config, _run)


def _run(config: Mapping[str, Any], folder: Path, _: Console) -> int:
    out = result_console()
    plan = plan_prediction(config)
    if not measured_drafting(plan.run.summary):
        remedy = "none of its strategies drafted, or the baseline has no round; give a run with both"
        raise InputError("run", plan.settings.run, remedy)
    if plan.hardware is None and plan.run.summary["batch_size"] != 1:
        remedy = "its rounds shared forwards, and forwards of one row are what is timed; give a run of batch_size=1"
        raise InputError("run", plan.settings.run, remedy)
    points = _here(plan) if plan.hardware is None else _elsewhere(plan)
    _write(folder, plan, points)
    if plan.hardware is None:
        out.print(here_table(points))
    else:
        out.print(projection_table(points))
        say(out, ASSUMED)
    say(out, f"results: {folder}")
    return SUCCESS


def _elsewhere(plan: PredictPlan) -> list[dict[str, Any]]:
    assert plan.hardware is not None
    assert plan.target is not None
    settings = plan.settings
    places = [
        Place(plan.hardware, plan.target, plan.draft, batch, context, settings.devices, settings.overhead_ms / 1e3)
        for context in settings.contexts
        for batch in settings.batch_sizes
    ]
    return [project(drafting, place) for drafting in measured_drafting(plan.run.summary) for place in places]


def _here(plan: PredictPlan) -> list[dict[str, Any]]:
    """Measure the target's forwards behind a history as long as the run's, and predict the run from them."""
    load_target = plan_target(plan.run.config["target"], plan.run.config["exact"])
    most = 1 + max(nodes for row in plan.run.rows for nodes in [0, *row["proposed_nodes_per_round"]])
    history = mean_history(plan.run)
    with enough_memory():
        target = load_target()
        target.allocate(1, history + 1, most)
    wanted = plan.settings.threads or plan.run.summary["machine"]["threads"]
    with threads(wanted, target):
        cost = measure_verify_cost(target, most, history, plan.settings.repeats)
    assert cost is not None, "the cache was allocated for it"
    return predict_here(plan.run.summary, plan.run.rows, cost)


def mean_history(run: Run) -> int:
    """Return the tokens that a round of the run has behind it, the mean over its answers."""
    lengths = [len(row["prompt_ids"]) + len(row["output_ids"]) / 2 for row in run.rows if row["status"] == "ok"]
    return max(1, round(sum(lengths) / len(lengths)))


def _write(folder: Path, plan: PredictPlan, points: Sequence[Mapping[str, Any]]) -> None:
    stated = {**plan.settings.model_dump(mode="json"), "within": WITHIN}
    sheets = {name: getattr(plan, name) for name in ("hardware", "target", "draft")}
    described = {name: None if one is None else one.model_dump() for name, one in sheets.items()}
    document = {"settings": stated, "sheets": described, "predictions": list(points)}
    table = io.StringIO()
    writer = csv.DictWriter(table, list(points[0]))
    writer.writeheader()
    writer.writerows(points)
    with storage(folder, START_ANEW):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / DOCUMENT, json.dumps(document, indent=2, allow_nan=False) + "\n")
        write_atomically(folder / TABLE, table.getvalue())
        if plan.hardware is None:
            drawable = [one for one in points if one["measured_speedup"] is not None]
            if drawable:
                draw_predicted(drawable, folder / PICTURE, WITHIN)
        else:
            draw_projection(points, folder / PICTURE)


def here_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Return one line per strategy: predicted beside measured."""
    table = plain_table("predicted and measured speed-up", "predicted from forwards that were timed apart from the run")
    for name in ("strategy", "nodes", "tau", "predicted", "measured", "predicted / measured"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for one in points:
        measured, relative = one["measured_speedup"], one["predicted_over_measured"]
        table.add_row(
            one["strategy"],
            f"{one['nodes_per_round']:.1f}",
            f"{one['mean_acceptance_length']:.2f}",
            f"{one['predicted_speedup']:.2f}x",
            "-" if measured is None else f"{measured:.2f}x",
            "-" if relative is None else f"{relative:.2f}",
        )
    return table


def projection_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Return one line per strategy, context and batch size."""
    caption = (
        "tok/s: of all rows together. break-even: tokens a round has to emit. K: best length if trees were chains."
    )
    table = plain_table("projected", caption)
    for name in ("strategy", "context", "batch", "devices", "GB", "tok/s", "speed-up", "break-even", "K"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for one in points:
        table.add_row(
            one["strategy"],
            str(one["context_tokens"]),
            str(one["batch_size"]),
            str(one["devices"]),
            f"{one['memory_bytes'] / 1e9:.0f}",
            f"{one['tokens_per_second']:.0f}",
            f"{one['speedup']:.2f}x",
            f"{one['break_even_acceptance_length']:.2f}",
            "-" if one["best_chain_length"] is None else str(one["best_chain_length"]),
        )
    return table
