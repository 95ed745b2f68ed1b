"""The notebooks run from start to end, as a reader would run them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import specdec_lab

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(specdec_lab.__file__).parents[1]
SHOWN = {
    "01_speculative_decoding": {
        "identical texts", "identical texts again", "rejected as often as the laws differ", "the target's law came out",
    },
    "02_compare_strategies": {"every pair has a verdict", "one file, the same numbers"},
    "03_train_a_head": {"the head pays", "the text is the target's"},
    "04_add_a_strategy": {"one text", "proved lossless"},
}  # fmt: skip
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def run(path: Path, folder: Path) -> str:
    """Execute a notebook in a kernel of its own, in an empty folder, and return what it printed."""
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.fixture(autouse=True)
def _same_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_shows_what_it_says_and_leaves_nothing(path: Path, tmp_path: Path) -> None:
    """Guards CL-08: a documented example that does not run. Its own assertions are checked by running it."""
    printed = run(path, tmp_path)
    assert SHOWN[path.stem] <= set(printed.splitlines())
    assert list(tmp_path.iterdir()) == []
