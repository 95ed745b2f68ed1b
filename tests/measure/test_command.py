"""The measurements run whole on the tiny target and write what they print."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from script_runs import run_script

ROOT = Path(__file__).parents[2]


def measure(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_script(folder, "measure.py", "target=tiny", "threads=1", *overrides)


def figures_of(folder: Path, *parts: str) -> dict[str, Any]:
    options = ("prompts.limit=3", "alternations=2", "max_new_tokens=4", "hydra.run.dir=out")
    done = measure(folder, *options, f"parts=[{','.join(parts)}]")
    assert done.returncode == 0, done.stderr
    figures = {path.stem: json.loads(path.read_text("utf-8"))["figures"] for path in (folder / "out").glob("*.json")}
    assert set(figures) == set(parts)
    return figures


def test_short_parts_run_and_write_their_figures(tmp_path: Path) -> None:
    figures = figures_of(
        tmp_path, "exactness", "generate", "memory", "acceptance", "lookahead", "strategies", "batches"
    )
    for chain in figures["acceptance"]:
        assert chain["block"] >= 0
        assert 0 <= chain["rejection"] <= 4
        assert abs(chain["root_rejected"] - (1 - chain["overlap"])) < 5 * (0.25 / 200) ** 0.5  # the identity
    assert "<svg" in (tmp_path / "out" / "acceptance.svg").read_text("utf-8")
    assert {one["strategy"] for one in figures["lookahead"]} >= {"autoregressive", "all", "window alone"}
    assert {one["batch_size"] for one in figures["batches"]} == {1, 2, 4, 8}
    assert all(one["acceptance_length"] == 1 for one in figures["strategies"] if one["strategy"] == "autoregressive")
    assert figures["memory"]["buffers_stayed"] is True
    assert all(count["identical"] == count["compared"] for count in figures["exactness"]["identity"])  # float32
    assert figures["exactness"]["largest_margin_move_logits"]["high"] < 1e-4
    assert len(figures["generate"]["tokens_per_second"]["ours"]) == 2


@pytest.mark.slow
def test_long_parts_run_and_write_their_figures(tmp_path: Path) -> None:
    figures = figures_of(tmp_path, "attention", "lookup", "long_lookup", "growth", "sampling")
    assert {cost["history"] for cost in figures["sampling"]} == {128, 4096}
    assert {entry["nodes"] for entry in figures["attention"]} == {1, 8, 16, 32}
    assert {cost["strategy"] for cost in figures["growth"]} == {"autoregressive", "ngram"}
    assert set(figures["long_lookup"]) == {"1024", "2048", "4096"}


def test_a_wrong_part_is_refused(tmp_path: Path) -> None:
    done = measure(tmp_path, "parts=[speed]")
    assert done.returncode == 1
    assert "parts" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_strategy_that_is_not_there_is_named_as_it_was_given(tmp_path: Path) -> None:
    done = measure(tmp_path, "parts=[strategies]", "strategies=[ngramm]")
    assert done.returncode == 1
    assert "strategies='ngramm': there is no strategy of that name (did you mean ngram?)" in done.stderr
