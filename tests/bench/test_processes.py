"""Two processes give the run that one gives, times apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compared_runs import THREE, made_rows

from specdec_lab.bench.files import part_name
from specdec_lab.bench.processes import (
    Launch,
    check_all_joined,
    check_enough_prompts,
    joined,
    merge_rows,
    on_cpu,
    split_rows,
)
from specdec_lab.bench.prompts import Prompt, PromptSet
from specdec_lab.bench.records import read_rows, write_rows
from specdec_lab.errors import InputError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
PLACES = {name: at for at, name in enumerate(THREE)}


def plan_of(count: int) -> Any:
    """Return what the functions read of a plan: its prompts."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Planned:
        prompts: PromptSet

    prompts = tuple(Prompt(number, "qa", ("a", "b") if number % 3 == 0 else ("a",)) for number in range(count))
    return Planned(PromptSet("made.jsonl", "ab" * 32, prompts))


def test_every_prompt_has_one_process():
    """None twice, none left out, and shares of nearly one size."""
    plan = plan_of(7)
    shares = [Launch(rank, 3).share(plan).prompts.prompts for rank in range(3)]
    assert sorted(prompt.question_id for share in shares for prompt in share) == list(range(7))
    assert {len(share) for share in shares} == {2, 3}
    assert Launch().share(plan) is plan


def test_rows_survive_splitting_and_merging_in_any_number_of_processes(tmp_path: Path):
    """A launch of three that was killed is gone on with by two, and by one; the order is that of one process."""
    rows = made_rows(THREE, prompts=7)
    plan, path = plan_of(7), tmp_path / "requests.jsonl"
    write_rows(path, rows[:-5])
    split_rows(tmp_path, plan, Launch(0, 3), resume=True)
    own = [read_rows(tmp_path / part_name(rank)) for rank in range(3)]
    assert sum(len(part) for part in own) == len(rows) - 5
    assert all({row["question_id"] % 3 for row in part} <= {rank} for rank, part in enumerate(own))
    lacking = rows[-5:]
    write_rows(tmp_path / part_name(0), [*own[0], *lacking])  # as if it had decoded them before the kill
    split_rows(tmp_path, plan, Launch(0, 2), resume=True)
    assert not (tmp_path / part_name(2)).exists()
    merged = merge_rows(tmp_path, plan, PLACES, Launch(0, 2))
    assert merged == read_rows(path) == rows
    assert not (tmp_path / part_name(0)).exists()
    split_rows(tmp_path, plan, Launch(0, 2), resume=True)
    split_rows(tmp_path, plan, Launch(), resume=True)
    assert sorted(map(str, read_rows(path))) == sorted(map(str, rows))
    assert [file.name for file in tmp_path.iterdir()] == ["requests.jsonl"]


def test_without_resume_nothing_is_kept(tmp_path: Path):
    """Rows of another run must not come back."""
    write_rows(tmp_path / "requests.jsonl", made_rows(THREE, prompts=2))
    split_rows(tmp_path, plan_of(2), Launch(0, 2), resume=False)
    assert all(not read_rows(tmp_path / part_name(rank)) for rank in range(2))


def test_more_processes_than_prompts_are_refused():
    """One of them would wait for ever with nothing to do."""
    check_enough_prompts(Launch(0, 2), plan_of(2))
    with pytest.raises(InputError, match=r"--num_processes=3: there are 2 prompts"):
        check_enough_prompts(Launch(0, 3), plan_of(2))


def test_processes_that_share_a_model_are_told_from_those_that_share_prompts(monkeypatch: pytest.MonkeyPatch):
    """Each decodes everything, and the first alone speaks; a process alone shares nothing."""
    with joined("cpu", share_model=True) as launch:
        assert launch == Launch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with joined("cpu", share_model=True) as launch:
            assert launch == Launch(int(rank), 1, one_model=True)
            assert launch.main == (rank == "0")


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Each would decode everything, and they would write over each other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_all_joined(2)
    with pytest.raises(InputError, match=r"--num_processes=2: accelerate joined 1 of them"):
        check_all_joined(1)


def test_the_device_is_known_before_anything_is_joined(monkeypatch: pytest.MonkeyPatch):
    """On a machine without a GPU, ``auto`` is the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [on_cpu(device) for device in ("auto", None, "cpu", "cuda", "cuda:1")] == [True, True, True, False, False]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [on_cpu(device) for device in ("auto", "cpu")] == [False, True]


def launched(folder: Path, processes: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    script = [str(ROOT / "scripts" / "benchmark.py"), "target=tiny", "strategies=[ngram]"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", str(ROOT / "conf/accelerate/cpu2.yaml"), "--num_processes", str(processes)]
    command = [*(launcher if processes > 1 else [sys.executable]), *script, *overrides]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def counted(folder: Path) -> dict[str, Any]:
    """Return a summary without its times."""
    summary = json.loads((folder / "summary.json").read_text())
    timed = ("speed", "second", "_ms", "memory")
    for entry in summary["strategies"]:
        for numbers in (entry, *entry["by_category"].values()):
            for name in [name for name in numbers if any(word in name for word in timed)]:
                del numbers[name]
    return {"strategies": summary["strategies"], "complete": summary["complete"], "prompts": summary["prompts"]}


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(tmp_path: Path):
    """One folder, whatever its time of day; the same counters, the same answers, nothing said twice."""
    options = ("prompts.limit=5", "max_new_tokens=12")
    done = launched(tmp_path, 2, *options, "hydra.run.dir=runs/${now:%H-%M-%S-%f}")
    assert done.returncode == 0, done.stderr
    (together,) = (tmp_path / "runs").iterdir()
    assert done.stdout.count("results:") == 1
    done = launched(tmp_path, 1, *options, "hydra.run.dir=alone")
    assert done.returncode == 0, done.stderr
    assert counted(together) == counted(tmp_path / "alone")
    names = {path.name for path in together.iterdir()}
    assert names == {path.name for path in (tmp_path / "alone").iterdir()}
    answers = [
        {
            (row["strategy"], row["question_id"], row["turn"]): row["output_ids"]
            for row in read_rows(run / "requests.jsonl")
        }
        for run in (together, tmp_path / "alone")
    ]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_mistake_ends_all_processes(tmp_path: Path):
    """In one sentence each, and at once."""
    done = launched(tmp_path, 2, "prompts.limit=1", "hydra.run.dir=run")
    assert done.returncode != 0
    assert "--num_processes=2" in done.stderr
