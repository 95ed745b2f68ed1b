"""Offline W&B runs hold the summary's numbers, and a tracker's trouble costs the benchmark nothing."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from specdec_lab.bench import metrics
from specdec_lab.bench.columns import scalars
from specdec_lab.errors import InputError
from specdec_lab.tracking import (
    HIDDEN,
    TrackingSettings,
    check_tracking,
    run_config,
    track_summary,
    tracking_settings,
)

FAKE_KEY = "a" * 40

DRIVER = """
import json, logging, os, sys, time
from pathlib import Path
from specdec_lab import tracking
from specdec_lab.errors import SpecdecError

class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

tracking.INIT_TIMEOUT = 1.0
tracking.log.addHandler(Kept(logging.WARNING))
outcomes = {}
for name, case in json.load(sys.stdin).items():
    said, folders, refused = [], [], None
    os.environ.update(case["env"])
    settings = tracking.TrackingSettings(**case["settings"])
    start = time.monotonic()
    try:
        run_dir = Path(case["run_dir"])
        folders = tracking.track_summary(case["summary"], case["rows"], case["config"], settings, run_dir)
    except SpecdecError as error:
        refused = str(error)
    seconds = time.monotonic() - start
    outcomes[name] = {"folders": list(map(str, folders)), "refused": refused, "said": said, "seconds": seconds}
    for key in case["env"]:
        del os.environ[key]
print(json.dumps(outcomes))
"""


def request_row(strategy: str, question: int | str, accepted: list[int], seconds: float) -> dict[str, Any]:
    """A successful row whose trees are all four deep."""
    rounds = len(accepted)
    parts = dict.fromkeys(metrics.TIME_PARTS, seconds / len(metrics.TIME_PARTS))
    return {
        "strategy": strategy, "question_id": question, "category": "maths", "turn": 0, "repeat": 0, "status": "ok",
        "error": None, "finish_reason": "length", "exact": "identical", "text": "", "prompt_ids": [1, 2],
        "output_ids": [5] * (1 + sum(accepted) + rounds), "accepted_per_round": accepted,
        "bonus_per_round": [1] * rounds, "proposed_per_round": [4 if strategy != "autoregressive" else 0] * rounds,
        "proposed_nodes_per_round": [4 if strategy != "autoregressive" else 0] * rounds,
        "round_seconds": [seconds / rounds] * rounds, "decode_elapsed_seconds": seconds,
        "time_seconds": {**parts, "total": sum(parts.values())}, "altered_per_round": None,
    }  # fmt: skip


def failed_row(strategy: str) -> dict[str, Any]:
    empty = {"accepted_per_round": [], "bonus_per_round": [], "output_ids": [], "finish_reason": None, "exact": None}
    return {**request_row(strategy, "long", [0], 1.0), **empty, "status": "failed", "error": "the prompt is too long"}


def entry_of(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["status"] == "ok"]
    speedup = {"ratio_of_totals": 1.37, "mean_of_ratios": 1.4, "ci95": [1.2, 1.5], "baseline": "autoregressive"}
    nowhere = dict.fromkeys(("ratio_of_totals", "mean_of_ratios", "ci95"))
    return {
        "name": name, "config": {"k": 4, "token": "sesame"}, "lossless": True, "requests": len(rows),
        "failed": len(rows) - len(good), **metrics.counters(good), "speedup": speedup,
        "speedup_end_to_end": {**nowhere, "baseline": "autoregressive"},
        "memory_bytes": {"target_weights": 10, "draft_weights": 0, "target_kv": 7, "draft_kv": 0, "peak": None},
        "exactness": {"compared": 2, "identical": 2, "ties": 0, "different": 0, "examples": []},
        "by_category": {"maths": metrics.counters(good)},
    }  # fmt: skip


def benchmark(*strategies: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A summary and its rows: three requests per strategy, one of them failed."""
    rows = [
        row
        for at, name in enumerate(strategies)
        for row in (
            request_row(name, 1, [0, 2, 4] if at else [0, 0, 0], 0.3 + at),
            failed_row(name),
            request_row(name, "two", [1] if at else [0], 0.17),
        )
    ]
    summary = {
        "schema_version": 3, "complete": True, "created": "2030-01-02T03:04:05Z", "git_sha": None,
        "versions": {"torch": "2"}, "machine": {"cpu": "x", "threads": 2, "gpu": None},
        "target": {"name": "tiny", "model": None, "revision": None, "dtype": "float32", "parameters": 9,
                   "weight_bytes": 36},
        "prompts": {"source": "own", "sha256": "0", "count": 3, "turns": 3},
        "sampling": {"temperature": 0.0}, "exact": "off", "acceptance": "rejection",
        "strategies": [entry_of(name, [row for row in rows if row["strategy"] == name]) for name in strategies],
    }  # fmt: skip
    return summary, rows


@cache
def without_network() -> list[str]:
    """The command that runs another one in an empty network namespace, where the machine allows that."""
    unshare = shutil.which("unshare")
    if unshare and subprocess.run([unshare, "-rn", "true"], capture_output=True, check=False).returncode == 0:
        return [unshare, "-rn"]
    return []


@dataclass(frozen=True)
class Case:
    """What one call of the tracker is given."""

    strategies: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=lambda: {"seed": 0})
    env: dict[str, str] = field(default_factory=dict)
    broken: str | None = None

    def inputs(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        summary, rows = benchmark(*self.strategies)
        for entry in summary["strategies"]:
            if entry["name"] == self.broken:
                del entry["acceptance_by_depth"]
        return summary, rows


CASES = {
    "two": Case(("autoregressive", "ngram"), {"tags": ["demo"]}),
    "middle_fails": Case(("autoregressive", "ngram", "ngram_tree"), broken="ngram"),
    "secrets": Case(
        ("autoregressive",),
        config={"target": {"hf_token": "open-sesame-1"}, "note": "made with open-sesame-2", "max_new_tokens": 64},
        env={"HF_TOKEN": "open-sesame-2"},
    ),
    "online_without_key": Case(("autoregressive",), {"mode": "online"}),
    "online_without_network": Case(("autoregressive", "ngram"), {"mode": "online"}, env={"WANDB_API_KEY": FAKE_KEY}),
}
"""All run in one process, one after the other; a key stays known to it, so the case that has one comes last."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    run_dir: Path
    folders: list[Path]
    refused: str | None
    said: list[str]
    seconds: float


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcome of every case; no process of theirs is alive any more, and no traceback was shown."""
    home = tmp_path_factory.mktemp("home")
    given, run_dirs = {}, {}
    for name, case in CASES.items():
        run_dirs[name] = home / name / "demo"
        run_dirs[name].mkdir(parents=True)
        summary, rows = case.inputs()
        given[name] = {"summary": summary, "rows": rows, "run_dir": str(run_dirs[name]), "config": case.config}
        given[name] |= {"settings": case.settings, "env": case.env}
    if not without_network():
        del given["online_without_network"]
    done = run_alone([sys.executable, "-c", DRIVER], home, json.dumps(given))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    for outcome in found.values():
        outcome["folders"] = [Path(folder) for folder in outcome["folders"]]
    return {name: Outcome(run_dirs[name], **outcome) for name, outcome in found.items()}


def run_alone(command: list[str], home: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run without a network and without W&B's variables; nothing that it started may outlive it."""
    marker = uuid.uuid4().hex
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [*without_network(), *command],
        input=given,
        env={**clean, "HOME": str(home), "SPECDEC_TEST_MARKER": marker},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert not list(alive(marker))
    return done


def alive(marker: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("SPECDEC_TEST_MARKER") == marker:
                yield process
        except psutil.Error:  # it ended, or belongs to someone else
            continue


def inspect(folder: Path, *options: str) -> str:
    """W&B's own reader of a run's log."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, "--json", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def overview(folder: Path) -> dict[str, Any]:
    return json.loads(inspect(folder, "--summary"))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in inspect(folder).splitlines()]


def table(folder: Path, key: str) -> dict[str, Any]:
    (path,) = (folder / "files" / "media" / "table").glob(f"{key}_*.table.json")
    return json.loads(path.read_text())


def test_each_strategy_becomes_one_offline_run_with_the_numbers_of_the_summary(outcomes: dict[str, Outcome]) -> None:
    """Guards TK-02 and TK-05: no network is needed, nothing hangs, rows keep their own step axis, none is lost."""
    summary, rows = CASES["two"].inputs()
    outcome = outcomes["two"]
    folders = outcome.folders
    assert outcome.said == []
    assert outcome.seconds < 30
    assert sorted((outcome.run_dir / "wandb").glob("offline-run-*")) == sorted(folders)
    for folder, entry in zip(folders, summary["strategies"], strict=True):
        seen = overview(folder)
        assert (seen["exit_code"], seen["state"], seen["name"]) == (0, "finished", entry["name"])
        assert seen["config"]["strategy"] == entry["name"]
        assert seen["config"]["target"]["name"] == "tiny"
        assert seen["config"]["settings"] == {"seed": 0}
        expected = {name: value for name, value in scalars(entry) if value is not None}
        assert len(expected) > 30
        assert {name: seen["summary"].get(name) for name in expected} == expected
        found = records(folder)
        run = next(record["run"] for record in found if record["type"] == "run")
        assert (run["run_group"], run["job_type"]) == ("demo-2030-01-02T03:04:05Z", "benchmark")
        assert run["tags"] == ["demo"]

        own = [row for row in rows if row["strategy"] == entry["name"]]
        history = [record["history"]["item"] for record in found if record["type"] == "history"]
        logged = [item for item in history if "request_index" in item]
        assert [item["request_index"] for item in logged] == [0, 1, 2]
        assert [item["request/failed"] for item in logged] == [0, 1, 0]
        good = [item for item in logged if not item["request/failed"]]
        assert sum(item["request/output_tokens"] for item in good) == entry["output_tokens"]
        assert sum(item["request/rounds"] for item in good) == entry["rounds"]
        requests = table(folder, "requests")
        assert [line[0] for line in requests["data"]] == [str(row["question_id"]) for row in own]
        lengths = [line[requests["columns"].index("mean_acceptance_length")] for line in requests["data"]]
        assert lengths == [metrics.mean_acceptance_length([row]) for row in own]
        histogram = table(folder, "accepted_histogram")["data"]
        assert [line[1] for line in histogram] == entry["accepted_histogram"]
    depths = table(folders[1], "acceptance_by_depth")["data"]
    by_depth = summary["strategies"][1]["acceptance_by_depth"]
    assert [line[1] for line in depths] == by_depth["offered"]
    assert [line[2] for line in depths] == by_depth["joint"]
    assert [line[3] for line in depths] == by_depth["conditional"]


def test_a_strategy_that_cannot_be_logged_does_not_stop_the_others(outcomes: dict[str, Outcome]) -> None:
    """Guards TK-01: three runs in one process, the middle one fails; each keeps its own configuration and end."""
    outcome = outcomes["middle_fails"]
    assert len(outcome.folders) == 2
    assert outcome.said == ["W&B has no full run of ngram (KeyError: 'acceptance_by_depth'); the files are complete."]
    seen = [overview(folder) for folder in (outcome.run_dir / "wandb").glob("offline-run-*")]
    ends = {one["config"]["strategy"]: (one["state"], one["exit_code"]) for one in seen}
    assert ends == {"autoregressive": ("finished", 0), "ngram": ("failed", 1), "ngram_tree": ("finished", 0)}


def test_online_without_a_key_is_refused_at_once(outcomes: dict[str, Outcome]) -> None:
    """Guards TK-05: no prompt and no wait; the sentence names the field and what to do."""
    outcome = outcomes["online_without_key"]
    assert outcome.refused is not None
    assert outcome.refused.startswith("tracking.mode='online': no API key is configured; set WANDB_API_KEY")
    assert outcome.seconds < 10
    assert not list(outcome.run_dir.iterdir())


@pytest.mark.skipif(not without_network(), reason="needs an empty network namespace")
def test_runs_are_kept_offline_when_the_server_cannot_be_reached(outcomes: dict[str, Outcome]) -> None:
    """Guards TK-05: one bounded wait in all, one warning, and every run on disk with its numbers."""
    outcome = outcomes["online_without_network"]
    assert [sentence[:25] for sentence in outcome.said] == ["W&B cannot be reached (Co"]
    assert [overview(folder)["summary"]["rounds"] for folder in outcome.folders] == [4, 4]


def test_secrets_reach_no_file(outcomes: dict[str, Outcome]) -> None:
    """A key in the configuration or the environment must not end up in a run that is shared."""
    outcome = outcomes["secrets"]
    (folder,) = outcome.folders
    assert overview(folder)["config"]["settings"] == {
        "target": {"hf_token": HIDDEN},
        "note": f"made with {HIDDEN}",
        "max_new_tokens": 64,
    }
    written = b"".join(path.read_bytes() for path in outcome.run_dir.rglob("*") if path.is_file())
    assert len(written) > 1000
    assert b"sesame" not in written


def test_a_forced_run_id_is_refused_for_more_than_one_strategy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards TK-01: WANDB_RUN_ID would put all strategies into one run."""
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    check_tracking(TrackingSettings(), ["autoregressive"])
    summary, rows = benchmark("autoregressive", "ngram")
    with pytest.raises(InputError, match=r"WANDB_RUN_ID='mine': it would put 2 strategies into one run"):
        track_summary(summary, rows, {}, TrackingSettings(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_disabled_tracking_writes_nothing(tmp_path: Path) -> None:
    """WANDB_MODE=disabled is honoured."""
    assert track_summary(*benchmark("autoregressive", "ngram"), {}, TrackingSettings(mode="disabled"), tmp_path) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "bogus"}, r"tracking\.mode='bogus'"),
        ({"projekt": "x"}, r"tracking\.projekt='x'"),
        ({"project": ""}, r"tracking\.project=''"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tracking_settings(values)


def test_the_shipped_configurations_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards TK-05: offline is the default, and the environment's word is heard."""
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        monkeypatch.delenv("WANDB_MODE", raising=False)
        assert tracking_settings(composed("wandb")) == TrackingSettings()
        assert tracking_settings(composed("none")) is None
        monkeypatch.setenv("WANDB_MODE", "disabled")
        found = tracking_settings(composed("wandb"))
    assert found is not None
    assert found.mode == "disabled"


def composed(option: str) -> dict[str, Any]:
    values = OmegaConf.to_container(compose(overrides=[f"+tracking={option}"]), resolve=True)
    assert isinstance(values, dict)
    return values.get("tracking", {})


def test_the_configuration_of_a_run_is_plain() -> None:
    """W&B refuses OmegaConf containers, so none may be left at any depth."""
    summary, _ = benchmark("ngram")
    config = OmegaConf.to_container(OmegaConf.create({"drafter": {"ngram": {"k": [1, 2]}}}))
    assert isinstance(config, dict)
    found = run_config(summary, summary["strategies"][0], {str(k): v for k, v in config.items()})
    assert json.loads(json.dumps(found)) == found
    assert found["strategy_config"] == {"k": 4, "token": HIDDEN}


def test_the_benchmark_tracks_what_it_writes(tmp_path: Path) -> None:
    """Guards TK-05: the whole command without a network; both runs say what summary.json and summary.csv say."""
    run_dir = tmp_path / "run"
    script = str(Path(__file__).resolve().parents[1] / "scripts" / "benchmark.py")
    overrides = ["target=tiny", "tracking=wandb", "strategies=[ngram]", "prompts.limit=2", "max_new_tokens=8"]
    done = run_alone([sys.executable, script, *overrides, f"hydra.run.dir={run_dir}"], tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    entries = {entry["name"]: entry for entry in summary["strategies"]}
    with (run_dir / "summary.csv").open(newline="") as stream:
        columns = {line["name"]: {name for name, value in line.items() if value} for line in csv.DictReader(stream)}
    seen = {one["config"]["strategy"]: one for one in map(overview, (run_dir / "wandb").glob("offline-run-*"))}
    assert set(seen) == set(entries) == {"autoregressive", "ngram"}
    for name, run in seen.items():
        expected = {field: value for field, value in scalars(entries[name]) if value is not None}
        assert expected.keys() == columns[name]
        assert {field: run["summary"].get(field) for field in expected} == expected
        assert run["config"]["settings"]["max_new_tokens"] == 8
        assert run["exit_code"] == 0


@pytest.mark.slow
def test_a_tracked_sweep_is_one_group_of_runs(tmp_path: Path) -> None:
    """Guards TK-01 and TK-04: n jobs are n runs of each strategy, also when one job fails; all in the sweep's group."""
    script = str(Path(__file__).resolve().parents[1] / "scripts" / "benchmark.py")
    overrides = ["target=tiny", "tracking=wandb", "strategies=[ngram]", "prompts.limit=1", "max_new_tokens=4"]
    sweep = ["-m", "drafter.ngram.k=4,0,8", f"hydra.sweep.dir={tmp_path / 'depths'}"]
    done = run_alone([sys.executable, script, *overrides, *sweep], tmp_path)
    assert done.returncode == 1, done.stderr
    assert "drafter.ngram.k=0" in done.stderr
    folders = list((tmp_path / "depths").glob("*/wandb/offline-run-*"))
    seen = [overview(folder) for folder in folders]
    found = Counter((one["name"], one["config"].get("strategy_config", {}).get("k"), one["exit_code"]) for one in seen)
    assert found == {("autoregressive", None, 0): 2, ("ngram", 4, 0): 1, ("ngram", 8, 0): 1}
    starts = [record["run"] for folder in folders for record in records(folder) if "run" in record]
    assert {start["run_group"] for start in starts} == {"depths"}
    assert len({start["run_id"] for start in starts}) == 4
