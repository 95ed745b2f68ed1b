"""The command lines of recording and replaying."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from specdec_lab.bench.benchmark import threads
from specdec_lab.bench.console import plain_table, progress, result_console
from specdec_lab.bench.files import START_ANEW, storage, write_atomically
from specdec_lab.bench.run import enough_memory
from specdec_lab.bench.settings import BASELINE, choose_strategies
from specdec_lab.command import SUCCESS, run_plain_job, say
from specdec_lab.compare.runs import read_named_run
from specdec_lab.config import PositiveInt, Threads, demand, validate
from specdec_lab.cost import EVERY_NODE_PAYS
from specdec_lab.errors import InputError
from specdec_lab.replay.charts import draw_replay
from specdec_lab.replay.recording import RECORDING, baseline_texts, read_recording, record, states_of
from specdec_lab.replay.scoring import disagreement, numbers, replay
from specdec_lab.strategies import StrategyPlan, plan_strategy, plan_target
from specdec_lab.target import Target

DOCUMENT, TABLE, PICTURE = "replay.json", "replay.csv", "replay.svg"


class RecordSettings(BaseModel):
    """Values of ``conf/record.yaml`` besides its groups; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Annotated[str, Field(min_length=1)]
    strategies: tuple[str, ...] | None = None
    layers: tuple[int, ...] = ()
    limit: PositiveInt | None = None
    budget_bytes: PositiveInt | None = None
    threads: Threads | None = None
    overwrite: bool = False


class ReplaySettings(BaseModel):
    """Values of ``conf/replay.yaml`` besides its groups; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recording: Annotated[str, Field(min_length=1)]
    strategies: tuple[str, ...] | None = None
    stride: PositiveInt = 1
    limit: PositiveInt | None = None
    device: str = "auto"
    threads: Threads | None = None


def record_job(config: DictConfig) -> None:
    """Make one recording inside Hydra; see ``specdec_lab.command.run_job``."""
    run_plain_job(config, _record)


def replay_job(config: DictConfig) -> None:
    """Replay one recording inside Hydra; see ``specdec_lab.command.run_job``."""
    run_plain_job(config, _replay)


def _record(config: dict[str, Any], folder: Path, err: Console) -> int:
    nodes = config.pop("drafter")
    demand(config, "run", "give the folder of a finished benchmark, as run=outputs/demo")
    settings = validate(RecordSettings, config)
    run = read_named_run(settings.run)
    texts = baseline_texts(run)[: settings.limit]
    if (folder / RECORDING).exists() and not settings.overwrite:
        raise InputError("hydra.run.dir", str(folder), f"it holds a {RECORDING}; add overwrite=true or give another")
    node = run.config["target"]
    plans = plan_strategies(settings.strategies, nodes, node)
    target = load(node)
    with threads(settings.threads, target):
        target.check_states(settings.layers, "layers")
        layers = {*settings.layers, *(layer for plan in plans for layer in plan.make(target).feature_layers)}
        with storage(folder, START_ANEW):
            folder.mkdir(parents=True, exist_ok=True)
        made = record(folder, target, node, texts, sorted(layers), err, settings.budget_bytes)
    tokens = sum(len(text.ids) for text in texts)
    say(result_console(), f"{len(texts)} texts, {tokens} tokens, hidden states {list(made.layers)}: {folder}")
    return SUCCESS


def _replay(config: dict[str, Any], folder: Path, err: Console) -> int:
    nodes = config.pop("drafter")
    demand(config, "recording", "give a folder of scripts/record.py, as recording=outputs/recording")
    settings = validate(ReplaySettings, config)
    recording = read_recording(Path(settings.recording))
    plans = [plan for plan in plan_strategies(settings.strategies, nodes, recording.target) if plan.name != BASELINE]
    if not plans:
        raise InputError("strategies", settings.strategies, "name at least one that drafts")
    target = load({**recording.target, "device": settings.device})
    states = states_of(recording, target)
    recording = replace(recording, texts=recording.texts[: settings.limit])
    with threads(settings.threads, target), progress(err, len(plans) * len(recording.texts), what="texts") as report:
        replayed = {
            plan.name: replay(
                recording, target, states, plan.make(target), settings.stride, lambda name=plan.name: report(name)
            )
            for plan in plans
        }
    found = {name: numbers(one) for name, one in replayed.items()}
    document = {
        "recording": settings.recording,
        "texts": len(recording.texts),
        "stride": settings.stride,
        "configs": {plan.name: dict(plan.parameters) for plan in plans},
        "strategies": found,
        "disagreement": disagreement(replayed),
    }
    with storage(folder, START_ANEW):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / DOCUMENT, json.dumps(document, indent=2, allow_nan=False, default=str) + "\n")
        write_atomically(folder / TABLE, _csv(found))
        draw_replay(found, folder / PICTURE)
    out = result_console()
    out.print(replay_table(found, document["disagreement"]))
    say(out, f"results: {folder}")
    return SUCCESS


def plan_strategies(wanted: Any, nodes: Mapping[str, Any], target: Mapping[str, Any]) -> list[StrategyPlan]:
    """Check the strategies of a configuration; without a choice, all whose needs are met.

    Raises:
        InputError: see ``choose_strategies`` and ``plan_strategy``.
    """
    names = choose_strategies(wanted, nodes, target.get("model"))
    return [plan_strategy(name, without_clock(nodes[name], nodes), f"drafter.{name}") for name in names]


def without_clock(node: Mapping[str, Any], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's parameters such that every node pays: a replay times nothing, and runs no forward.

    Args:
        nodes: of all strategies, for those that have others as members.
    """
    changed = dict(node)
    if changed.get("verify_ms", 0) is None:
        changed["verify_ms"] = dict(EVERY_NODE_PAYS)
    for member in changed.get("members") or ():
        if "verify_ms" in nodes.get(member, {}):
            settings = dict(changed.get("settings") or {})
            settings[member] = {"verify_ms": dict(EVERY_NODE_PAYS), **settings.get(member, {})}
            changed["settings"] = settings
    return changed


def load(node: Mapping[str, Any]) -> Target:
    """Load the target of a configuration node.

    Raises:
        InputError: a field is wrong.
    """
    load_target = plan_target(node)
    with enough_memory(), torch.random.fork_rng(devices=[]):
        return load_target()


def _csv(found: Mapping[str, Mapping[str, Any]]) -> str:
    text = io.StringIO()
    names = ("positions", "mean_accepted_drafts", "mean_nodes", "calibration_error")
    depths = max((len(one["acceptance_by_depth"]["joint"]) for one in found.values()), default=0)
    writer = csv.writer(text)
    writer.writerow(["strategy", *names, *(f"joint_{depth}" for depth in range(1, depths + 1))])
    for name, one in found.items():
        writer.writerow([name, *(one[field] for field in names), *one["acceptance_by_depth"]["joint"]])
    return text.getvalue()


def replay_table(found: Mapping[str, Mapping[str, Any]], differ: Mapping[str, Any]) -> Table:
    """Return one line per strategy."""
    together = (
        f"At {differ['any_right'] or 0:.0%} of the positions at least one strategy has the next token; the best of all "
        f"at each position accepts {differ['best_of_all'] or 0:.2f} drafts."
    )
    table = plain_table("replay", together)
    for name in ("strategy", "positions", "nodes", "accepted", "first", "second", "third", "calibration error"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for name, one in found.items():
        joint = one["acceptance_by_depth"]["joint"]
        error = one["calibration_error"]
        table.add_row(
            name,
            str(one["positions"]),
            f"{one['mean_nodes'] or 0:.1f}",
            f"{one['mean_accepted_drafts'] or 0:.2f}",
            *(f"{joint[depth]:.0%}" if depth < len(joint) else "-" for depth in range(3)),
            "-" if error is None else f"{error:.3f}",
        )
    return table
