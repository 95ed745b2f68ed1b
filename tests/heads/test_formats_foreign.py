"""Checkpoints as others write them: each layout is read, each known variant and every damage is one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import (
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    Tensors,
    deep_target,
    edit,
    logits,
    put,
    randomised,
    reduced,
    shards,
)
from torch import Tensor, nn

from specdec_lab.errors import InputError
from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.formats import load_head
from specdec_lab.heads.medusa import MedusaHeads

MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "somewhere/else"}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 5000.0,
    "pad_token_id": 0,
    "transformers_version": "4.28.1",
}

EAGLE = {**LLAMA, "bias": False}

EAGLE3 = {**LLAMA, "draft_vocab_size": len(reduced())}

SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "draft_vocab_size": len(reduced()),
    "norm_before_residual": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "transformer_layer_config": {**LLAMA, "attention_bias": False, "mlp_bias": False},
    "speculators_config": {"algorithm": "eagle3", "proposal_methods": [], "verifier": {"name_or_path": "some/where"}},
}


def head(name: str) -> nn.Module:
    return randomised(HEADS[name]()).eval()


def tensors(name: str, prefix: str = "") -> Tensors:
    return {prefix + key: tensor.clone() for key, tensor in head(name).state_dict().items()}


def medusa(folder: Path, name: str = "medusa own", prefix: str = "", **config: Any) -> Path:
    return put(folder, tensors(name, prefix), {**MEDUSA, **config}, "medusa_lm_head.safetensors")


def eagle(folder: Path, add: Mapping[str, Tensor] | None = None, name: str = "eagle", **config: Any) -> Path:
    values = {key: value for key, value in {**EAGLE, **config}.items() if value is not None}
    return put(folder, {**tensors(name), **(add or {})}, values, "model.safetensors")


def eagle3_tensors(layer: str = "midlayer.") -> Tensors:
    found = {key.replace("midlayer.", layer): tensor for key, tensor in tensors("eagle3 reduced").items()}
    vocabulary = reduced()
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[vocabulary.token_ids] = True
    return {**found, "d2t": vocabulary.token_ids - torch.arange(len(vocabulary)), "t2d": members}


def eagle3(folder: Path, add: Mapping[str, Tensor] | None = None, layer: str = "midlayer.", **config: Any) -> Path:
    values = {key: value for key, value in {**EAGLE3, "head_dim": 16, **config}.items() if value is not None}
    return put(folder, {**eagle3_tensors(layer), **(add or {})}, values, "model.safetensors")


def speculators(folder: Path, add: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
    values = {**SPECULATORS, "transformer_layer_config": {**SPECULATORS["transformer_layer_config"], "head_dim": 16}}
    null = ("target_hidden_size",)
    values = {key: value for key, value in {**values, **config}.items() if value is not None or key in null}
    return put(folder, {**eagle3_tensors("layers.0."), **(add or {})}, values, "model.safetensors")


def same(kind: Any, source: Path, name: str) -> None:
    """Expect that a folder gives the head that its tensors came from."""
    target, expected = deep_target(), head(name)
    loaded, facts = load_head(kind, str(source), target)
    assert torch.equal(logits(loaded, target), logits(expected, target))
    assert facts == {}


def refusal(kind: Any, source: Path | str, **settings: Any) -> str:
    """Return the sentence that a head is refused with."""
    with pytest.raises(InputError) as refused:
        load_head(kind, str(source), deep_target(), **settings)
    sentence = str(refused.value)
    assert refused.value.field == "head"
    assert "\n" not in sentence
    assert len(sentence) < 600 + len(str(source))
    return sentence


# --- Medusa -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_medusa_heads_are_counted_in_the_weights(prefix: str, tmp_path: Path):
    """The published configuration of a checkpoint with five heads states three."""
    folder = medusa(tmp_path, prefix=prefix)
    same("medusa", folder, "medusa own")
    loaded, _ = load_head("medusa", str(folder), deep_target())
    assert isinstance(loaded, MedusaHeads)
    assert (loaded.heads, loaded.blocks, loaded.own_output) == (5, 1, True)


def test_medusa_version_2_shares_the_output_layer(tmp_path: Path):
    """What is not in the file is the target's because the configuration says so, not because it is missing."""
    same("medusa", medusa(tmp_path / "two", "medusa tied", version="2"), "medusa tied")
    assert "hold no output layers" in refusal("medusa", medusa(tmp_path / "one", "medusa tied"))
    assert "hold output layers" in refusal("medusa", medusa(tmp_path / "both", version="2"))


def test_medusa_block_that_was_stored_once_is_named(tmp_path: Path):
    """A trainer that repeats one block object leaves the others out of the file: that is no head of one block."""
    tied = medusa(tmp_path / "tied", "medusa tied", version="2", medusa_num_layers=2)
    assert "lack 0.1.linear.weight; a trainer that repeats" in refusal("medusa", tied)
    own = {key.replace(".1.weight", ".2.weight"): value for key, value in tensors("medusa own").items()}
    put(tmp_path / "own", own, MEDUSA, "medusa_lm_head.safetensors")
    assert "lack 0.1.linear.weight; a trainer that repeats" in refusal("medusa", tmp_path / "own")


def test_medusa_2_is_read_out_of_its_base_model(tmp_path: Path):
    """Only the heads' tensors are taken; they belong to the base model beside them, and to no other."""
    base = {name: tensor.clone() for name, tensor in deep_target().model.state_dict().items()}
    held = {**base, **tensors("medusa own", "medusa_head.")}
    same("medusa", shards(tmp_path / "right", held, {**LLAMA, "num_hidden_layers": LAYERS}), "medusa own")
    held[f"model.layers.{LAYERS - 1}.mlp.up_proj.weight"] += 0.01
    sentence = refusal("medusa", shards(tmp_path / "wrong", held, LLAMA))
    assert f"model.layers.{LAYERS - 1}.mlp.up_proj.weight differs" in sentence
    assert "give it as the target too" in sentence
    unprefixed = {**base, **tensors("medusa own")}
    assert "which Medusa heads do not have" in refusal("medusa", shards(tmp_path / "odd", unprefixed, LLAMA))


def test_medusa_layout_of_an_old_server_is_named(tmp_path: Path):
    """Its tensors look alike and mean the same, but its truncated vocabulary and missing trees do not."""
    held = {"blocks.0.layers.0.weight": torch.zeros(HIDDEN, HIDDEN), "lm_heads.0.weight": torch.zeros(VOCAB, HIDDEN)}
    folder = put(tmp_path, held, {"model_type": "medusa", "num_heads": 1}, "model.safetensors")
    assert "blocks.0.layers.0.weight means the layout of an old server" in refusal("medusa", folder)


# --- EAGLE-1 and EAGLE-2 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("eagle", {"bias": False}),
        ("eagle", {"model_type": "eagle", "model": LLAMA, "vocab_size": None, "bias": None}),
        ("eagle biased whole", {"bias": None, "qkv_bias": True}),
        ("eagle biased whole", {"bias": True}),
        ("eagle biased whole", {"model_type": "eagle", "model": LLAMA, "bias": None, "eagle_fc_bias": True}),
    ],
)
def test_eagle_bias_follows_the_weights(name: str, config: dict[str, Any], tmp_path: Path):
    """A missing "bias" means true as published; a missing "eagle_fc_bias" means false, for an old server."""
    same("eagle", eagle(tmp_path, name=name, **config), name)


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("eagle", {"bias": None}, 'no fc.bias, and config.json has no "bias", which means that there is one'),
        ("eagle", {"bias": True}, '"bias" is true in config.json, and the weights hold no bias'),
        ("eagle biased whole", {"bias": False}, '"bias" is false in config.json, and the weights hold a bias'),
        ("eagle", {"qkv_bias": True}, '"qkv_bias" is true in config.json, and the weights hold no bias'),
        ("eagle biased whole", {"bias": True, "qkv_bias": False}, '"qkv_bias" is false'),
        ("eagle biased whole", {"model_type": "eagle", "model": LLAMA}, '"eagle_fc_bias" is false'),
    ],
)
def test_eagle_bias_that_contradicts_its_configuration(
    name: str, config: dict[str, Any], sentence: str, tmp_path: Path
):
    """Guards CF-04: a bias that would stay random elsewhere, or be left out here, is named."""
    assert sentence in refusal("eagle", eagle(tmp_path, name=name, **config))


def test_eagle_copies_of_the_target_are_compared_and_left_alone(tmp_path: Path):
    """A frozen embedding in half precision is the target's; another one is another target's."""
    model = deep_target().model.state_dict()
    copies = {
        "embed_tokens.weight": model["model.embed_tokens.weight"].half(),
        "lm_head.weight": model["lm_head.weight"],
    }
    buffer = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    same("eagle", eagle(tmp_path / "right", {**copies, **buffer}), "eagle")
    for name, tensor in copies.items():
        other = tensor.clone()
        other[VOCAB - 1, 0] += 0.01
        assert f"its {name} differs from the target's" in refusal("eagle", eagle(tmp_path / name, {name: other}))
    nearly = {"lm_head.weight": copies["lm_head.weight"].clone()}
    nearly["lm_head.weight"][0, 0] = torch.nextafter(nearly["lm_head.weight"][0, 0], torch.tensor(9.0))
    assert "its lm_head.weight differs" in refusal("eagle", eagle(tmp_path / "nearly", nearly))
    short = {"embed_tokens.weight": copies["embed_tokens.weight"][:-1]}
    assert "[127, 32] and the target's [128, 32]" in refusal("eagle", eagle(tmp_path / "short", short))


@pytest.mark.parametrize(
    ("tensor", "meaning"),
    [
        ("embed_layernorm.weight", "HASS"),
        ("hidden_layernorm.weight", "HASS"),
        ("lm_head_layernorm.weight", "HASS"),
        ("layers.0.input_layernorm.weight", "a norm before its attention"),
        ("layers.0.self_attn.q_norm.weight", "norms of queries and keys"),
        ("token_map", "old server"),
        ("somebody.idea.weight", "which this head does not have"),
        ("layers.0.mlp.up_proj.bias", "which this head does not have"),
    ],
)
def test_eagle_variants_are_refused_by_name(tensor: str, meaning: str, tmp_path: Path):
    """Guards CF-01: a tensor that is not used would change the head in silence."""
    sentence = refusal("eagle", eagle(tmp_path, {tensor: torch.zeros(HIDDEN)}))
    assert tensor in sentence
    assert meaning in sentence


def test_eagle_layers_are_counted_in_the_weights(tmp_path: Path):
    """A configuration copied from a large model does not add layers, and a layer of which a part is missing is told."""
    same("eagle", eagle(tmp_path / "two", name="eagle of two layers", num_hidden_layers=40), "eagle of two layers")
    sentence = refusal("eagle", eagle(tmp_path / "torn", {"layers.1.mlp.up_proj.weight": torch.zeros(HIDDEN)}))
    assert "the weights lack layers.1." in sentence


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_eagle3_layer_under_either_name(layer: str, tmp_path: Path):
    """Both names of the layer; how many layers the configuration claims does not matter (one was copied from 13B)."""
    same("eagle3", eagle3(tmp_path, layer=layer, num_hidden_layers=40), "eagle3 reduced")


def test_eagle3_reads_the_published_states_by_default(tmp_path: Path):
    """2, n // 2 and n - 3, as transformers counts hidden states."""
    loaded, _ = load_head("eagle3", str(eagle3(tmp_path)), deep_target())
    assert isinstance(loaded, Eagle3Head)
    assert loaded.feature_layers == (2, LAYERS // 2, LAYERS - 3)
    assert loaded.vocabulary.token_ids.tolist() == list(range(5, VOCAB, 3))


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({IDS: [2, 4, 5]}, (2, 4, 5)),
        ({IDS: [0, 3, 7]}, (0, 3, 7)),
        ({IDS: [7, 0, 3]}, (7, 0, 3)),
        ({"eagle_config": {IDS: [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {IDS: [1, 2, 6]}}, (2, 3, 7)),
        ({"eagle_config": {IDS: [2, 4, 5]}}, (2, 4, 5)),
        ({IDS: [2, 4, 5], "eagle_config": {IDS: [1, 3, 4]}}, (2, 4, 5)),
        ({IDS: [1, 3, 4], "specdec_lab": {"feature_layers": [2, 4, 5]}}, (2, 4, 5)),
    ],
)
def test_eagle3_states_are_counted_as_stated(config: dict[str, Any], expected: tuple[int, ...], tmp_path: Path):
    """Two ways of counting differ by one; what is written by which name tells them apart."""
    loaded, _ = load_head("eagle3", str(eagle3(tmp_path, **config)), deep_target())
    assert isinstance(loaded, Eagle3Head)
    assert loaded.feature_layers == expected


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({IDS: [1, 3, 4]}, "can mean states [1, 3, 4] or, one further, what these layers write, states [2, 4, 5]"),
        ({"eagle_config": {IDS: [3, 4, 6]}}, "can mean states [3, 4, 6] or"),
        ({IDS: [2, 4, 8]}, "names state 8 of a target of 8 layers is none that transformers returns"),
        ({"eagle_config": {IDS: [1, 3, 7]}}, "names state 8"),
        ({IDS: [2, 4, -1]}, "names state -1"),
        ({IDS: [2, 4, 5], "eagle_config": {IDS: [1, 2, 6]}}, "twice, with different states"),
        ({IDS: [2, 4]}, "fuses 96 numbers, and 2 states of the target have 64"),
        ({IDS: "2,4,5"}, "is no list of numbers"),
        ({"specdec_lab": {"feature_layers": [2, 4, 9]}}, "names state 9, and the target has 8 layers"),
    ],
)
def test_eagle3_states_that_can_be_read_in_two_ways(config: dict[str, Any], sentence: str, tmp_path: Path):
    """A head on the wrong states drafts badly and says nothing, so that it is refused with the way to state them."""
    assert sentence in refusal("eagle3", eagle3(tmp_path, **config))


def test_eagle3_offsets_are_no_target_ids(tmp_path: Path):
    """d2t holds offsets, and t2d has to name the same ids; d2t may lack only where nothing is left out."""
    right = eagle3_tensors()
    absolute = {"d2t": reduced().token_ids}
    assert "d2t holds target ids and has to hold offsets" in refusal("eagle3", eagle3(tmp_path / "a", absolute))
    other = {"d2t": right["d2t"].clone()}
    other["d2t"][-1] += 1
    assert "d2t and t2d name different ids" in refusal("eagle3", eagle3(tmp_path / "b", other))
    falling = {"d2t": right["d2t"].flip(0)}
    folder = edit(eagle3(tmp_path / "c", falling), drop="t2d")
    assert "ascending and distinct" in refusal("eagle3", folder)
    beyond = {"d2t": right["d2t"] + 100}
    assert "beyond the target's 128" in refusal("eagle3", edit(eagle3(tmp_path / "d", beyond), drop="t2d"))
    assert "d2t has 40 offsets" in refusal("eagle3", eagle3(tmp_path / "e", {"d2t": right["d2t"][:40]}))
    assert "t2d is [127]" in refusal("eagle3", eagle3(tmp_path / "f", {"t2d": right["t2d"][:-1]}))
    assert "hold t2d and lack d2t" in refusal("eagle3", edit(_whole(tmp_path / "g"), add={"t2d": right["t2d"]}))
    both = edit(edit(eagle3(tmp_path / "h"), drop="d2t"), drop="t2d")
    assert "has 41 rows, the target 128 ids, and no d2t" in refusal("eagle3", both)
    same("eagle3", _whole(tmp_path / "whole"), "eagle3")


def _whole(folder: Path) -> Path:
    return put(folder, tensors("eagle3"), {**EAGLE3, "draft_vocab_size": VOCAB}, "model.safetensors")


@pytest.mark.parametrize(
    ("add", "config", "sentence"),
    [
        (None, {"norm_before_residual": True}, "norm_before_residual=True in config.json is a variant"),
        (None, {"norm_before_fc": True}, "norm_before_fc=True in config.json is a variant"),
        (None, {"fc_norm": True}, "fc_norm=True in config.json is a variant"),
        (None, {"norm_output": True}, "norm_output=True in config.json is a variant"),
        (None, {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step=4"),
        (None, {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm=False"),
        (None, {"draft_vocab_size": 40}, "draft_vocab_size=40 in config.json, and lm_head.weight has 41"),
        (None, {"target_hidden_size": 64}, "target_hidden_size=64"),
        ("input_norm.weight", {}, "norm_before_fc"),
        ("fc_norm.0.weight", {}, "fc_norm"),
        ("mask_hidden", {}, "P-EAGLE"),
        ("midlayer.self_attn.q_norm.weight", {}, "norms of queries and keys"),
        ("layers.1.mlp.up_proj.weight", {}, "more than one layer"),
        ("embed_layernorm.weight", {}, "a norm of the embeddings"),
        ("fc.bias", {}, "fc.bias, which this head does not have"),
        ("layers.0.hidden_norm.weight", {}, "are one tensor"),
        ("embed_tokens.weight", {}, "an embedding of its own is not supported"),
    ],
)
def test_eagle3_variants_are_refused_by_name(add: str | None, config: dict[str, Any], sentence: str, tmp_path: Path):
    """Guards CF-01: what the head would do otherwise is named, never guessed."""
    shape = (VOCAB, HIDDEN) if add == "embed_tokens.weight" else (HIDDEN,)
    found = eagle3(tmp_path, {add: torch.zeros(shape)} if add else None, **config)
    assert sentence in refusal("eagle3", found)


def test_eagle3_copy_of_the_targets_embedding_is_left_alone(tmp_path: Path):
    """Some exports hold it; in another dtype it is the same within rounding."""
    embedding = deep_target().model.state_dict()["model.embed_tokens.weight"]
    same("eagle3", eagle3(tmp_path, {"embed_tokens.weight": embedding.bfloat16()}), "eagle3 reduced")


# --- speculators ------------------------------------------------------------------------------------------------------


def test_speculators_layout_is_read(tmp_path: Path):
    """Nested fields, tensors under the layer's number, a copy of the embedding."""
    embedding = deep_target().model.state_dict()["model.embed_tokens.weight"]
    same("eagle3", speculators(tmp_path, {"embed_tokens.weight": embedding}), "eagle3 reduced")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"norm_before_residual": True}, "norm_before_residual=True in config.json is a variant"),
        ({"norm_before_residual": None}, "lacks norm_before_residual, which loaders take for true or false"),
        ({"norm_before_fc": True}, "norm_before_fc=True"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash'"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"transformer_layer_config": {**LLAMA, "hidden_size": None}}, "hidden_size=None in config.json"),
        ({IDS: [1, 3, 4]}, "can mean states"),
    ],
)
def test_speculators_variants_are_refused_by_name(config: dict[str, Any], sentence: str, tmp_path: Path):
    """Guards CF-04: null sizes and fields with two defaults are named."""
    assert sentence in refusal("eagle3", speculators(tmp_path, **config))


# --- any kind ---------------------------------------------------------------------------------------------------------

FOLDERS = {"medusa": medusa, "eagle": eagle, "eagle3": eagle3}
NEEDED = {"medusa": "2.0.linear.bias", "eagle": "layers.0.mlp.up_proj.weight", "eagle3": "midlayer.hidden_norm.weight"}


@pytest.mark.parametrize("kind", FOLDERS)
def test_damaged_weights_are_named(kind: str, tmp_path: Path):
    """Guards CF-01: nothing stays random; a missing, misshapen, quantised or non-finite tensor is named."""
    name = NEEDED[kind]
    shape = randomised(HEADS[{"medusa": "medusa own", "eagle": "eagle", "eagle3": "eagle3"}[kind]]()).state_dict()[name]
    cases = {
        "lack " + name: {"drop": name},
        f"{name} is [3] and has to be {list(shape.shape)}": {"add": {name: torch.zeros(3)}},
        f"{name} holds NaN": {"add": {name: torch.full_like(shape, float("nan"))}},
        f"{name} is torch.int8": {"add": {name: torch.zeros(shape.shape, dtype=torch.int8)}},
    }
    for at, (sentence, change) in enumerate(cases.items()):
        assert sentence in refusal(kind, edit(FOLDERS[kind](tmp_path / str(at)), **change)), sentence


@pytest.mark.parametrize("kind", FOLDERS)
def test_weights_in_several_files(kind: str, tmp_path: Path):
    """An index and its shards are one checkpoint; a shard that is missing or lies elsewhere is named."""
    names = {"medusa": "medusa own", "eagle": "eagle", "eagle3": "eagle3 reduced"}
    held = eagle3_tensors() if kind == "eagle3" else tensors(names[kind])
    config = {"medusa": MEDUSA, "eagle": EAGLE, "eagle3": {**EAGLE3, "head_dim": 16}}[kind]
    folder = shards(tmp_path / "head", held, config)
    same(kind, folder, names[kind])
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "names model-00002-of-00003.safetensors, which is missing" in refusal(kind, folder)
    index = folder / "model.safetensors.index.json"
    for shard in ("../elsewhere.safetensors", "pytorch_model.bin"):
        index.write_text(json.dumps({"weight_map": {"fc.weight": shard}}))
        assert f"names {shard}, which is no *.safetensors file beside it" in refusal(kind, folder)
    index.write_text(json.dumps({"weights": {}}))
    assert "has no weight_map" in refusal(kind, folder)


@pytest.mark.parametrize(
    ("kind", "config", "sentence"),
    [
        ("eagle", {"vocab_size": 127}, "vocab_size=127 in config.json, and the target has 128 ids"),
        ("eagle", {"hidden_size": 64}, "hidden_size=64 in config.json, and the target's states have 32"),
        ("eagle", {"vocab_size": None}, "vocab_size=None in config.json: field required"),
        ("eagle", {"num_attention_heads": "four"}, "num_attention_heads='four' in config.json"),
        ("eagle", {"num_attention_heads": 5}, "states no layer that can be"),
        ("eagle", {"num_key_value_heads": 4}, "k_proj.weight is [16, 32] and has to be [32, 32]"),
        ("eagle", {"hidden_act": "magic"}, "hidden_act='magic'"),
        ("eagle3", {"vocab_size": 127}, "vocab_size=127 in config.json, and the target has 128 ids"),
        ("eagle3", {"intermediate_size": 64}, "is [48, 32] and has to be [64, 32]"),
    ],
)
def test_head_of_another_target_is_refused(kind: str, config: dict[str, Any], sentence: str, tmp_path: Path):
    """Guards TV-02: sizes that are not this target's are named before weights are filled in."""
    assert sentence in refusal(kind, FOLDERS[kind](tmp_path, **config))


def test_medusa_heads_of_another_target_are_refused(tmp_path: Path):
    """Guards TV-02: neither the width nor the vocabulary stands in the configuration, so that the weights tell."""
    wide = {"0.0.linear.weight": torch.zeros(64, 64), "0.0.linear.bias": torch.zeros(64)}
    put(tmp_path / "wide", wide, {**MEDUSA, "version": "2"}, "medusa_lm_head.safetensors")
    assert "is [64, 64] and has to be [32, 32]" in refusal("medusa", tmp_path / "wide")
    rows = edit(medusa(tmp_path / "rows"), add={f"{h}.1.weight": torch.zeros(100, HIDDEN) for h in range(5)})
    assert "its output layer has 100 rows, the target 128 ids, and no d2t" in refusal("medusa", rows)
    marked = medusa(tmp_path / "marked", specdec_lab={"kind": "medusa", "target_vocab_size": 320})
    assert "trained for a target of 320 ids" in refusal("medusa", marked)


def test_a_head_goes_to_its_own_strategy(tmp_path: Path):
    """The kind is known by the tensors, or by what was written with them; a whole model is no head."""
    made = {kind: write(tmp_path / kind) for kind, write in FOLDERS.items()}
    for kind, folder in made.items():
        for other in set(FOLDERS) - {kind}:
            assert f"this is a head for the strategy {kind}, not {other}" in refusal(other, folder)
    model = dict(deep_target().model.state_dict())
    put(tmp_path / "model", {name: tensor.clone() for name, tensor in model.items()}, LLAMA, "model.safetensors")
    assert "which no known head has" in refusal("eagle", tmp_path / "model")
    newer = medusa(tmp_path / "newer", specdec_lab={"format_version": 2, "kind": "medusa"})
    assert "it is of format 2" in refusal("medusa", newer)
