"""One benchmark from checked settings to result files."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.logging import RichHandler

from specdec_lab.bench import exactness
from specdec_lab.bench.console import progress, result_table
from specdec_lab.bench.files import (
    CONFIG,
    LOG,
    REQUESTS,
    check_folder,
    clear_folder,
    read_config,
    storage,
    write_atomically,
)
from specdec_lab.bench.processes import Launch, check_enough_prompts, merge_rows, split_rows
from specdec_lab.bench.records import RequestLog, read_rows
from specdec_lab.bench.run import (
    Clock,
    Strategy,
    check_same_prompts,
    enough_memory,
    expected_keys,
    reserve,
    run_rows,
)
from specdec_lab.bench.settings import BASELINE, UNPADDED_BASELINE, RunPlan, changed_settings
from specdec_lab.bench.statistics import request_key
from specdec_lab.bench.summary import StrategyFacts, run_facts, summarise, write_summary
from specdec_lab.cost import VerifyCost
from specdec_lab.errors import InputError, one_line
from specdec_lab.provenance import provenance
from specdec_lab.sampling import Processing
from specdec_lab.target import Target
from specdec_lab.tracking import track_summary
from specdec_lab.verify import LAW_RULES

log = logging.getLogger(__name__)

ALONE = Launch()

VERIFY_MS = "verify_ms"
"""Field of ``config.yaml`` with the forward times by which trees are sized."""

SINGLE_THREAD_PARAMETERS = 5_000_000
"""Below this many parameters a forward is too short to be shared between threads."""


def check_run(plan: RunPlan, folder: Path) -> None:
    """Decide whether a planned run may use its folder; nothing is loaded or written.

    Raises:
        InputError: the folder is not free, or ``resume`` would mix two configurations, prompts, versions or machines,
            or finds a damaged file.
    """
    check_folder(folder, resume=plan.settings.resume, overwrite=plan.settings.overwrite)
    if goes_on(plan, folder):
        refuse_changes(plan, folder, loaded=False)
        if (folder / REQUESTS).exists():
            read_rows(folder / REQUESTS)


def goes_on(plan: RunPlan, folder: Path) -> bool:
    """Return whether a run goes on with what an earlier one left in its folder."""
    return plan.settings.resume and (folder / CONFIG).exists()


def stated_config(plan: RunPlan) -> dict[str, Any]:
    """Return the content of ``config.yaml``: the settings, and what else must be the same where a run goes on."""
    return {**plan.config, "prompts_sha256": plan.prompts.sha256, "provenance": provenance()}


def refuse_changes(plan: RunPlan, folder: Path, *, loaded: bool) -> None:
    """Refuse to go on with a run that was another one.

    Args:
        loaded: whether the target is; before, it is open how many threads the run will use.

    Raises:
        InputError: names what differs, or ``config.yaml`` is damaged.
    """
    before, now = read_config(folder), stated_config(plan)
    before.pop(VERIFY_MS, None)  # what was measured is taken over
    changes = changed_settings(before, now)
    settings = [change for change in changes if not change.startswith(("provenance", "prompts_sha256="))]
    if settings:
        remedy = f"the run in {folder} has other settings: {', '.join(settings)}; give the same or another folder"
        raise InputError("resume", True, remedy)
    if before.get("prompts_sha256") != now["prompts_sha256"]:
        remedy = f"the prompts are others than those of the run in {folder}; restore them or give another folder"
        raise InputError("prompts.path", plan.prompts.source, remedy)
    if not loaded:
        changes = [change for change in changes if not change.startswith("provenance.machine.threads=")]
    if changes:
        remedy = f"the run in {folder} was made with something else: {', '.join(changes)}; restore that or give "
        raise InputError("resume", True, f"{remedy}another folder")


def measured_before(plan: RunPlan, folder: Path) -> dict[int, float] | None:
    """Return the forward times that a run which goes on has measured: its trees stay as large as they were.

    Raises:
        InputError: ``config.yaml`` states times that cannot be.
    """
    if not goes_on(plan, folder):
        return None
    try:
        stated = read_config(folder).get(VERIFY_MS)
        return None if stated is None else dict(VerifyCost(stated).points)
    except (InputError, TypeError) as error:
        remedy = f"{folder / CONFIG} states {VERIFY_MS} that cannot be ({one_line(error)}); restore it or give another"
        raise InputError("resume", True, remedy) from error


def run_benchmark(
    plan: RunPlan,
    folder: Path,
    out: Console,
    err: Console,
    clock: Clock = time.perf_counter,
    launch: Launch = ALONE,
) -> dict[str, Any]:
    """Load the target, decode every row, compare, and write the result files; every process of a launch calls it.

    Args:
        plan: see ``plan_run``.
        folder: the run folder, checked by ``check_run``; it exists.
        out: gets the table of results.
        err: gets progress and warnings.
        clock: seconds, monotonic.
        launch: the processes that share the run; each decodes its part of the prompts, and the first one writes.

    Returns:
        ``summary.json`` as a mapping.

    Raises:
        SpecdecError: see the parts; what was computed stays on disk, and what was there too if nothing was computed.
    """
    check_enough_prompts(launch, plan)
    share = launch.share(plan)
    with launch.together(), enough_memory():
        target = plan.load_target()
        strategies = make_strategies(plan, target)
    Processing(plan.sampling, target)  # refuses what does not fit the target's vocabulary
    with threads(plan.settings.threads, target):
        with launch.together():
            if goes_on(plan, folder):
                refuse_changes(plan, folder, loaded=True)
            with enough_memory():
                verify_ms = reserve(share, strategies, measured_before(plan, folder), launch.shared)
        with storage(folder):
            with launch.together():
                if launch.main:
                    split_rows(folder, plan, launch, resume=plan.settings.resume)
            with launch.together():
                requests = RequestLog(launch.requests_path(folder), resume=plan.settings.resume)
                check_same_prompts(share, strategies, requests)
            summary = _measure(plan, folder, strategies, requests, verify_ms, err, clock, launch)
    if launch.main:
        out.print(result_table(summary))
    return summary


def _measure(
    plan: RunPlan,
    folder: Path,
    strategies: Sequence[Strategy],
    requests: RequestLog,
    verify_ms: Mapping[int, float] | None,
    err: Console,
    clock: Clock,
    launch: Launch,
) -> dict[str, Any]:
    """Do what changes the run folder: every check has been passed."""
    share = launch.share(plan)
    with launch.together():
        if launch.main:
            if plan.settings.overwrite:
                clear_folder(folder)
            stated = {**stated_config(plan), VERIFY_MS: verify_ms}
            write_atomically(folder / CONFIG, yaml.safe_dump(stated, sort_keys=False, allow_unicode=True))
    with log_to(folder / LOG, err) if launch.main else nullcontext():
        with launch.together(), requests:
            expected = expected_keys(share, strategies)
            with progress(err, len(expected), len(requests.rows)) as report:
                run_rows(share, strategies, requests, report, clock)
            fill_exact(requests, strategies, share, err)
        with launch.together():
            if not launch.main:
                return {}
            rows = list(requests.rows.values())
            if launch.count > 1:
                order = {strategy.name: at for at, strategy in enumerate(strategies)}
                rows = merge_rows(folder, plan, order, launch)
            facts = [strategy_facts(strategy, plan) for strategy in strategies]
            about = run_facts(plan, strategies[0].target, verify_ms)
            summary = summarise(rows, about, facts, len(expected_keys(plan, strategies)))
            write_summary(folder, summary)
        if plan.tracking is not None:
            try:
                track_summary(summary, rows, plan.config, plan.tracking, folder)
            except Exception:  # the files are complete; a tracker's fault must not look like a failed run
                log.warning("tracking failed; the result files are complete", exc_info=True)
    return summary


def make_strategies(plan: RunPlan, target: Target) -> list[Strategy]:
    """Build the drafters, the baseline's first; with ``exact=fixed_shape`` the unpadded baseline comes last."""
    made = [Strategy(one.name, one.make(target), target) for one in plan.strategies]
    if plan.settings.exact == "fixed_shape":
        unpadded = Target(target.model, target.tokenizer, name=target.name, exact="off")
        baseline = plan.strategies[0]
        made.append(Strategy(UNPADDED_BASELINE, baseline.make(unpadded), unpadded))
    return made


def strategy_facts(strategy: Strategy, plan: RunPlan) -> StrategyFacts:
    """Return what the summary says about a strategy besides its rows."""
    name = BASELINE if strategy.name == UNPADDED_BASELINE else strategy.name
    config = {field: value for field, value in plan.config["drafter"][name].items() if field != "_target_"}
    target_bytes = {"target_weights": strategy.target.weight_bytes, "target_kv": strategy.target.kv_bytes}
    memory = {**target_bytes, **strategy.drafter.memory_bytes()}
    lossless, trained = strategy.drafter.lossless_under(plan.acceptance), strategy.drafter.training_tokens
    return StrategyFacts(strategy.name, config, lossless, memory, trained)


def fill_exact(requests: RequestLog, strategies: Sequence[Strategy], plan: RunPlan, err: Console) -> None:
    """Compare answers with the baseline's, after everything was timed, and write the rows again.

    A strategy whose drafts are drawn at random and accepted with their law shares only the law with the baseline, so
    its texts are not compared.
    """
    shares_noise = plan.sampling.greedy or plan.acceptance.rule not in LAW_RULES
    independent = {one.name for one in strategies if one.drafter.draws and not shares_noise}
    baseline = {request_key(row): row for row in _successful(requests, lambda name: name == BASELINE)}
    for row in baseline.values():
        row["exact"] = "baseline"
    others = _successful(requests, lambda name: name != BASELINE and name not in independent)
    todo = [row for row in others if row["exact"] is None and request_key(row) in baseline]
    with progress(err, len(todo), what="answers compared") as report:
        for row in todo:
            row.update(exactness.compare(row, baseline[request_key(row)], strategies[0].target, plan.sampling))
            report(row["strategy"])
    requests.rewrite()


def _successful(requests: RequestLog, wanted: Any) -> list[dict[str, Any]]:
    return [row for row in requests.rows.values() if row["status"] == "ok" and wanted(row["strategy"])]


@contextmanager
def threads(count: int | None, target: Target) -> Iterator[None]:
    """Set PyTorch's threads for a run: as told, else 1 for a tiny model, else PyTorch's own choice."""
    before = torch.get_num_threads()
    if count is None:
        count = 1 if target.parameter_count < SINGLE_THREAD_PARAMETERS else before
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def log_to(path: Path, console: Console) -> Iterator[None]:
    """Send log records to a file; warnings, and what this package has to say, also to the console, in single lines."""
    to_file = _PatientFileHandler(path, encoding="utf-8", delay=True)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_console = _OneLineHandler(logging.INFO, console, show_path=False, show_time=False)
    to_console.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith("specdec_lab."))
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    handlers: Sequence[logging.Handler] = (to_file, to_console)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            with suppress(OSError):  # what a full disk did not take is lost
                handler.close()


class _PatientFileHandler(logging.FileHandler):
    """Drops a record that cannot be written: a full disk stops the run at its next row, with one sentence."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        return


class _OneLineHandler(RichHandler):
    """Shows the message alone; the file has the traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        shown = logging.makeLogRecord({**vars(record), "exc_info": None, "exc_text": None})
        super().emit(shown)
