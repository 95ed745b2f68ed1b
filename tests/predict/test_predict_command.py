"""The prediction as a user meets it: files, picture, and mistakes in one sentence."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from compared_runs import BASELINE, THREE, made_run
from hydra import compose, initialize_config_module
from script_runs import run_script

from specdec_lab.command import plain_config
from specdec_lab.errors import InputError
from specdec_lab.predict.settings import PredictSettings, plan_prediction

ROOT = Path(__file__).parents[2]


def planned(*overrides: str):
    with initialize_config_module("specdec_lab.conf.predict", version_base="1.3"):
        return plan_prediction(plain_config(compose("predict", overrides=list(overrides))))


def test_file_states_every_setting_with_its_default(tmp_path: Path):
    """A file and its model cannot drift apart."""
    folder = made_run(tmp_path / "run", THREE)
    assert planned(f"run={folder}").settings == PredictSettings(run=str(folder))


def test_elsewhere(tmp_path: Path):
    """Nothing is loaded; every strategy at every place, the same numbers in both files, and a picture."""
    made_run(tmp_path / "run", THREE)
    done = run_script(
        tmp_path, "predict.py", "run=run", "hardware=h200", "target=llama3_70b", "draft=llama3_1b",
        "batch_sizes=[1,8]", "contexts=[1024,4096]", "hydra.run.dir=out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Assumed" in done.stdout
    points = json.loads((tmp_path / "out" / "prediction.json").read_text())["predictions"]
    assert len(points) == 2 * 2 * 2
    assert {one["devices"] for one in points} == {2}  # 141.1 GB of weights alone are too much for one
    lines = list(csv.DictReader((tmp_path / "out" / "prediction.csv").open()))
    assert [float(line["speedup"]) for line in lines] == [one["speedup"] for one in points]
    assert (tmp_path / "out" / "prediction.svg").read_text().count("<svg") == 1


def test_here(tmp_path: Path):
    """A real run of the tiny target, whose forwards are measured again."""
    words = ("target=tiny", "target.device=cpu", "strategies=[ngram]", "prompts.limit=2", "max_new_tokens=16")
    done = run_script(tmp_path, "benchmark.py", *words, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    done = run_script(tmp_path, "predict.py", "run=run", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    (one,) = json.loads((tmp_path / "out" / "prediction.json").read_text())["predictions"]
    assert one["strategy"] == "ngram"
    assert one["predicted_speedup"] > 0
    assert one["predicted_over_measured"] == pytest.approx(one["predicted_speedup"] / one["measured_speedup"])
    assert (tmp_path / "out" / "prediction.svg").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "run=None: give the folder"),
        (["run=absent"], "run='absent': there is no such folder"),
        (
            ["run=RUN", "hardware=h300", "target=llama3_8b"],
            r"hardware='h300': .*conf/predict/machines/.*a100, h100, h200",
        ),
        (["run=RUN", "hardware=h200"], "target=None: hardware=h200 needs one; choose from llama3_1b"),
        (["run=RUN", "target=llama3_8b"], "target='llama3_8b': hardware=here measures the run's own models"),
        (["run=RUN", "hardware=h200", "target={layers:3}"], "target.parameters=None: field required"),
        (["run=RUN", "batch_sizes=[0]"], "batch_sizes.0=0: "),
        (["run=RUN", "contexts=[]"], "contexts="),
        (["run=RUN", "overhead_ms=-1"], "overhead_ms=-1"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, overrides: list[str], sentence: str):
    """Field, value and remedy."""
    folder = made_run(tmp_path / "run", THREE)
    with pytest.raises(InputError, match=sentence):
        planned(*(word.replace("RUN", str(folder)) for word in overrides))


def test_a_run_without_drafts_is_refused(tmp_path: Path):
    """Nothing to project."""
    made_run(tmp_path / "run", {"autoregressive": BASELINE})
    done = run_script(tmp_path, "predict.py", "run=run", "hardware=h200", "target=llama3_8b", "hydra.run.dir=out")
    assert done.returncode == 1
    assert "none of its strategies drafted" in done.stderr
    assert "Traceback" not in done.stderr
