"""The command line of a benchmark: from Hydra's configuration to an exit code."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from specdec_lab.bench.benchmark import check_run, goes_on, run_benchmark
from specdec_lab.bench.console import result_console
from specdec_lab.bench.files import GO_ON, REPORT, REQUESTS, SUMMARY
from specdec_lab.bench.processes import Launch, joined
from specdec_lab.bench.records import read_rows
from specdec_lab.bench.settings import BASELINE, plan_run
from specdec_lab.command import ROWS_FAILED, SUCCESS, concluded, go_on, in_sweep, plain_config, run_job, say
from specdec_lab.errors import InputError


def benchmark_job(config: DictConfig) -> float | None:
    """Run one benchmark inside Hydra; paths are relative to the folder of the launch, whatever Hydra does.

    Returns:
        The largest speed-up of its strategies, for a sweeper that searches for the best; ``None`` without one.

    Raises:
        SystemExit: with the exit code, if it is not 0.
        JobFailedError: the same within a sweep, which goes on.
    """
    run_job(config, _run)
    path = Path(get_original_cwd(), HydraConfig.get().runtime.output_dir, SUMMARY)
    return largest_speedup(json.loads(path.read_text("utf-8"))) if path.exists() else None


def largest_speedup(summary: Mapping[str, Any]) -> float | None:
    """Return the largest ratio of totals over all strategies but the baseline."""
    found = [entry["speedup"] or {} for entry in summary["strategies"] if entry["name"] != BASELINE]
    ratios = [one.get("ratio_of_totals") for one in found]
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _run(config: DictConfig, own_folder: Path) -> int:
    """Run the benchmark and return the exit code; of several processes, the first alone says anything."""

    def work() -> int:
        with joined(
            OmegaConf.select(config, "target.device"),
            share_model=OmegaConf.select(config, "target.tp_plan") is not None,
            sweep=HydraConfig.get().mode is RunMode.MULTIRUN,
        ) as launch:
            return _run_in(launch, config, own_folder)

    return concluded(work, Console(stderr=True))


def _run_in(launch: Launch, config: DictConfig, own_folder: Path) -> int:
    quiet = not launch.main
    out, err = result_console(quiet=quiet), Console(stderr=True, quiet=quiet)
    folder = Path(launch.shared(str(own_folder)))
    if folder != own_folder:
        with suppress(OSError):  # Hydra made one for each process, and the first one's is used
            own_folder.rmdir()
    if quiet and launch.one_model:  # it decodes what the first one decodes: its own rows are not wanted
        with tempfile.TemporaryDirectory(prefix="specdec_lab-") as passing:
            return concluded(lambda: _run_to(Path(passing), launch, config, out, err), err)
    return concluded(lambda: _run_to(folder, launch, config, out, err), err)


def _run_to(folder: Path, launch: Launch, config: DictConfig, out: Console, err: Console) -> int:
    try:
        with launch.together():
            plan = plan_run(in_sweep(plain_config(config)))
            if launch.one_model and plan.settings.resume:
                remedy = "processes that share a model have to decode the same rows from the start; use overwrite=true"
                raise InputError("resume", True, remedy)
            check_run(plan, folder)
            if plan.settings.resume and not goes_on(plan, folder):
                say(err, f"resume=true: there is no earlier run in {folder}; a new one begins")
        summary = run_benchmark(plan, folder, out, err, launch=launch)
        if not launch.main:
            return SUCCESS
        from specdec_lab.compare.comparison import compare  # not needed before, and they take a second to import
        from specdec_lab.compare.files import write_comparison

        write_comparison(folder, compare([folder]), GO_ON, "hydra.run.dir")
    except KeyboardInterrupt:
        say(err, f"interrupted; what was computed is kept, go on with: {go_on(folder)}")
        raise
    failed = sum(entry["failed"] for entry in summary["strategies"])
    say(out, f"results: {folder}; a page with charts and verdicts: {folder / REPORT}")
    if not summary["complete"]:
        first = next((row for row in read_rows(folder / REQUESTS) if row["status"] != "ok"), None)
        why = "" if first is None else f" (question {first['question_id']}: {first['error']})"
        say(err, f"{failed} rows failed{why}; requests.jsonl says why, and resume=true runs them again")
        return ROWS_FAILED
    return SUCCESS
