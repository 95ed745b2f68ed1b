"""The command line of a benchmark: from Hydra's configuration to an exit code."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from specdec_lab.bench.benchmark import check_run, run_benchmark
from specdec_lab.bench.console import result_console
from specdec_lab.bench.files import CONFIG, GO_ON, REPORT, SUMMARY
from specdec_lab.bench.processes import Launch, joined
from specdec_lab.bench.settings import BASELINE, plan_run
from specdec_lab.errors import InputError, SpecdecError, one_line

MULTIRUN_FLAGS = ("-m", "--multirun")
SUCCESS, REFUSED, ROWS_FAILED, INTERRUPTED = 0, 1, 3, 130


class JobFailedError(Exception):
    """One job of a sweep did not succeed; it has said why, and the others go on."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the job ended with exit code {code}")
        self.code = code


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


def run_job(config: DictConfig, run: Callable[[DictConfig, Path], int]) -> None:
    """Call ``run(config, run folder)`` in the folder of the launch, and end the job with the exit code it returns.

    Raises:
        SystemExit: with the exit code, if it is not 0.
        JobFailedError: the same within a sweep, which goes on.
        KeyboardInterrupt: the run was interrupted, which ends a sweep too.
    """
    hydra = HydraConfig.get()
    with chdir(get_original_cwd()):
        code = run(config, Path(hydra.runtime.output_dir))
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code != SUCCESS:
        raise JobFailedError(code) if hydra.mode is RunMode.MULTIRUN else SystemExit(code)


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
            plan = plan_run(plain_config(config))
            if plan.settings.resume and not (folder / CONFIG).exists():
                say(err, f"resume=true: there is no earlier run in {folder}; a new one begins")
            if launch.one_model and plan.settings.resume:
                remedy = "processes that share a model have to decode the same rows from the start; use overwrite=true"
                raise InputError("resume", True, remedy)
            check_run(plan, folder)
        summary = run_benchmark(plan, folder, out, err, launch=launch)
        if not launch.main:
            return SUCCESS
        from specdec_lab.compare.comparison import compare  # not needed before, and they take a second to import
        from specdec_lab.compare.files import write_comparison

        write_comparison(folder, compare([folder]), GO_ON, "hydra.run.dir")
    except KeyboardInterrupt:
        say(err, f"interrupted; what was computed is kept, go on with: hydra.run.dir='{folder}' resume=true")
        raise
    failed = sum(entry["failed"] for entry in summary["strategies"])
    say(out, f"results: {folder}; a page with charts and verdicts: {folder / REPORT}")
    if not summary["complete"]:
        say(err, f"{failed} rows failed; requests.jsonl says why, and resume=true runs them again")
        return ROWS_FAILED
    return SUCCESS


def concluded(work: Callable[[], int], err: Console) -> int:
    """Return the exit code that a command's work returns, or say in one sentence why it was refused."""
    try:
        return work()
    except SpecdecError as error:
        say_error(err, str(error))
    except OSError as error:  # of a library, while it loads: our own files have their sentence already
        say_error(err, one_line(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return REFUSED


def parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace | int:
    """Return the options of a command line, or the exit code where argparse has said all there is to say."""
    try:
        return parser.parse_args(words)
    except SystemExit as end:  # argparse ends with 2
        return REFUSED if end.code else SUCCESS


def run_hydra(main: Callable[[], Any]) -> int:
    """Call a ``@hydra.main`` function and return the exit code; a user's mistake ends in one sentence.

    Hydra would print a traceback for some mistakes (a run folder that cannot be made) and its own exit code for
    others, so its exceptions are let through to here.
    """
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in MULTIRUN_FLAGS)  # Hydra takes no flag in between
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except JobFailedError as failed:
        return failed.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return REFUSED if end.code == 2 else int(end.code or SUCCESS)  # argparse ends with 2
    except (HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        say_error(Console(stderr=True), library_message(error))
        return REFUSED
    except OSError as error:  # Hydra makes the run folder before the job starts
        remedy = f"the run folder cannot be made ({error.strerror}); give another one"
        say_error(Console(stderr=True), str(InputError("hydra.run.dir", error.filename, remedy)))
        return REFUSED
    return SUCCESS


def say(console: Console, text: str) -> None:
    """Print text as it is, in one line."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def say_error(console: Console, sentence: str) -> None:
    """Print what a user has to mend."""
    console.print("error: ", style="bold red", end="")
    say(console, sentence)


def plain_config(config: DictConfig) -> dict:
    """Resolve the configuration into plain containers; parameters that are left open stay ``???``.

    Raises:
        InputError: a value that cannot be resolved.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(error.full_key or "config", None, library_message(error)) from error
    assert isinstance(plain, dict)
    return plain


def library_message(error: Exception) -> str:
    """Return all of a message of Hydra's or OmegaConf's in one line, without the parts that help nobody."""
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown is not None:  # Hydra advises to add the field with a +, which every check here refuses
        return f"{unknown.group(1)}: there is no field of that name; the files in conf/ have them all"
    text = f"{error} {error.__cause__ or ''}".split("Config search path")[0]
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("object_type=", "full_key:")))
