"""Heads that come with the package: complete, small, with their history, and no trace of where they were made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from specdec_lab.errors import InputError
from specdec_lab.heads import shipped
from specdec_lab.heads.shipped import MODELS, MOST_BYTES, ship, shipped_folder, without_folders

FOLDERS = sorted(
    folder
    for name in MODELS.values()
    for folder in shipped_folder("any", name).parent.iterdir()
    if (folder / "config.json").exists()
)


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("- /some/where/data/p.jsonl", "- data/p.jsonl"),
        ("- /p.jsonl", "- /p.jsonl"),
        ("- data/p.jsonl", "- data/p.jsonl"),
        ("- ../../a/b/p.jsonl", "- b/p.jsonl"),
        ("- ~/a/b/p.jsonl", "- b/p.jsonl"),
        ("model: owner/name", "model: owner/name"),
        ("_target_: specdec_lab.heads.x", "_target_: specdec_lab.heads.x"),
    ],
)
def test_paths_are_cut_and_names_are_not(path: str, kept: str):
    """A hub id is no path."""
    assert without_folders(path) == kept


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_shipped_head_tells_its_history(folder: Path):
    """Settings, data, training, what was measured; no folder of the machine that made it; a curve to look at."""
    facts = json.loads((folder / "config.json").read_text("utf-8"))
    facts = facts["facts"] if "facts" in facts else facts["specdec_lab"]["facts"]
    assert facts["trained_on"]["labels"] > 100_000
    assert facts["evaluation"]["real_acceptance_length"] > 1
    assert facts["data"]["sources"]
    assert facts["accuracy_by_rank"]
    config = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    assert config["data"]["responses"]
    assert sum(path.stat().st_size for path in folder.iterdir()) < MOST_BYTES + 1_000_000
    for path in (folder / "config.yaml", folder / "config.json"):
        assert not [word for word in path.read_text("utf-8").split() if word.strip("\"',").startswith("/")], path
    assert (folder / "training_curve.png").exists()


def test_shipping_copies_what_belongs_to_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights and history, without folders; a head that is too large is refused."""
    monkeypatch.setattr(shipped, "shipped_folder", lambda kind, name: tmp_path / "package" / name / kind)
    run = tmp_path / "run"
    (run / "head").mkdir(parents=True)
    (tmp_path / "package" / "some").mkdir(parents=True)
    (run / "head" / "model.safetensors").write_bytes(b"x")
    (run / "config.yaml").write_text("data:\n  responses:\n  - /home/somebody/data/r.jsonl\n")
    (run / "head" / "config.json").write_text('{"start": "/home/somebody/runs/first/head"}')
    place = ship(run, "eagle", "some")
    assert {path.name for path in place.iterdir()} == {"model.safetensors", "config.json", "config.yaml"}
    assert (place / "config.yaml").read_text() == "data:\n  responses:\n  - data/r.jsonl\n"
    assert (place / "config.json").read_text() == '{"start": "first/head"}'
    monkeypatch.setattr(shipped, "MOST_BYTES", 0)
    with pytest.raises(InputError, match="at most 0 are shipped"):
        ship(run, "eagle", "some")


def test_a_measurement_is_added_to_the_head_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A training without steps says what a head is worth; its history stays that of the training that made it."""
    monkeypatch.setattr(shipped, "shipped_folder", lambda kind, name: tmp_path / "package")

    def written(folder: Path, value: float, **facts: Any) -> None:
        folder.mkdir(parents=True)
        save_file({"w": torch.full((2,), value)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"specdec_lab": {"kind": "eagle", "facts": facts}}))

    written(tmp_path / "package", 1.0, optimizer_steps=7, accuracy_by_rank=[[0.1]])
    (tmp_path / "package" / "training_curve.csv").write_text("curve")
    measured = {"optimizer_steps": 0, "accuracy_by_rank": [[0.5]], "calibration": [[1.0, 0.4]], "data": {"texts": 3}}
    written(tmp_path / "run" / "head", 1.0, **measured)
    place = ship(tmp_path / "run", "eagle", "some")
    facts = json.loads((place / "config.json").read_text())["specdec_lab"]["facts"]
    assert facts == {
        "optimizer_steps": 7,
        "accuracy_by_rank": [[0.5]],
        "calibration": [[1.0, 0.4]],
        "measured_on": {"texts": 3},
    }
    assert (place / "training_curve.csv").read_text() == "curve"
    written(tmp_path / "other" / "head", 2.0, **measured)
    with pytest.raises(InputError, match="another head than the one that is shipped"):
        ship(tmp_path / "other", "eagle", "some")
