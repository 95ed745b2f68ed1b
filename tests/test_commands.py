"""Every command that a page shows, run in its tiny form: the tiny target, few prompts, few tokens."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from specdec_lab.dashboard.panels import TRAINING_LINES
from specdec_lab.targets.tiny import load_tiny

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100", "WANDB_MODE": "offline"}

TINY = {
    "benchmark.py": ["target=tiny", "prompts.limit=2", "max_new_tokens=6"],
    "audit.py": ["target=tiny", "prompts.limit=2", "cases=1", "max_new_tokens=4"],
    "trace.py": ["target=tiny", "max_new_tokens=6"],
    "measure.py": ["target=tiny", "prompts.limit=2", "max_new_tokens=4", "alternations=1"],
    "compare.py": [],
    "predict.py": ["repeats=1"],
    "record.py": [],
    "replay.py": [],
    "export.py": [],
    "publish_dashboard.py": [],
    "learning_curves.py": [],
    "generate_responses.py": ["target=tiny", "max_new_tokens=24"],
    "train.py": ["target=tiny", "max_steps=2", "measure_prompts=1", "measure_tokens=4", "precision=fp32",
                 "min_coverage=0", "data.validation_share=0.2", "batch_size=2"],
}  # fmt: skip
"""What each script is also told, unless the page sets the same field."""

NEEDS_GPUS = ("ddp.yaml", "fsdp2.yaml")
"""Configurations of accelerate that cannot be run without."""

ELLIPSIS = "data.responses=[outputs/responses] data.prompts=[prompts.jsonl] hydra.run.dir=outputs/again"
"""What stands for ``...`` at the end of a command."""


def shown(page: Path) -> list[list[str]]:
    """Return the commands of a page's bash blocks in their order, as words; continued lines are joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line.replace(" ... ", f" {ELLIPSIS} ").strip(), comments=True) for line in lines]
    return [command for command in words if command and command[0] in ("python", "accelerate")]


def tiny(command: list[str]) -> list[str]:
    """Return a command that does the same at tiny scale."""
    at = next(place for place, word in enumerate(command) if word.startswith("scripts/"))
    script, rest = command[at].removeprefix("scripts/"), command[at + 1 :]
    given = {word.partition("=")[0] for word in rest}
    added = [word for word in TINY[script] if word.partition("=")[0] not in given or word.startswith("prompts.limit")]
    kept = [word for word in rest if not (word.startswith("prompts.limit=") and script in TINY)]
    before = [sys.executable]
    if command[0] == "accelerate":
        before = [sys.executable, "-m", "accelerate.commands.launch", *command[2:at]]
        before = [str(ROOT / word) if word.startswith("conf/") else word for word in before]
    return [*before, str(ROOT / "scripts" / script), *kept, *added]


def runnable(command: list[str]) -> bool:
    searches = (
        "hydra/sweeper=optuna" in command and find_spec("optuna") is None
    )  # the extra that nobody needs for tests
    return not searches and not any(word.endswith(NEEDS_GPUS) for word in command)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the pages' commands name."""
    rows = [
        {"question_id": number, "category": category, "turns": [f"Say {number} and {number} again, with words."]}
        for number, category in enumerate(["qa", "rag", "writing", "qa", "rag", "writing"], start=1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("prompts.jsonl", "my_prompts.jsonl", "question.jsonl", "data/train.jsonl", "data/question.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    target = load_tiny(device="cpu")
    target.model.save_pretrained(tmp_path / "PATH_OR_HUB_ID")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(tmp_path / "PATH_OR_HUB_ID")
    return tmp_path


def run(folder: Path, command: list[str]) -> None:
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, done.stderr[-3000:]


def benchmark(folder: Path, name: str, *overrides: str) -> None:
    """Make the run folder that a page's commands read."""
    words = ["python", "scripts/benchmark.py", "strategies=[ngram]", f"hydra.run.dir={name}", *overrides]
    run(folder, tiny(words))


RUNS_READ = {
    "README.md": ["outputs/demo"],
    "reading_a_result.md": ["outputs/demo", "sweep/0", "sweep/1", "sweep/2", "old_run", "new_run"],
    "experiments.md": ["outputs/demo"],
}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page: Path, folder: Path):
    """Guards CL-08: a command that was renamed, lost an option, or never worked; in order, in one folder per page."""
    for number, name in enumerate(RUNS_READ.get(page.name, [])):
        benchmark(folder, name, f"drafter.ngram.k={4 + number}" if name.startswith("sweep") else "drafter.ngram.k=4")
    for command in shown(page):
        if runnable(command):
            run(folder, tiny(command))


@pytest.mark.slow
def test_from_prompts_to_a_compared_head_in_four_commands(folder: Path):
    """The first block of docs/training.md, word for word but for the size: the head that is trained is compared."""
    for command in shown(ROOT / "docs" / "training.md")[:4]:
        run(folder, tiny(command))
    compared = json.loads((folder / "outputs" / "with_eagle" / "comparison.json").read_text())
    assert {entry["label"] for entry in compared["entries"]} == {"autoregressive", "ngram", "eagle"}
    assert (folder / "outputs" / "eagle" / "head" / "model.safetensors").exists()
    rows = [json.loads(line) for line in (folder / "outputs" / "eagle" / "metrics.jsonl").read_text().splitlines()]
    logged = {f"{row['kind']}/{name}" for row in rows for name in row}
    assert set(TRAINING_LINES) <= logged  # what the dashboard draws of a training


@pytest.mark.slow
def test_a_sweep_of_trainings_gives_each_a_process_and_outlives_a_failure(folder: Path):
    """Guards CL-07: submitit's local mode; two trainings in one process would meet each other's leavings.

    A job that fails says why, the head of the other is there, and the exit code tells.
    """
    run(folder, tiny(["python", "scripts/generate_responses.py", "prompts.paths=[prompts.jsonl]",
                      "hydra.run.dir=outputs/responses"]))  # fmt: skip
    text = (ROOT / "conf" / "experiment" / "data_sizes.yaml").read_text("utf-8")
    words = shlex.split(text.splitlines()[1].removeprefix("# "))
    sweep = [*tiny(words), "features=online", "hydra.sweep.dir=sweep"]
    run(folder, [*sweep, "data.limit_tokens=20,60"])
    assert {path.parent.name for path in (folder / "sweep").glob("*/head")} == {"0", "1"}
    processes = {path.name.split("_")[0] for path in (folder / "sweep" / ".submitit").glob("*/*_log.out")}
    assert len(processes) == 2
    again = [*sweep, "hydra.sweep.dir=again", "data.limit_tokens=20,none"]
    done = subprocess.run(again, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "data.limit_tokens" in done.stderr
    assert {path.parent.name for path in (folder / "again").glob("*/head")} == {"0"}


def test_commands_are_found():
    """The checks above see commands: the README has some, and a continued line is one."""
    assert ["python", "scripts/compare.py", "outputs/demo"] in shown(ROOT / "README.md")
    assert all(len(command) > 2 for command in shown(ROOT / "docs" / "training.md"))
