"""The folder of a training: which files it writes there, and when it may."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec_lab.bench.files import CONFIG, TRACKING
from specdec_lab.errors import InputError, listed

CHECKPOINTS, EXPORT, METRICS = "checkpoints", "head", "metrics.jsonl"
CURVE_TABLE, CURVE_PLOT, LOG = "training_curve.csv", "training_curve.png", "train.log"

PRODUCTS = frozenset({CHECKPOINTS, EXPORT, METRICS, CURVE_TABLE, CURVE_PLOT})
"""What the loop writes; the command line adds configuration, log and tracking."""

WRITTEN_BY_A_TRAINING = PRODUCTS | {CONFIG, LOG, TRACKING}
_TEMPORARY = ".tmp"


def check_free(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Decide whether the loop may write into a folder; nothing is changed.

    Raises:
        InputError: it holds an earlier training, and neither ``resume`` nor ``overwrite`` says what to do with that.
    """
    if resume and overwrite:
        raise InputError("overwrite", True, "resume=true keeps what overwrite=true removes; give one of the two")
    held = sorted(name for name in PRODUCTS if (folder / name).exists())
    if held and not (resume or overwrite):
        remedy = f"the folder holds {listed(held, most=3)}; add resume=true, overwrite=true or give another folder"
        raise InputError("hydra.run.dir", str(folder), remedy)


def check_run_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Decide whether a training from the command line may have a folder; nothing is changed.

    An empty one is free with ``resume`` too: then the training starts there.

    Raises:
        InputError: see ``check_free``; or the folder holds files of somebody else, or no training to go on with.
    """
    check_free(folder, resume=resume, overwrite=overwrite)
    held = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in held if name.removesuffix(_TEMPORARY) not in WRITTEN_BY_A_TRAINING]
    if resume and held and CONFIG not in held:
        raise InputError("resume", True, f"{folder} holds no {CONFIG} of an earlier training; give the folder of one")
    if foreign and not resume:
        remedy = f"no training wrote {listed(foreign, most=3)}, which the folder holds; give another folder"
        raise InputError("hydra.run.dir", str(folder), remedy)


def clear_folder(folder: Path) -> None:
    """Remove what the loop has written in a folder."""
    for name in PRODUCTS:
        for path in (folder / name, folder / (name + _TEMPORARY)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of another one once it has been filled."""
    temporary = folder.with_name(folder.name + _TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
