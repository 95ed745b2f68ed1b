"""Heads that come with the package: trained for the default target."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from specdec_lab.errors import InputError
from specdec_lab.target import Target

SHIPPED = "shipped"
"""Value of a strategy's ``head`` that means the one that comes with the package."""


MODELS = {"SmolLM2-135M-Instruct": "smollm2_135m"}
"""Name of the target by the ``model`` of its configuration, for targets that heads are shipped for."""


def is_shipped(kind: str, model: str | None) -> bool:
    """Return whether a head of a kind comes with the package for the target of a configuration."""
    return model in MODELS and shipped_folder(kind, MODELS[model]).is_dir()


def shipped_folder(kind: str, target_name: str) -> Path:
    """Return where the head of a kind for a target would lie."""
    return Path(__file__).parent / "files" / target_name / kind


def head_source(kind: str, head: str, target: Target, field: str = "head") -> str:
    """Return the folder or hub id that a strategy's ``head`` names.

    Args:
        field: the parameter that names it, for messages.

    Raises:
        InputError: ``shipped``, and none is shipped for this target.
    """
    if head != SHIPPED:
        return head
    folder = shipped_folder(kind, target.name)
    if not folder.is_dir():
        remedy = f"no {kind} head comes with the package for {target.name}; train one or give a folder or hub id"
        raise InputError(field, head, remedy)
    return str(folder)


CONFIG = "config.yaml"
SHIPPED_FILES = (CONFIG, "training_curve.csv", "training_curve.png")
"""What of a training's run folder comes along beside the head itself."""

MOST_BYTES = 20_000_000
"""Largest head that is shipped."""


def without_folders(text: str) -> str:
    """Return a configuration with paths cut to folder and file: where they lay on a machine is nobody's concern."""
    return re.sub(r"(?<![^\s'\"\[,=])(?:~|\.{1,2})?/(?:[^/\s'\"]+/)+([^/\s'\"]+/[^/\s'\"]+)", r"\1", text)


def ship(run: Path, kind: str, target_name: str) -> Path:
    """Copy a trained head, and how it was trained, to its place in the package; return that place.

    Args:
        run: run folder of a finished training.

    Raises:
        InputError: there is no finished head, or it is too large.
    """
    head = run / "head"
    if not head.is_dir():
        raise InputError("run", str(run), "there is no head/ in it; give the folder of a finished training")
    size = sum(path.stat().st_size for path in head.iterdir())
    if size > MOST_BYTES:
        remedy = f"its head takes {size} bytes and at most {MOST_BYTES} are shipped; use a smaller draft_vocab"
        raise InputError("run", str(run), remedy)
    place = shipped_folder(kind, target_name)
    unfinished = place.with_name(place.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(head, unfinished)
    for name in SHIPPED_FILES:
        if (run / name).exists():
            shutil.copy2(run / name, unfinished / name)
    for path in (*unfinished.glob("*.yaml"), *unfinished.glob("*.json")):  # a head's own facts name what it began at
        path.write_text(without_folders(path.read_text("utf-8")), "utf-8")
    shutil.rmtree(place, ignore_errors=True)
    unfinished.rename(place)
    return place
