"""One Weights & Biases run per training, offline first; ``metrics.jsonl`` is the truth and complete without it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_lab.bench.files import TRACKING
from specdec_lab.errors import described
from specdec_lab.tracking import TrackingSettings, quiet_settings, run_config

if TYPE_CHECKING:
    import wandb  # imported where it is used: a training without tracking never loads it

log = logging.getLogger(__name__)

JOB_TYPE = "train"
STEP = "optimizer_step"
"""The axis of every number: W&B's own step must not go back, and after a kill a training does."""


class RunTracker:
    """Passes rows on to a W&B run; the first failure ends that with one warning."""

    def __init__(self, run: wandb.Run) -> None:
        self._run: wandb.Run | None = run

    def log(self, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one row."""
        if self._run is None:
            return
        try:
            self._run.log(dict(numbers))
        except Exception as error:  # a tracker's failure of any kind must not cost the training anything
            log.warning("W&B takes no more rows (%s); metrics.jsonl has them all.", described(error))
            self._run = None


@contextmanager
def tracked(
    settings: TrackingSettings | None, name: str, config: Mapping[str, Any], folder: Path
) -> Iterator[RunTracker | None]:
    """Keep a W&B run open for a training; its files go to ``wandb/`` in the run folder.

    A training that goes on after a kill makes a second run with the same id, which a server puts behind the first;
    ``attempt`` tells their rows apart.

    Args:
        settings: ``None`` for no tracking.
        name: of the run.
        config: of the training; values that look like secrets are hidden.
        folder: of the training.

    Yields:
        ``None`` where there is no tracking, or where W&B cannot start, which is said in a warning.
    """
    run = None if settings is None or settings.mode == "disabled" else _start(settings, name, config, folder)
    if run is None:
        yield None
        return
    code = 1
    try:
        yield RunTracker(run)
        code = 0
    finally:
        try:
            run.finish(exit_code=code)
        except Exception as error:
            log.warning("W&B has no full run (%s); metrics.jsonl is complete.", described(error))


def _start(settings: TrackingSettings, name: str, config: Mapping[str, Any], folder: Path) -> wandb.Run | None:
    """Open the run, offline where no server can be reached."""
    modes = dict.fromkeys((settings.mode, "offline"))
    for mode in modes:
        try:
            return _open(settings.model_copy(update={"mode": mode}), name, config, folder)
        except Exception as error:
            then = "; the run is kept offline for `wandb sync`" if mode == "online" else ""
            log.warning("W&B cannot be used (%s)%s.", described(error), then)
    return None


def _open(settings: TrackingSettings, name: str, config: Mapping[str, Any], folder: Path) -> wandb.Run:
    import wandb

    run = wandb.init(
        id=_run_id(folder),
        resume="allow",
        project=settings.project,
        entity=settings.entity,
        group=settings.group or folder.name,
        name=name,
        job_type=JOB_TYPE,
        tags=settings.tags,
        mode=settings.mode,
        dir=folder,
        config=run_config({}, {"name": name, "config": config.get("head"), "lossless": True}, config),
        reinit="finish_previous",
        settings=quiet_settings(),
    )
    run.define_metric(STEP, summary="none")
    run.define_metric("*", step_metric=STEP)
    return run


def _run_id(folder: Path) -> str:
    """Return the run's id, the same whenever this training goes on."""
    path = folder / TRACKING / "training_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4), "utf-8")
    return path.read_text("utf-8")
