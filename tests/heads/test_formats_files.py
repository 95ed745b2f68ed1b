"""Where a head may come from, and what is never run on the way."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import FACTS, HEADS, HIDDEN, biting_pickle, deep_target, logits, randomised
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import nn

from specdec_lab.bench.settings import plan_run
from specdec_lab.config import register_drafters
from specdec_lab.errors import InputError
from specdec_lab.heads.formats import check_source, files, load_head, save_head

MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1, "version": "2"}


def heads() -> nn.Module:
    return randomised(HEADS["medusa tied"]())


def refusal(source: Path | str, revision: str | None = None) -> str:
    with pytest.raises(InputError) as refused:
        load_head("medusa", str(source), deep_target(), revision=revision)
    sentence = str(refused.value)
    assert refused.value.field == ("revision" if revision and Path(source).exists() else "head")
    assert "\n" not in sentence
    assert len(sentence) < 600 + len(str(source))
    return sentence


# --- pickles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin", "head.pth", "head.ckpt", "head.pkl"])
def test_a_pickle_never_runs(name: str, tmp_path: Path):
    """Guards SE-01: in a folder it is refused unopened; named itself, it is opened for its tensors alone."""
    marker = tmp_path / "bitten"
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MEDUSA))
    biting_pickle(folder / name, marker)
    sentence = refusal(folder)
    assert f"{name} is a pickle" in sentence
    assert "name the file itself" in sentence
    assert "does not hold tensors alone" in refusal(folder / name)
    assert not marker.exists()
    with suppress(Exception):
        torch.load(folder / name, weights_only=False)
    assert marker.exists()  # it would have bitten


def test_a_pickle_of_tensors_is_read_when_it_is_named(tmp_path: Path):
    """As published heads are: the state of the module, in a file that the user asks for by name."""
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    torch.save(heads().state_dict(), tmp_path / "medusa_lm_head.pt")
    loaded, _ = load_head("medusa", str(tmp_path / "medusa_lm_head.pt"), deep_target())
    assert torch.equal(logits(loaded, deep_target()), logits(heads(), deep_target()))
    torch.save({"state": heads().state_dict()}, tmp_path / "nested.pt")
    assert "is no table of tensors" in refusal(tmp_path / "nested.pt")
    (tmp_path / "torn.bin").write_bytes((tmp_path / "medusa_lm_head.pt").read_bytes()[:200])
    assert "does not hold tensors alone" in refusal(tmp_path / "torn.bin")


def test_a_pickle_beside_safetensors_is_not_looked_at(tmp_path: Path):
    """Guards SE-01: the weights come from safetensors, whatever else lies there."""
    save_head(heads(), tmp_path / "head", FACTS)
    biting_pickle(tmp_path / "head" / "pytorch_model.bin", tmp_path / "bitten")
    load_head("medusa", str(tmp_path / "head"), deep_target())
    assert not (tmp_path / "bitten").exists()


def test_code_beside_a_head_does_not_run(tmp_path: Path):
    """Guards SE-02: no field of the configuration leads to code; there is no switch that would allow it."""
    save_head(randomised(HEADS["eagle"]()), tmp_path / "head", FACTS)
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    config |= {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "trust_remote_code": True}
    config |= {"model_type": "evil", "architectures": ["evil.Model"], "_target_": "evil.main"}
    path.write_text(json.dumps(config))
    (tmp_path / "head" / "evil.py").write_text(f"open({str(tmp_path / 'bitten')!r}, 'w')\n")
    load_head("eagle", str(tmp_path / "head"), deep_target())
    assert not (tmp_path / "bitten").exists()


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_hub_id_without_network_is_one_sentence():
    """The id, what was tried and what to do instead; a file of a hub id alike."""
    for source in ("nobody/no-such-head", "nobody/no-such-head/medusa_lm_head.pt", "no-such-head", "x" * 5000):
        sentence = refusal(source)
        assert sentence.startswith(f"head={source!r}: no such folder, and nothing from the hub")
        assert sentence.endswith("download it and give its folder")


def test_a_hub_id_brings_no_pickle_unless_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards SE-01: what is asked of the hub is recorded, since no test has one; the files then are real."""
    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(tmp_path / "head")

    monkeypatch.setattr(files, "snapshot_download", snapshot_download)
    save_head(heads(), tmp_path / "head", FACTS, dtype=torch.float32)
    torch.save(heads().state_dict(), tmp_path / "head" / "medusa_lm_head.pt")
    for source in ("some/heads", "some/heads/medusa_lm_head.pt"):
        loaded, _ = load_head("medusa", source, deep_target(), revision="v1")
        assert torch.equal(logits(loaded, deep_target()), logits(heads(), deep_target()))
    assert asked == [
        ("some/heads", "v1", ["*.json", "*.safetensors"]),
        ("some/heads", "v1", ["*.json", "medusa_lm_head.pt"]),
    ]
    assert "some/heads has no other.bin" in refusal("some/heads/other.bin")


@pytest.mark.parametrize("source", ["/no/such/folder", "./here", "a/b/c/d", "a/b/notes.txt", "", " "])
def test_a_path_that_is_not_there_is_one_sentence(source: str):
    """Nothing that cannot be a hub id is asked for on the hub."""
    assert "there is no such folder or file" in refusal(source)


def test_a_revision_is_for_the_hub_alone(tmp_path: Path):
    """A folder has none, so that one would be left out of account."""
    save_head(heads(), tmp_path / "head", FACTS)
    assert refusal(tmp_path / "head", revision="main").startswith("revision='main': only a hub id has revisions")


def test_the_folder_of_a_training_is_no_head_and_has_one(tmp_path: Path):
    """The likeliest mistake of all, and the message spoke of weights that are not there."""
    save_head(heads(), tmp_path / "run" / "head", FACTS)
    assert refusal(tmp_path / "run").endswith("its head is in the folder head/ within")


def test_what_is_no_checkpoint_is_named(tmp_path: Path):
    """An empty folder, a configuration or weights that are damaged, several files of weights."""
    assert "it holds no head, neither config.json nor weights; give another folder" in refusal(tmp_path)
    (tmp_path / "one.safetensors").write_bytes(b"")
    assert "there is no config.json beside the weights; copy it there" in refusal(tmp_path)
    (tmp_path / "one.safetensors").unlink()
    (tmp_path / "config.json").write_text("{")
    assert "config.json is damaged" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "config.json holds no fields" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    assert "it has no *.safetensors weights" in refusal(tmp_path)
    (tmp_path / "one.safetensors").write_bytes(b"\x00" * 20)
    assert "one.safetensors is damaged" in refusal(tmp_path)
    save_file({"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}, tmp_path / "two.safetensors")
    assert "several files of weights (one.safetensors, two.safetensors)" in refusal(tmp_path)
    assert "lack 0.0.linear.bias" in refusal(tmp_path / "two.safetensors")
    (tmp_path / "notes.txt").write_text("")
    assert "this is no file of weights" in refusal(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text(json.dumps({**MEDUSA, "specdec_lab": 3}))
    assert '"specdec_lab" in config.json is no group of fields' in refusal(tmp_path / "two.safetensors")


def test_the_published_file_is_taken_where_there_are_several(tmp_path: Path):
    """A folder may hold a whole model beside its heads."""
    save_head(heads(), tmp_path / "head", FACTS)
    save_file({"model.norm.weight": torch.zeros(HIDDEN)}, tmp_path / "head" / "model.safetensors")
    assert load_head("medusa", str(tmp_path / "head"), deep_target())[1] == FACTS


def test_a_source_can_be_checked_without_a_target(tmp_path: Path):
    """What is wrong with a folder shows before a large model is loaded; a hub id waits until it is needed."""
    save_head(heads(), tmp_path / "head", FACTS)
    check_source("medusa", str(tmp_path / "head"))
    check_source("medusa", "nobody/no-such-head")
    with pytest.raises(InputError, match="for the strategy medusa, not eagle"):
        check_source("eagle", str(tmp_path / "head"))


# --- published pairs --------------------------------------------------------------------------------------------------

PAIRS = {
    "vicuna_7b_medusa": ("medusa", "lmsys/vicuna-7b-v1.3", "FasterDecoding/medusa-vicuna-7b-v1.3"),
    "vicuna_7b_eagle": ("eagle", "lmsys/vicuna-7b-v1.3", "yuhuili/EAGLE-Vicuna-7B-v1.3"),
    "llama31_8b_eagle3": ("eagle3", "meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    "qwen3_8b_eagle3": ("eagle3", "Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"),
}


def composed(*overrides: str) -> Any:
    register_drafters()
    with initialize_config_module("specdec_lab.conf", version_base="1.3"):
        return OmegaConf.to_container(compose("benchmark", overrides=list(overrides)), resolve=True)


@pytest.mark.parametrize("pair", PAIRS)
def test_published_pairs_compose(pair: str):
    """Target, head and strategy arrive in the plan of a run, which is checked up to where weights would be loaded."""
    strategy, model, repository = PAIRS[pair]
    config = composed(f"pair={pair}")
    plan = plan_run(config)
    assert config["target"]["model"] == model
    assert config["target"]["_target_"].endswith("load_hub")
    assert [one.name for one in plan.strategies] == ["autoregressive", strategy]
    source = plan.strategies[-1].parameters["head"]
    assert source.startswith(repository)
    with pytest.raises(InputError, match="nothing from the hub"):
        load_head(strategy, source, deep_target())  # pyright: ignore[reportArgumentType]
    changed = composed(f"pair={pair}", f"drafter.{strategy}.nodes=7")
    assert changed["drafter"][strategy]["nodes"] == 7
