"""The example of CONTRIBUTING.md is a working strategy: one file, one YAML, nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the guide's two files added, and nothing edited."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("specdec_lab", "scripts", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (strategy,), (parameters,) = blocks("python"), blocks("yaml")
    (folder / "specdec_lab" / "drafters" / "bigram.py").write_text(strategy, "utf-8")
    (folder / "specdec_lab" / "conf" / "drafter" / "bigram.yaml").write_text(parameters, "utf-8")
    return folder


def run(project: Path, command: str) -> None:
    words = command.split()
    assert words[0] == "python"
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=project, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_guides_commands_run_its_example(project: Path) -> None:
    """The strategy is found by the benchmark and by the losslessness test without an edit anywhere."""
    (commands,) = blocks("bash")
    for command in commands.strip().splitlines():
        run(project, command)
    (summary,) = project.glob("outputs/benchmark/*/summary.json")
    entries = {entry["name"]: entry for entry in json.loads(summary.read_text("utf-8"))["strategies"]}
    assert entries["bigram"]["config"]["k"] == 4
    assert entries["bigram"]["exactness"]["identical"] == entries["bigram"]["exactness"]["compared"] > 0
