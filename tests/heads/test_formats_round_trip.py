"""What is saved is what is loaded, bit by bit, in every layout that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import FACTS, HEADS, VOCAB, deep_target, kind_of, layer, logits, randomised, reduced
from safetensors.torch import load_file
from torch import nn

from specdec_lab.errors import InputError
from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.formats import load_head, save_head
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.vocabulary import DraftVocabulary

CASES = [(name, "native") for name in HEADS]
CASES += [
    (name, "speculators") for name in ("eagle3", "eagle3 reduced", "eagle3 other states", "eagle3 llama3 positions")
]


def made(name: str) -> nn.Module:
    return randomised(HEADS[name]()).eval()


def refusal(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(InputError) as refused:
        save_head(*arguments, **settings)
    return str(refused.value)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_round_trip_is_bit_exact_and_drafts_the_same(name: str, layout: Any, tmp_path: Path):
    """Guards CF-01: every tensor, the vocabulary, the states it reads, its facts and its logits come back."""
    head, target = made(name), deep_target()
    assert isinstance(head, MedusaHeads | EagleHead | Eagle3Head)
    save_head(head, tmp_path / "head", FACTS, layout, dtype=torch.float32)
    loaded, facts = load_head(kind_of(head), str(tmp_path / "head"), target)
    assert type(loaded) is type(head)
    assert isinstance(loaded, MedusaHeads | EagleHead | Eagle3Head)
    assert not loaded.training
    ours, theirs = head.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(loaded.vocabulary.token_ids, head.vocabulary.token_ids)
    assert loaded.feature_layers == head.feature_layers
    assert torch.equal(logits(loaded, target), logits(head, target))
    assert facts == FACTS


@pytest.mark.parametrize("name", ["medusa own reduced", "eagle", "eagle3 reduced"])
def test_stored_dtype_is_the_one_asked_for(name: str, tmp_path: Path):
    """Weights are rounded once, when they are stored; integers and truth values are not touched."""
    head, target = made(name), deep_target()
    save_head(head, tmp_path / "head", {})
    (weights,) = (tmp_path / "head").glob("*.safetensors")
    kinds = {tensor.dtype for key, tensor in load_file(weights).items() if key not in ("d2t", "t2d")}
    assert kinds == {torch.bfloat16}
    loaded, facts = load_head(kind_of(head), str(tmp_path / "head"), target)
    rounded = {key: tensor.bfloat16() for key, tensor in head.state_dict().items()}
    assert all(torch.equal(tensor, rounded[key].float()) for key, tensor in loaded.state_dict().items())
    half, _ = load_head(kind_of(head), str(tmp_path / "head"), target, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, rounded[key]) for key, tensor in half.state_dict().items())
    assert facts == {}


def test_loading_draws_no_random_numbers(tmp_path: Path):
    """The state of torch's generator is the caller's; a module is not filled with numbers only to lose them."""
    save_head(made("eagle3 reduced"), tmp_path / "head", {})
    before = torch.get_rng_state()
    load_head("eagle3", str(tmp_path / "head"), deep_target())
    assert torch.equal(torch.get_rng_state(), before)


# --- what the folders hold --------------------------------------------------------------------------------------------

LAYER = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm"]
LAYER += [f"self_attn.{part}_proj" for part in "koqv"]
NAMES = {
    "medusa tied": [f"{head}.0.linear.{leaf}" for head in range(3) for leaf in ("bias", "weight")],
    "medusa own": [f"{h}.{leaf}" for h in range(5) for leaf in ("0.linear.bias", "0.linear.weight", "1.weight")],
    "eagle": ["fc.weight", *(f"layers.0.{part}.weight" for part in LAYER)],
    "eagle3 reduced": [
        *("d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"),
        *(f"midlayer.{part}.weight" for part in [*LAYER, "hidden_norm", "input_layernorm"]),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_folder_holds_the_published_names_and_nothing_of_the_target(name: str, tmp_path: Path):
    """Guards CF-02 and CF-07: one file of weights with the head's tensors, and one configuration."""
    head = made(name)
    save_head(head, tmp_path / "head", FACTS)
    weights = "medusa_lm_head.safetensors" if isinstance(head, MedusaHeads) else "model.safetensors"
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == sorted(["config.json", weights])
    assert sorted(load_file(tmp_path / "head" / weights)) == sorted(NAMES[name])
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_speculators_folder_has_its_names_and_fields(tmp_path: Path):
    """Guards CF-04: no field is missing or null, and the tensors carry the layer's number."""
    save_head(made("eagle3 reduced"), tmp_path / "head", FACTS, "speculators")
    names = {name.replace("midlayer.", "layers.0.") for name in NAMES["eagle3 reduced"]}
    assert set(load_file(tmp_path / "head" / "model.safetensors")) == names
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == len(reduced())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is False
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["transformer_layer_config"]["rope_theta"] == 5000.0
    assert config["speculators_config"]["verifier"]["name_or_path"] == "random-llama-8x32"


def test_offsets_are_those_that_others_read(tmp_path: Path):
    """Target id = draft id + d2t[draft id], and t2d marks the same ids: worked out by hand here."""
    head = Eagle3Head(layer(), DraftVocabulary(torch.tensor([1, 2, 7, 127]), VOCAB), (2, 4, 5))
    save_head(randomised(head), tmp_path / "head", {})
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [1, 1, 5, 124]
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == [1, 2, 7, 127]
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["draft_vocab_size"] == 4


def test_medusa_configuration_says_how_its_output_is_made(tmp_path: Path):
    """Version 2 shares the target's output layer; the first version has none of that field."""
    for name, version in (("medusa tied", "2"), ("medusa own", None)):
        save_head(made(name), tmp_path / name, FACTS)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config.get("version") == version
        assert config["base_model_name_or_path"] == "random-llama-8x32"
        assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3 if version else 5, 1)


# --- what is not written ----------------------------------------------------------------------------------------------


def test_a_field_that_others_need_is_asked_for(tmp_path: Path):
    """Guards CF-04: the target's name is needed in one layout; nothing is written without it."""
    sentence = refusal(made("eagle3"), tmp_path / "head", {}, "speculators")
    assert "config.json would lack speculators_config.verifier.name_or_path" in sentence
    assert list(tmp_path.iterdir()) == []


def test_what_a_layout_has_no_place_for_is_refused(tmp_path: Path):
    """Guards CF-04: a folder that nobody else can open, or opens wrongly, is not made."""
    assert "layout='speculators'" in refusal(made("medusa own"), tmp_path / "head", FACTS, "speculators")
    assert "layout='speculators'" in refusal(made("eagle"), tmp_path / "head", FACTS, "speculators")
    assert "from the start" in refusal(
        Eagle3Head(layer(), reduced(), (1, 3, -1)), tmp_path / "head", FACTS, "speculators"
    )
    biased = Eagle3Head(layer(attention_bias=True), reduced(), (1, 3, 5))
    assert "bias" in refusal(biased, tmp_path / "head", FACTS, "speculators")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path):
    """NaN from training, or a number too large for the stored dtype, is named before a folder exists."""
    head = made("eagle")
    with torch.no_grad():
        head.get_parameter("fc.weight")[0, 0] = 1e6
    assert "fc.weight" in refusal(head, tmp_path / "head", {}, dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_head_survives_a_write_that_fails(tmp_path: Path):
    """Guards CF-02: the folder is replaced once the new one is whole; other people's files are never removed."""
    first, second = made("eagle"), randomised(HEADS["eagle"](), seed=1)
    save_head(first, tmp_path / "head", {"run": 1}, dtype=torch.float32)
    with pytest.raises(TypeError):
        save_head(second, tmp_path / "head", {"run": object()})
    loaded, facts = load_head("eagle", str(tmp_path / "head"), deep_target())
    assert facts == {"run": 1}
    assert torch.equal(loaded.state_dict()["fc.weight"], first.state_dict()["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["head"]

    save_head(second, tmp_path / "head", {"run": 2}, dtype=torch.float32)
    loaded, facts = load_head("eagle", str(tmp_path / "head"), deep_target())
    assert facts == {"run": 2}
    assert torch.equal(loaded.state_dict()["fc.weight"], second.state_dict()["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["head"]

    (tmp_path / "head" / "thesis.tex").write_text("")
    assert "thesis.tex" in refusal(first, tmp_path / "head", {})
    assert (tmp_path / "head" / "thesis.tex").exists()
    (tmp_path / "file").write_text("")
    assert "a file" in refusal(first, tmp_path / "file", {})


def test_an_empty_folder_is_filled(tmp_path: Path):
    """A caller may have made the folder already."""
    (tmp_path / "head").mkdir()
    save_head(made("medusa tied"), tmp_path / "head", {})
    assert isinstance(load_head("medusa", str(tmp_path / "head"), deep_target())[0], MedusaHeads)
