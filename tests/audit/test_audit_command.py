"""The audit as a user runs it: on a shipped strategy, on a lossy rule, on a strategy of one's own that is wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from script_runs import run_script
from strategies_at_hand import disturbed_copy

from specdec_lab.audit.command import plan_audit
from specdec_lab.errors import InputError
from specdec_lab.targets.tiny import load_tiny

ROOT = Path(__file__).parents[2]

CHEAT = '''
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.tree import DraftTree
import torch


class CheatDrafter(Drafter):
    """Picks token 0 and says that it drew it from a law that it did not."""

    draws = True

    def __init__(self, target):
        super().__init__(target, max_nodes=2)

    def propose(self, context: DraftContext) -> DraftTree:
        law = torch.zeros(2, self.target.vocab_size)
        law[:, :3] = 1 / 3
        return DraftTree((context.tokens[-1], 0), (-1, 0), law)
'''


def run(folder: Path, *overrides: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_script(folder, "audit.py", "hydra.run.dir=out", *overrides, path=path)


SMALL = ("target=tiny", "cases=1", "prompts.limit=2", "max_new_tokens=10", "batch_size=2")


def certificate(folder: Path, name: str, rule: str = "rejection") -> dict[str, Any]:
    return json.loads((folder / "out" / f"{name}.{rule}.certificate.json").read_text("utf-8"))


def test_a_lossless_strategy_gets_its_certificate(tmp_path: Path):
    done = run(tmp_path, "drafter=ngram", "drafter.branches=3", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = certificate(tmp_path, "ngram")
    assert found["verdict"] == "lossless"
    assert found["config"]["branches"] == 3
    assert found["rules"][0]["laws"] == 9
    assert found["rules"][0]["largest_total_variation"] < 1e-12
    assert found["toy_targets"]["laws"] == 5
    assert found["toy_targets"]["largest_total_variation"] < 1e-12
    assert found["toy_targets"]["skipped"] is None
    assert [check["identical"] for check in found["texts"]] == [2] * 8
    assert found["drawn_drafts"] is None
    assert "ngram, acceptance=rejection: lossless" in done.stdout
    assert done.stdout.count("2 identical") == 8


def test_a_lossy_rule_is_called_lossy(tmp_path: Path):
    done = run(tmp_path, "drafter=ngram", "acceptance=typical", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = certificate(tmp_path, "ngram", "typical")
    assert found["verdict"] == "lossy"
    assert found["rules"][0]["largest_total_variation"] > 0.1
    assert found["toy_targets"]["largest_total_variation"] > 0.01


def test_a_wrong_strategy_of_ones_own_fails(tmp_path: Path):
    """Guards LC-01 and LC-12: the draft law is not the one that the token was drawn from."""
    own = tmp_path / "own"
    (own / "drafter").mkdir(parents=True)
    (own / "cheat.py").write_text(CHEAT)
    (own / "drafter" / "cheat.yaml").write_text("_target_: cheat.CheatDrafter\n")
    done = run(tmp_path, "drafter=cheat", f"hydra.searchpath=[file://{own}]", *SMALL, path=own)
    assert done.returncode == 3, done.stdout + done.stderr
    found = certificate(tmp_path, "cheat")
    assert found["verdict"] == "failed"
    assert {part["siblings"] for part in found["rules"]} == {"with_replacement", "without_replacement"}
    assert all(part["largest_total_variation"] < 1e-12 for part in found["rules"]), "the rule itself is right"
    assert found["toy_targets"]["largest_total_variation"] > 0.01
    assert found["drawn_drafts"]["p_value"] < 1e-6, "the real target shows it too"
    assert "failed" in done.stdout


def test_a_mistake_is_one_sentence(tmp_path: Path):
    """Through a real shell: no traceback, and what there is to choose from."""
    done = run(tmp_path)
    assert done.returncode == 1
    assert "You must specify 'drafter'" in done.stderr
    assert "ngram" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["drafter.k=0"], "drafter.k=0"),
        (["+drafter.q=0"], "drafter.q=0: there is no field"),
        (["acceptance=lucky"], "acceptance='lucky'"),
        (["cases=0"], "cases=0"),
        (["max_new_tokens=1"], "max_new_tokens=1"),
        (["typical.epsilon=2"], "typical.epsilon=2"),
        (["prompts.path=/no/such/file"], "/no/such/file"),
        (["target.dtype=int3"], "target.dtype='int3'"),
    ],
)
def test_wrong_input_is_named_before_a_model_is_loaded(overrides: list[str], sentence: str):
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        config = compose("audit", overrides=["drafter=ngram", "target=tiny", *overrides])
    with pytest.raises(InputError, match=sentence):
        plan_audit(OmegaConf.to_container(config, resolve=True), "ngram")  # type: ignore[arg-type]


def test_a_strategy_that_raises_is_one_sentence(tmp_path: Path):
    """It is named, with what it said; where it happened is shown if asked for."""
    own = tmp_path / "own"
    (own / "drafter").mkdir(parents=True)
    (own / "cheat.py").write_text(CHEAT.replace("law = torch", "raise KeyError('oops')\n        law = torch"))
    (own / "drafter" / "cheat.yaml").write_text("_target_: cheat.CheatDrafter\n")
    done = run(tmp_path, "drafter=cheat", f"hydra.searchpath=[file://{own}]", *SMALL, path=own)
    assert done.returncode == 1
    assert "error: cheat: KeyError: 'oops' (SPECDEC_LAB_TRACEBACK=1 shows where)" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_few_drawn_drafts_prove_nothing(tmp_path: Path):
    """A draft model cannot be made for a toy, so its drafts on the real target have to speak for it."""
    draft = str(disturbed_copy(load_tiny(device="cpu"), tmp_path))
    few = run(tmp_path, "drafter=draft_model", f"drafter.model={draft}", *SMALL, "max_new_tokens=4")
    assert few.returncode == 3, few.stdout + few.stderr
    assert certificate(tmp_path, "draft_model")["verdict"] == "unproved"
    enough = run(tmp_path, "drafter=draft_model", f"drafter.model={draft}", *SMALL, "max_new_tokens=80")
    assert enough.returncode == 0, enough.stdout + enough.stderr
    assert certificate(tmp_path, "draft_model")["verdict"] == "lossless"
