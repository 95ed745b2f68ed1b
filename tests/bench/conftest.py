"""A benchmark of the tiny target, configured as Hydra would, without Hydra."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_inputs import PROMPTS, write_prompts
from rich.console import Console

from specdec_lab.bench.benchmark import check_run, run_benchmark
from specdec_lab.bench.settings import RunPlan, plan_run


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """A file with five prompts of one to three turns in two categories."""
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture
def config(prompts_file: Path) -> dict[str, Any]:
    """What Hydra would hand over for ``target=tiny max_new_tokens=12`` and a prompts file."""
    return {
        "strategies": None,
        "drafter": {
            "autoregressive": {"_target_": "specdec_lab.drafters.autoregressive.AutoregressiveDrafter"},
            "ngram": {"_target_": "specdec_lab.drafters.ngram.NgramDrafter", "k": 4, "min_ngram": 1},
        },
        "target": {"_target_": "specdec_lab.targets.tiny.load_tiny", "device": "cpu"},
        "prompts": {"path": str(prompts_file), "limit": None, "categories": None},
        "sampling": {"temperature": 0},
        "tracking": {},
        "max_new_tokens": 12,
    }


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return ``(config or plan, folder name) -> (summary, rows)``: a whole benchmark, files included."""

    def start(
        configuration: dict[str, Any] | RunPlan, name: str = "run", **options: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        plan = configuration if isinstance(configuration, RunPlan) else plan_run(configuration)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        check_run(plan, folder)
        with (tmp_path / "shown").open("a") as shown:
            summary = run_benchmark(plan, folder, Console(file=shown, width=120), Console(file=shown), **options)
        return summary, [json.loads(line) for line in (folder / "requests.jsonl").read_text("utf-8").splitlines()]

    return start
