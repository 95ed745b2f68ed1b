"""Heads that come with the package: trained for the default target."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specdec_lab.errors import InputError
from specdec_lab.heads.calibration import CALIBRATION
from specdec_lab.heads.facts import facts_within
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


MEASURED = ("evaluation", "accuracy_by_rank", CALIBRATION)
"""Facts of a head that a training without steps finds anew."""


def ship(run: Path, kind: str, target_name: str) -> Path:
    """Copy a trained head, and how it was trained, to its place in the package; return that place.

    What a training without steps has measured (``max_steps=0``) is added to the head that is there.

    Args:
        run: run folder of a finished training.

    Raises:
        InputError: there is no finished head, it is too large, or another one was measured.
    """
    head, place = run / "head", shipped_folder(kind, target_name)
    if not head.is_dir():
        raise InputError("run", str(run), "there is no head/ in it; give the folder of a finished training")
    size = sum(path.stat().st_size for path in head.iterdir())
    if size > MOST_BYTES:
        remedy = f"its head takes {size} bytes and at most {MOST_BYTES} are shipped; use a smaller draft_vocab"
        raise InputError("run", str(run), remedy)
    if _facts(head)[1].get("optimizer_steps") == 0:
        _state_what_was_measured(head, place)
        return place
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


def _facts(head: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a head's configuration, and the facts within it."""
    config = json.loads((head / "config.json").read_text("utf-8"))
    return config, facts_within(config)


def _state_what_was_measured(head: Path, place: Path) -> None:
    names = {path.name for folder in (head, place) for path in folder.glob("*.safetensors")}
    pairs = [(load_file(head / name), load_file(place / name)) for name in names if (place / name).exists()]
    same = len(pairs) == len(names) and all(
        one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        for one, other in pairs
    )
    if not same:
        raise InputError("run", str(head.parent), "it has measured another head than the one that is shipped")
    (config, facts), (_, found) = _facts(place), _facts(head)
    facts.update({name: found[name] for name in MEASURED if found.get(name)})
    facts["measured_on"] = found.get("data")
    new = place / "config.json.new"
    new.write_text(without_folders(json.dumps(config, indent=2)) + "\n", "utf-8")
    new.replace(place / "config.json")
