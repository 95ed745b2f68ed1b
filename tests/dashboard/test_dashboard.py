"""The dashboard is built without a network or a key, and asks for keys that runs really have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compared_runs import THREE, made_run
from script_runs import run_script

from specdec_lab.bench.columns import scalars
from specdec_lab.bench.records import read_rows
from specdec_lab.dashboard.build import comparison_report, comparison_workspace, report_json, workspace_json
from specdec_lab.dashboard.command import dashboard_main
from specdec_lab.dashboard.panels import BAR_SECTIONS, COLUMNS, LENGTH, RATE, SPEEDUP, TABLES, TRAINING_LINES, Where
from specdec_lab.tracking import TrackingSettings, track_summary

ROOT = Path(__file__).parents[2]
WHERE = Where("a-team", "a-project", ("first", "second"))


@pytest.fixture
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def inspected(folder: Path) -> dict:
    """Return configuration and summary of an offline run, as W&B's own tool reads them."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--summary", "--json", str(folder)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_every_metric_is_one_that_runs_have(tmp_path: Path):
    """A panel over a key that nothing logs stays empty and looks like a result."""
    folder = made_run(tmp_path / "run", THREE)
    summary, rows = json.loads((folder / "summary.json").read_text()), read_rows(folder / "requests.jsonl")
    folders = track_summary(summary, rows, {}, TrackingSettings(), folder)
    wanted = {SPEEDUP, LENGTH, RATE, *COLUMNS, *(name for bars in BAR_SECTIONS.values() for name in bars)}
    drafting = inspected(folders[1])
    assert wanted <= set(drafting["summary"]), wanted - set(drafting["summary"])
    assert set(TABLES) <= set(drafting["summary"])
    assert drafting["config"]["strategy"] == "ngram"
    by_name = dict(scalars(summary["strategies"][1]))
    assert drafting["summary"][SPEEDUP] == pytest.approx(by_name[SPEEDUP])


@pytest.mark.usefixtures("_no_server")
def test_workspace_has_every_panel():
    """Sections, metrics, the group by strategy and the filter by group are in what would be sent."""
    text = json.dumps(workspace_json(comparison_workspace(WHERE)))
    for name in (
        *BAR_SECTIONS,
        *TRAINING_LINES,
        *TABLES,
        "first",
        "second",
        "strategy",
        "jobType",
        "benchmark",
        "train",
    ):
        assert name in text, name
    for bars in BAR_SECTIONS.values():
        assert all(metric in text for metric in bars)


@pytest.mark.usefixtures("_no_server")
def test_report_has_every_panel():
    """The same panels, from top to bottom, and the sentence about the bonus token."""
    text = json.dumps(report_json(comparison_report(WHERE)))
    for name in (*BAR_SECTIONS, *TRAINING_LINES, *TABLES, "bonus token"):
        assert name in text, name


@pytest.mark.usefixtures("_no_server")
def test_the_command_builds_without_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two files of JSON; again into the same folder is no mistake."""
    for _ in range(2):
        assert dashboard_main(["--entity", "a-team", "--out", str(tmp_path / "out")]) == 0
    assert "workspace.json" in capsys.readouterr().out
    for name in ("workspace.json", "report.json"):
        assert json.loads((tmp_path / "out" / name).read_text())


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--project", "p"], "--entity=None: name the user or team"),
        (["--entity", "e", "--publish"], "WANDB_API_KEY=None: publishing needs a key"),
        (["--entity", "e", "--out", "FILE/x"], "--out="),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Refused with exit code 1, before anything is sent."""
    (tmp_path / "file").write_text("")
    assert dashboard_main([word.replace("FILE", str(tmp_path / "file")) for word in words]) == 1
    assert sentence in capsys.readouterr().err.replace("\n", " ")


def test_the_script_without_its_library_says_what_to_install(tmp_path: Path):
    """A stand-in that cannot be imported takes the library's place."""
    broken = tmp_path / "wandb_workspaces"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('not here')\n")
    done = run_script(tmp_path, "publish_dashboard.py", "--entity", "e", path=tmp_path)
    assert done.returncode == 1
    assert "specdec-lab[dashboards]" in done.stderr
    assert "Traceback" not in done.stderr
