"""Finished trainings side by side: each row states its run, and a curve joins what differs in one thing alone."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from specdec_lab.distill.learning_curves import (
    PLOT,
    TABLE,
    TrainedHead,
    axes_to_draw,
    count_parameters,
    curves,
    learning_curves_main,
    read_training,
    settings_hash,
)
from specdec_lab.errors import InputError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two trainings on different amounts of the same answers."""
    folder = tmp_path_factory.mktemp("trainings")
    prompts = [{"question_id": number, "category": "talk", "turns": [f"question {number}"]} for number in range(20)]
    answers = [{"question_id": number, "response_ids": [*range(5, 17), 2], "finished": True} for number in range(20)]
    for name, rows in (("p.jsonl", prompts), ("r.jsonl", answers)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [sys.executable, str(ROOT / "scripts" / "train.py"), "target=tiny", "target.device=cpu", "head=medusa"]
    words += ["head.heads=2", "head.draft_vocab=null", "data.prompts=[p.jsonl]", "data.responses=[r.jsonl]", "epochs=2"]
    words += ["data.validation_share=0.2", "measure_prompts=0"]
    for name, limit in (("more", 130), ("less", 40)):
        overrides = [f"data.limit_tokens={limit}", f"hydra.run.dir={name}"]
        subprocess.run([*words, *overrides], cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    return [folder / "more", folder / "less"]


ONE = TrainedHead("a", "eagle", 5000, 65_000, 1.0, 65_000, 0.3, 1.4, None, "0a1b2c3d")


def test_a_curve_joins_what_differs_on_its_axis_alone():
    """Heads of more data and more epochs at once would show a slope that is neither's."""
    heads = [
        ONE,
        replace(ONE, run="b", response_tokens=250_000, simulated_acceptance_length=1.6),
        replace(ONE, run="c", epochs=4.0, simulated_acceptance_length=1.5),
        replace(ONE, run="d", parameters=9000, simulated_acceptance_length=1.45),
        replace(ONE, run="e", kind="eagle3", response_tokens=250_000, epochs=4.0, simulated_acceptance_length=1.9),
        replace(ONE, run="f", settings="ffffffff", response_tokens=1_000_000, simulated_acceptance_length=1.7),
    ]
    data, epochs, parameters = (curves(heads, axis) for axis in range(3))
    assert [(65_000, 1.4), (250_000, 1.6)] in data.values()
    assert [(1.0, 1.4), (4.0, 1.5)] in epochs.values()
    assert [(5000, 1.4), (9000, 1.45)] in parameters.values()
    assert all(len(found) == 5 for found in (data, epochs, parameters))
    assert all(sum(len(points) for points in found.values()) == 6 for found in (data, epochs, parameters))


def test_settings_are_told_where_a_kind_has_several():
    """Kinds always have settings of their own, so that each legend had a hash that told nothing."""
    heads = [ONE, replace(ONE, kind="medusa", settings="ffffffff"), replace(ONE, kind="medusa", settings="eeeeeeee")]
    names = sorted(curves(heads, 0))
    assert names[0] == "eagle: 1 epoch, 5,000 parameters"
    assert names[1:] == [f"medusa: 1 epoch, 5,000 parameters, settings {hashed * 8}" for hashed in "ef"]


def test_only_axes_with_a_slope_are_drawn():
    """Legends of single points covered the panels."""
    more = replace(ONE, response_tokens=250_000)
    assert axes_to_draw([ONE, more]) == [0]
    assert axes_to_draw([ONE, replace(ONE, epochs=4.0), replace(ONE, parameters=9)]) == [1, 2]
    assert axes_to_draw([ONE, ONE]) == [0]


def test_a_head_without_a_real_length_has_no_point_there():
    """``measure_prompts=0`` measures none."""
    heads = [ONE, replace(ONE, response_tokens=250_000, real_acceptance_length=1.5)]
    assert list(curves(heads, 0, 1).values()) == [[(250_000, 1.5)]]


def test_settings_are_all_that_is_no_axis():
    """Trainings with two learning rates were joined into one curve."""
    told = {"learning_rate": 0.1, "seed": 0, "epochs": 1, "examples_sha256": "a", "head": {"copying": 1.0, "heads": 2}}
    assert settings_hash(told) == settings_hash({**told, "epochs": 4, "examples_sha256": "b", "seed": 1})
    assert settings_hash(told) == settings_hash({**told, "head": {"copying": 1.0, "heads": 4}})
    assert settings_hash(told) != settings_hash({**told, "learning_rate": 0.2})
    assert settings_hash(told) != settings_hash({**told, "head": {"copying": 0.0, "heads": 2}})


def test_parameters_are_those_of_the_weights(tmp_path: Path):
    """Whole numbers in the file, as a draft vocabulary's, are no parameters."""
    path = tmp_path / "model.safetensors"
    tensors = {"layer": torch.zeros(3, 4), "norm": torch.zeros(5, dtype=torch.bfloat16), "d2t": torch.zeros(7).long()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert count_parameters(path) == 3 * 4 + 5


def test_a_folder_without_a_finished_training_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One sentence with the folder and the remedy, and nothing is written."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"head": {"_target_": "specdec_lab.absent.Learner"}}))
    with pytest.raises(InputError, match="no folder of a finished training"):
        read_training(tmp_path)
    assert learning_curves_main([str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    assert str(tmp_path) in shown.err.replace("\n", "")
    assert "Traceback" not in shown.err
    assert not (tmp_path / "out").exists()


def test_the_table_has_a_row_per_training_and_the_plot_is_drawn(tmp_path: Path, trained_runs: list[Path]):
    """From real run folders: what the head's own facts and history say."""
    assert learning_curves_main([*map(str, trained_runs), "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / TABLE).read_text().splitlines()))
    assert [row["kind"] for row in rows] == ["medusa", "medusa"]
    assert int(rows[0]["response_tokens"]) < int(rows[1]["response_tokens"])
    assert {float(row["epochs"]) for row in rows} == {2.0}
    assert all(int(row["labels"]) == 2 * int(row["response_tokens"]) for row in rows)
    assert all(float(row["simulated_acceptance_length"]) >= 1 for row in rows)
    assert (tmp_path / PLOT).read_bytes().startswith(b"\x89PNG")
