"""What a result was made with: package versions, the commit, the machine."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import specdec_lab

PACKAGES = (
    "specdec-lab",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "numpy",
    "datasets",
    "hydra-core",
    "wandb",
)
"""Distributions whose versions can change a result or the reading of it."""


def package_versions() -> dict[str, str | None]:
    """Return ``{"python": ..., distribution: version}``; ``None`` for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def git_sha(package: Path = Path(specdec_lab.__file__).parent) -> str | None:
    """Return the commit of the checkout that a package folder lies at the top of.

    ``None`` where there is none: an installed copy, git missing, or a repository that merely holds the environment.
    """
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top) != package.resolve().parent:
        return None
    return _git(package, "rev-parse", "HEAD")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine() -> dict[str, str | int | None]:
    """Return the CPU's name, the threads that torch uses, and the first CUDA device's name or ``None``."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def cpu_name() -> str | None:
    """Return what the CPU calls itself, or its architecture; ``None`` if even that is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    stated = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(stated, None) or platform.processor() or platform.machine() or None


def provenance() -> dict[str, Any]:
    """Return everything of the above, as result files state it: ``git_sha``, ``versions``, ``machine``."""
    return {"git_sha": git_sha(), "versions": package_versions(), "machine": machine()}
