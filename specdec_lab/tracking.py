"""Weights & Biases, offline first: the numbers of a finished benchmark, one run per strategy.

The result files are the truth and complete without it: whatever fails here ends in one warning.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec_lab.bench import metrics
from specdec_lab.bench.columns import scalars
from specdec_lab.config import validate
from specdec_lab.errors import InputError, described

if TYPE_CHECKING:
    import wandb  # imported where it is used: a run without tracking never loads it

log = logging.getLogger(__name__)

JOB_TYPE = "benchmark"
INIT_TIMEOUT = 10.0
"""Seconds that the first contact with a server may take; then the runs are kept offline."""

FINISH_TIMEOUT = 60.0
"""Seconds that the upload at the end of a run may take; what is left stays on disk for ``wandb sync``."""

HIDDEN = "<hidden>"
_SECRET_NAME = re.compile(
    r"(^|_)(token|api_?key|access_?key|private_?key|password|passwd|secret|credentials?)$", re.IGNORECASE
)


class TrackingSettings(BaseModel):
    """Where and how runs are tracked, as ``conf/tracking/wandb.yaml`` states it.

    Attributes:
        project: the W&B project.
        entity: the user or team; ``None`` is the account's own default.
        group: what the runs of one benchmark share; ``None`` is the run folder's name and the time of creation.
        mode: ``offline`` writes files only, ``online`` sends them as well, ``disabled`` does nothing.
        tags: of every run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: Annotated[str, Field(min_length=1)] = "specdec-lab"
    entity: str | None = None
    group: str | None = None
    mode: Literal["offline", "online", "disabled"] = "offline"
    tags: tuple[str, ...] = ()


def tracking_settings(values: Mapping[str, Any] | None) -> TrackingSettings | None:
    """Check the ``tracking`` node of a configuration; an empty one (``tracking=none``) means no tracking.

    Raises:
        InputError: an unknown field or a value that it does not allow.
    """
    return validate(TrackingSettings, values, "tracking") if values else None


def check_tracking(settings: TrackingSettings, strategies: Sequence[str]) -> None:
    """Refuse what cannot be tracked; call it before anything is loaded or computed.

    Raises:
        InputError: a run id forced upon several runs, or ``online`` without a key.
    """
    forced = os.environ.get("WANDB_RUN_ID")
    if settings.mode != "disabled" and forced and len(strategies) > 1:
        remedy = f"it would put {len(strategies)} strategies into one run; unset it, or use tracking=none"
        raise InputError("WANDB_RUN_ID", forced, remedy)
    if settings.mode == "online" and not _has_credentials():
        remedy = "no API key is configured; set WANDB_API_KEY, run `wandb login`, or use tracking.mode=offline"
        raise InputError("tracking.mode", "online", remedy)


def track_summary(
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    settings: TrackingSettings,
    run_dir: Path,
) -> list[Path]:
    """Log a finished benchmark, one run per strategy; a strategy that cannot be logged does not stop the others.

    Args:
        summary: as in ``summary.json``.
        rows: as in ``requests.jsonl``.
        config: the resolved configuration of the benchmark; values that look like secrets are hidden.
        run_dir: the benchmark's run folder; the W&B files go to ``wandb/`` in it.

    Returns:
        The folder of each run that was logged.

    Raises:
        InputError: see ``check_tracking``.
    """
    if settings.mode == "disabled":
        return []
    names = [entry["name"] for entry in summary["strategies"]]
    check_tracking(settings, names)
    settings = settings.model_copy(update={"group": settings.group or f"{run_dir.name}-{summary['created']}"})
    folders: list[Path] = []
    for entry in summary["strategies"]:
        facts = run_config(summary, entry, config)
        own_rows = [row for row in rows if row["strategy"] == entry["name"]]
        outcome = _try_to_log(entry, own_rows, facts, settings, run_dir)
        if isinstance(outcome, Exception) and settings.mode == "online" and _is_connection_error(outcome):
            log.warning("W&B cannot be reached (%s); the runs are kept offline for `wandb sync`.", described(outcome))
            settings = settings.model_copy(update={"mode": "offline"})
            outcome = _try_to_log(entry, own_rows, facts, settings, run_dir)
        if isinstance(outcome, Exception):
            log.warning("W&B has no full run of %s (%s); the files are complete.", entry["name"], described(outcome))
        else:
            folders.append(outcome)
    if folders:
        sent = "" if settings.mode == "online" else f"; send them with: wandb sync {run_dir}/wandb/offline-run-*"
        log.info("W&B has %d runs in group %s%s", len(folders), settings.group, sent)
    return folders


# --- what is logged --------------------------------------------------------------------------------------------------


def run_config(summary: Mapping[str, Any], entry: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of one strategy's run, plain and without secrets.

    ``strategy`` stands flat at the top, for grouping and filters; every fact of the summary that is not a result comes
    beside it, and the benchmark's whole configuration under ``settings``.
    """
    facts = {name: value for name, value in summary.items() if name != "strategies"}
    own = {"strategy": entry["name"], "strategy_config": entry["config"], "lossless": entry["lossless"]}
    secrets = [v for name, v in os.environ.items() if len(v) >= 8 and _SECRET_NAME.search(name)]
    return _without_secrets({**facts, **own, "settings": config}, secrets)


def request_numbers(row: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the numbers of one request, as ``metrics`` defines them; undefined ones are left out."""
    if row["status"] != "ok":
        return {"failed": 1}
    numbers = {
        "failed": 0,
        "output_tokens": metrics.output_tokens([row]),
        "rounds": metrics.rounds([row]),
        "mean_acceptance_length": metrics.mean_acceptance_length([row]),
        "decode_tokens_per_second": metrics.decode_tokens_per_second([row]),
        "total_seconds": metrics.total_seconds([row]),
    }
    return {name: value for name, value in numbers.items() if value is not None}


REQUEST_COLUMNS = ("question_id", "category", "turn", "repeat", "status", "finish_reason", "exact")
REQUEST_NUMBERS = ("output_tokens", "rounds", "mean_acceptance_length", "decode_tokens_per_second")


def _log_results(run: wandb.Run, entry: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    import wandb

    run.define_metric("request_index", summary="none")
    run.define_metric("request/*", step_metric="request_index", summary="none")
    table_rows: list[Any] = []
    for index, row in enumerate(rows):
        numbers = request_numbers(row)
        run.log({"request_index": index} | {f"request/{name}": value for name, value in numbers.items()})
        labels = [str(row["question_id"]), *(row[name] for name in REQUEST_COLUMNS[1:])]
        table_rows.append([*labels, *(numbers.get(name) for name in REQUEST_NUMBERS)])
    logged: dict[str, Any] = {"requests": wandb.Table(columns=[*REQUEST_COLUMNS, *REQUEST_NUMBERS], data=table_rows)}
    by_depth = entry["acceptance_by_depth"]
    if by_depth["offered"]:
        columns = (by_depth["offered"], by_depth["joint"], by_depth["conditional"])
        data = [[depth, *values] for depth, values in enumerate(zip(*columns, strict=True), start=1)]
        table = wandb.Table(columns=["depth", "offered", "joint", "conditional"], data=data)
        logged["acceptance_by_depth"] = table
        title = "Share of rounds that accepted at least this many drafts"
        logged["acceptance_by_depth_plot"] = wandb.plot.line(table, "depth", "joint", title=title)
    if entry["accepted_histogram"]:
        data: list[Any] = [list(pair) for pair in enumerate(entry["accepted_histogram"])]
        table = wandb.Table(columns=["accepted", "rounds"], data=data)
        logged["accepted_histogram"] = table
        title = "Rounds by accepted draft tokens"
        logged["accepted_histogram_plot"] = wandb.plot.bar(table, "accepted", "rounds", title=title)
    if entry["by_category"]:
        lines = {category: dict(scalars(numbers)) for category, numbers in entry["by_category"].items()}
        names = list(dict.fromkeys(name for line in lines.values() for name in line if line[name] is not None))
        logged["by_category"] = wandb.Table(
            columns=["category", *names],
            data=[[category, *map(line.get, names)] for category, line in lines.items()],
        )
    run.log(logged)
    run.summary.update({name: value for name, value in scalars(entry) if value is not None})


# --- one run ---------------------------------------------------------------------------------------------------------


def quiet_settings() -> wandb.Settings:
    """Return settings under which W&B says nothing, waits for nobody for long, and keeps nothing that may be secret."""
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        init_timeout=INIT_TIMEOUT,
        finish_timeout=FINISH_TIMEOUT,
        x_disable_stats=True,
        x_disable_meta=True,  # holds the command line, which may hold a secret
        disable_git=True,  # a remote's address may hold one too
        disable_job_creation=True,
        save_code=False,
    )


def _try_to_log(
    entry: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    facts: dict[str, Any],
    settings: TrackingSettings,
    run_dir: Path,
) -> Path | Exception:
    """Log one run and return its folder, or what went wrong; the run is finished either way."""
    import wandb

    try:
        with wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            name=entry["name"],
            job_type=JOB_TYPE,
            tags=settings.tags,
            mode=settings.mode,
            dir=run_dir,
            config=facts,
            reinit="finish_previous",
            settings=quiet_settings(),
        ) as run:
            folder = Path(run.dir).parent
            try:
                _log_results(run, entry, rows)
            except Exception as error:  # wandb would print the traceback of what leaves the block
                run.finish(exit_code=1)
                return error
        return folder
    except Exception as error:  # a tracker's failure of any kind must not cost the benchmark anything
        return error


def _has_credentials() -> bool:
    """Return whether a key is configured, without asking for one and without a connection where there is none."""
    import wandb

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return wandb.login(prompt=False, verify=False)


def _is_connection_error(error: Exception) -> bool:
    from wandb.errors import CommError

    return isinstance(error, CommError)


def _without_secrets(value: Any, secrets: Sequence[str], name: str = "") -> Any:
    """Copy mappings and lists as plain ones; hide texts by their name, or because the environment holds them."""
    if isinstance(value, Mapping):
        return {str(key): _without_secrets(item, secrets, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_secrets(item, secrets, name) for item in value]
    if not isinstance(value, str):
        return value
    if _SECRET_NAME.search(name):
        return HIDDEN
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    return value
