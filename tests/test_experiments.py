"""Every file of ``conf/experiment/``: it composes as its first line says, and the sweeps run in tiny form."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.types import RunMode
from omegaconf import OmegaConf

from specdec_lab.config import register_drafters

ROOT = Path(__file__).parents[1]
FILES = sorted((resources.files("specdec_lab.conf") / "experiment").iterdir(), key=lambda path: path.name)
SEARCHES = pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra 'search'")
NAMES = [
    pytest.param(name, marks=SEARCHES) if name.startswith("search") else name
    for name in (path.name.removesuffix(".yaml") for path in FILES)
]


def command(name: str) -> list[str]:
    """Return the command in a file's first line after Hydra's own, as words."""
    text = (resources.files("specdec_lab.conf") / "experiment" / f"{name}.yaml").read_text("utf-8")
    return shlex.split(text.splitlines()[1].removeprefix("# "))


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    register_drafters()
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        yield


def composed(name: str) -> Any:
    words = command(name)
    script = words[1].removeprefix("scripts/").removesuffix(".py")
    return compose(script, overrides=words[2:], return_hydra_config=True)


@pytest.mark.parametrize("name", NAMES)
def test_first_line_is_the_command(name: str):
    """It names this file; Python runs a script that is there."""
    words = command(name)
    assert words[0] == "python"
    assert (ROOT / words[1]).exists()
    assert f"experiment={name}" in words


@pytest.mark.parametrize("name", NAMES)
def test_it_composes_and_its_values_are_not_overwritten(name: str):
    """An experiment's values come after those of the main file."""
    config = composed(name)
    file = OmegaConf.create((resources.files("specdec_lab.conf") / "experiment" / f"{name}.yaml").read_text("utf-8"))
    for field, value in file.items():
        if field not in ("defaults", "hydra", "drafter", "sampling", "head", "data", "prompts"):
            assert OmegaConf.select(config, str(field)) == value, field


@pytest.mark.parametrize("name", NAMES)
def test_no_file_chooses_a_launcher(name: str):
    """Guards CL-07: Hydra would ignore it without a word; the command in the first line is where it belongs."""
    text = (resources.files("specdec_lab.conf") / "experiment" / f"{name}.yaml").read_text("utf-8")
    assert not re.search(r"^\s*(- override )?/?hydra/launcher|^\s*launcher:", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in NAMES if "sweep" in str(name)])
def test_a_sweep_is_one_without_a_flag_and_sweeps_known_fields(name: str):
    """Every swept field is one that the composed configuration has."""
    config = composed(name)
    assert config.hydra.mode == RunMode.MULTIRUN
    for field in config.hydra.sweeper.params:
        assert OmegaConf.select(config, field, throw_on_missing=False, default="absent") != "absent", field


def tiny_run(tmp_path: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    rows = [{"question_id": n, "category": "qa", "turns": [f"{n} and {n} and {n}"]} for n in range(2)]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [sys.executable, str(ROOT / command(name)[1]), *command(name)[2:], "target=tiny", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)


def test_a_tiny_sweep_has_a_folder_for_each_job(tmp_path: Path):
    """And a job whose results are complete decodes nothing when the sweep goes on."""
    options = ("max_new_tokens=4", "hydra.sweep.dir=sweep", "drafter.ngram.k=2,16")
    done = tiny_run(tmp_path, "k_sweep", *options)
    assert done.returncode == 0, done.stderr
    folders = sorted((tmp_path / "sweep").glob("*/summary.json"))
    lengths = [json.loads(path.read_text())["strategies"][1]["config"]["k"] for path in folders]
    assert lengths == [2, 16]
    before = {path: path.with_name("requests.jsonl").read_bytes() for path in folders}
    done = tiny_run(tmp_path, "k_sweep", *options, "resume=true")
    assert done.returncode == 0, done.stderr
    assert {path: path.with_name("requests.jsonl").read_bytes() for path in folders} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in NAMES if isinstance(name, str) and name != "k_sweep" and "train" not in command(name)[1]]
)
def test_the_other_experiments_run_in_tiny_form(name: str, tmp_path: Path):
    """Those that ask for heads of the default target get strategies that need none."""
    done = tiny_run(tmp_path, name, "max_new_tokens=4", "strategies=[ngram]", "repeats=1")
    assert done.returncode == 0, done.stderr
