"""Models by folder, GGUF file or id: what loads is what was saved, and what cannot load is one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import WEIGHTS, edit_json, edit_weights, save_random, save_tiny, write_biting_pickle, write_gguf
from gguf import GGUFReader
from oracles import LOGITS_WITHIN, naive_answer, plain_logits
from safetensors.torch import load_file
from tiny_models import CONFIGS
from transformers import AutoModelForSeq2SeqLM, LlamaConfig, MambaConfig, T5Config, dynamic_module_utils

from specdec_lab.attention import PACKED_ATTENTION
from specdec_lab.errors import InputError, SpecdecError, UnsupportedModelError
from specdec_lab.targets.hub import load_hub
from specdec_lab.targets.tiny import build_tokenizer

TEXT = [7, 91, 33, 4, 58, 120, 11]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint that no test changes."""
    folder = tmp_path_factory.mktemp("saved")
    save_tiny(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint of the test's own."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refusal(model: Path | str | None, kind: type[SpecdecError] = InputError, **settings: Any) -> str:
    """Return the sentence that a model is refused with."""
    with pytest.raises(kind) as refused:
        load_hub(model if model is None else str(model), **{"device": "cpu", "dtype": "float32", **settings})
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert len(sentence) < 700 + len(str(model))
    return sentence


# --- what loads -----------------------------------------------------------------------------------------------------


def test_folder_gives_the_model_that_was_saved(tmp_path: Path):
    """Same logits as the model that was written, in the dtype asked for, with its tokenizer."""
    model = save_tiny(tmp_path)
    target = load_hub(str(tmp_path), dtype="float32", device="cpu", exact="fixed_shape")
    assert torch.equal(plain_logits(target.model, TEXT), plain_logits(model, TEXT))
    assert target.tokenizer is not None
    assert target.tokenizer("the cat")["input_ids"] == build_tokenizer()("the cat")["input_ids"]
    assert target.tokenizer.chat_template == build_tokenizer().chat_template
    assert target.model.config._attn_implementation == PACKED_ATTENTION
    assert (target.name, target.exact, target.dtype) == ("hf", "fixed_shape", torch.float32)
    assert load_hub(str(tmp_path), dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_tied_weights_are_not_missing(tmp_path: Path):
    """Guards CF-01: shared tensors are written once; the strict load does not ask for the other name."""
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": 320, "tie_word_embeddings": True})
    model = save_random(tmp_path, config)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    target = load_hub(str(tmp_path), dtype="float32", device="cpu")
    assert torch.equal(plain_logits(target.model, TEXT), plain_logits(model, TEXT))


def test_gemma_2_gets_eager(tmp_path: Path):
    """Its soft cap is computed: logits equal those of the saved model, which a function without the cap changes."""
    values = {**CONFIGS["gemma2"].to_dict(), "vocab_size": 320, "attn_logit_softcapping": 0.05}
    model = save_random(tmp_path, type(CONFIGS["gemma2"])(**values))
    model.set_attn_implementation("eager")
    target = load_hub(str(tmp_path), dtype="float32", device="cpu")
    assert target.model.config._attn_implementation == "eager"
    assert (plain_logits(target.model, TEXT) - plain_logits(model, TEXT)).abs().max() < LOGITS_WITHIN
    assert "target.attention='packed': gemma2 needs more" in refusal(tmp_path, attention="packed")


def test_sharded_weights(tmp_path: Path, saved: Path):
    """Several files and their index load as one; a shard that is not there is named."""
    model = save_tiny(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    target = load_hub(str(tmp_path), dtype="float32", device="cpu")
    assert torch.equal(plain_logits(target.model, TEXT), plain_logits(model, TEXT))
    shards[0].unlink()
    assert f"names {shards[0].name}, which is missing" in refusal(tmp_path)


def test_gguf_file(tmp_path: Path):
    """A GGUF file loads as it is, with the weights that are in it and its own tokenizer."""
    path = tmp_path / "small.gguf"
    write_gguf(path)
    target = load_hub(str(path), dtype="float32", device="cpu")
    inside = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    weight = target.model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    assert np.array_equal(weight.detach().numpy(), inside.data)
    assert target.tokenizer is not None
    assert target.tokenizer.decode(target.tokenizer("the cat")["input_ids"], skip_special_tokens=True) == "the cat"


def test_device_map_is_from_pretraineds(saved: Path):
    """Placement by accelerate, on the one device that is here."""
    for target in (load_hub(str(saved), device_map={"": "cpu"}), load_hub(str(saved), device_map="auto")):
        assert target.vocab_size == 320


TENSOR_PARALLEL = """
import sys
import torch
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.targets.hub import load_hub
torch.set_num_threads(1)
target = load_hub(sys.argv[1], dtype="float32", tp_plan="auto")
request = Request(tuple(int(token) for token in sys.argv[2].split()), 40)
progress = speculative_decode(target, NgramDrafter(target), [request])
(done,) = (step.generation for step in progress if step.generation)
if torch.distributed.get_rank() == 0:
    print(target.model.get_submodule("model.layers.0.self_attn.q_proj").weight.to_local().shape[0])
    print(*done.output_ids)
"""


@pytest.mark.slow
def test_tensor_parallelism_gives_the_same_answer(saved: Path, tmp_path: Path):
    """Two processes with half of the heads each decode what one process decodes."""
    script = tmp_path / "decode.py"
    script.write_text(TENSOR_PARALLEL)
    prompt = build_tokenizer()("the cat and the cat and the")["input_ids"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*launch, str(script), str(saved), " ".join(map(str, prompt))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    heads, ids = done.stdout.splitlines()[-2:]
    assert int(heads) == 32  # of 64
    target = load_hub(str(saved), dtype="float32", device="cpu")
    expected = naive_answer(target.model, prompt, 40, target.eos_ids)[len(prompt) :]
    assert [int(token) for token in ids.split()] == expected


# --- what is not there ----------------------------------------------------------------------------------------------


def test_no_model_names_the_remedy():
    """The target ``hf`` is none until it is told which."""
    assert "target.model=None: this target needs one: target.model=<hub id, folder or .gguf file>" in refusal(None)


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "a/b/c", "~/nowhere-at-all", "../no-such-folder"])
def test_missing_folder(path: str):
    """A path is never taken for a hub id."""
    assert f"target.model={path!r}: there is no such folder" in refusal(path)


@pytest.mark.parametrize("path", ["/" + "x" * 5000, "~nobody-of-that-name/model"])
def test_path_that_the_system_refuses(path: str):
    """A name that is too long and the home folder of nobody are sentences too."""
    assert "it cannot be opened (" in refusal(path).replace(path, "...")


def test_missing_gguf_and_other_files(tmp_path: Path):
    """A file is a GGUF file or nothing."""
    assert "no such GGUF file" in refusal(tmp_path / "x.gguf")
    (tmp_path / "x.txt").touch()
    assert "this is a file" in refusal(tmp_path / "x.txt")


def test_hub_id_without_network():
    """Offline, an id that is not in the cache is refused at once, as an id and as a folder."""
    sentence = refusal("nobody/no-such-model")
    assert "target.model='nobody/no-such-model': no such folder, and no configuration from the hub" in sentence


def test_revision_of_a_folder(saved: Path):
    """A folder has no revisions: the pin would be ignored."""
    assert "target.revision='v1': only a hub id has revisions" in refusal(saved, revision="v1")


def test_incomplete_folders(folder: Path, tmp_path: Path):
    """Each missing part is named; a folder of GGUF files says how to name one; an adapter is no model."""
    assert "the folder has no config.json" in refusal(tmp_path)
    (tmp_path / "w.gguf").touch()
    assert f"name the file: {tmp_path / 'w.gguf'}" in refusal(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    assert "the folder holds an adapter; merge it" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    (folder / WEIGHTS).unlink()
    assert "the folder has no *.safetensors weights" in refusal(folder)


# --- what is damaged ------------------------------------------------------------------------------------------------


def test_damaged_weights(folder: Path):
    """A download that broke off, a file of something else, an empty file."""
    weights = folder / WEIGHTS
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"<html>not found</html>", b"", whole[:3]):
        weights.write_bytes(damaged)
        sentence = refusal(folder)
        assert f"target.model={str(folder)!r}: its weights cannot be loaded" in sentence
        assert "mend or replace the checkpoint" in sentence


def test_damaged_gguf(tmp_path: Path):
    """The same for a GGUF file."""
    path = tmp_path / "small.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:5000])
    assert f"target.model={str(path)!r}: its " in refusal(path)
    path.write_bytes(b"no gguf")
    assert f"target.model={str(path)!r}: its " in refusal(path)


def test_missing_weight_is_an_error(folder: Path):
    """Guards CF-01: transformers leaves such a weight random and only warns."""
    edit_weights(folder, drop="model.layers.1.mlp.up_proj.weight")
    assert "the file lacks 1 weights, such as model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_weight_of_another_shape_is_an_error(folder: Path):
    """Guards CF-01: a checkpoint of another size."""
    edit_weights(folder, put={"model.norm.weight": torch.ones(65)})
    assert "its weights cannot be loaded" in refusal(folder)


def test_weights_that_are_not_numbers_are_refused(folder: Path):
    """NaN in a weight shows at set-up, not as a strange answer."""
    edit_weights(folder, put={"model.norm.weight": torch.full((64,), float("nan"))})
    assert "logits" in refusal(folder, SpecdecError)


def test_damaged_configuration(folder: Path):
    """Text that is no JSON, a family that does not exist, sizes that do not fit each other, a damaged index."""
    config = folder / "config.json"
    whole = config.read_text()
    config.write_text(whole[:100])
    assert "its configuration cannot be loaded" in refusal(folder)
    config.write_text(whole)
    edit_json(config, model_type="no-such-family")
    assert "its configuration cannot be loaded" in refusal(folder)
    config.write_text(whole)
    edit_json(config, num_attention_heads=0)
    assert f"target.model={str(folder)!r}: its " in refusal(folder)
    config.write_text(whole)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert "model.safetensors.index.json is damaged" in refusal(folder)


def test_tokenizer_is_missing_or_damaged(folder: Path):
    """No target without a tokenizer: prompts could not be read."""
    (folder / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "it holds no tokenizer" in refusal(folder)


def test_tokenizer_of_another_model_is_refused(tmp_path: Path):
    """Guards TV-02, G-07: ids beyond the embedding would be an index error somewhere in the first prompt."""
    save_random(tmp_path, CONFIGS["llama"])  # 128 rows
    sentence = refusal(tmp_path)
    assert "its tokenizer has ids up to 316, the model only 128 rows; use the model's own tokenizer" in sentence


# --- what must not run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "model.ckpt", "pytorch_model.pkl"])
def test_pickled_weights_are_refused_unopened(folder: Path, name: str):
    """Guards SE-01: a folder with nothing but a pickle; the sentence names the file and the way out."""
    (folder / WEIGHTS).unlink()
    marker = folder / "marker"
    write_biting_pickle(folder / name, marker)
    sentence = refusal(folder)
    assert f"{name} is a pickle, which can run code when it is opened; convert it to safetensors" in sentence
    assert not marker.exists()


def test_pickles_beside_safetensors_stay_closed(folder: Path):
    """Guards SE-01: optimizer, scheduler and the like come with many checkpoints and are not weights."""
    marker = folder / "marker"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth", "adapter_model.bin"):
        write_biting_pickle(folder / name, marker)
    load_hub(str(folder), dtype="float32", device="cpu")
    assert not marker.exists()


def test_no_file_can_point_at_a_pickle(folder: Path):
    """Guards SE-01: neither the index of shards nor the configuration names one."""
    marker = folder / "marker"
    write_biting_pickle(folder / "adapter_model.bin", marker)
    edit_json(folder / "config.json", transformers_weights="adapter_model.bin")
    assert "its config names adapter_model.bin, which is a pickle" in refusal(folder)
    edit_json(folder / "config.json", transformers_weights=None)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"model.embed_tokens.weight": "adapter_model.bin"}}')
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    assert "model.safetensors.index.json names adapter_model.bin, which is a pickle" in refusal(folder)
    assert not marker.exists()


CODE = "from pathlib import Path\nPath({marker!r}).touch()\n"
CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own-family"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def own_code(folder: Path, tmp_path: Path) -> Path:
    """The marker file that code beside a checkpoint would create; configuration, model and tokenizer point at it."""
    marker = tmp_path / "marker"
    (folder / "own.py").write_text(CODE.format(marker=str(marker)) + CLASSES)
    (folder / "custom_generate").mkdir()
    generate = CODE.format(marker=str(marker)) + "def generate(model, **kwargs): ...\n"
    (folder / "custom_generate" / "generate.py").write_text(generate)
    return marker


CONFIG_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


def test_own_code_of_an_unknown_family_is_refused(folder: Path, own_code: Path):
    """Guards SE-02: without the flag the configuration's code is not run, and the sentence names the flag."""
    edit_json(folder / "config.json", model_type="own-family", auto_map=CONFIG_MAP)
    sentence = refusal(folder)
    assert "its configuration is code of its own, which is not run; set target.trust_remote_code=true" in sentence
    assert not own_code.exists()


def test_own_code_of_a_known_family_is_left_alone(folder: Path, own_code: Path):
    """Guards SE-02: transformers' own class loads the model; neither model, tokenizer nor generation code is run."""
    edit_json(folder / "config.json", auto_map=CONFIG_MAP)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    target = load_hub(str(folder), dtype="float32", device="cpu")
    assert type(target.model).__module__.startswith("transformers.")
    assert type(target.tokenizer).__module__.startswith("transformers.")
    assert not own_code.exists()


def test_own_code_of_a_tokenizer_is_refused(folder: Path, own_code: Path):
    """Guards SE-02: a tokenizer class that transformers has not."""
    changes = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    edit_json(folder / "tokenizer_config.json", **changes)
    (folder / "tokenizer.json").unlink()
    assert "its tokenizer is code of its own, which is not run" in refusal(folder)
    assert not own_code.exists()


def test_own_code_runs_where_it_is_trusted(folder: Path, own_code: Path, monkeypatch: pytest.MonkeyPatch):
    """The flag does something: the same folder, trusted, runs its code."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    edit_json(folder / "config.json", model_type="own-family", auto_map=CONFIG_MAP)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    try:
        load_hub(str(folder), dtype="float32", device="cpu", trust_remote_code=True)
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("transformers_modules"):
                del sys.modules[name]
    assert own_code.exists()


# --- what no tree can be verified on --------------------------------------------------------------------------------


def test_unsupported_kinds_are_refused_before_their_weights_are_read(tmp_path: Path):
    """Encoder-decoder and state-space models, by configuration: the weights are garbage and nobody looks."""
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 320}
    t5, mamba = tmp_path / "t5", tmp_path / "mamba"
    AutoModelForSeq2SeqLM.from_config(T5Config(**sizes)).save_pretrained(t5)
    save_random(mamba, MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=320, state_size=4))
    for folder in (t5, mamba):
        (folder / WEIGHTS).write_bytes(b"garbage")
    assert "t5 is an encoder-decoder; use a decoder-only causal LM" in refusal(t5, UnsupportedModelError)
    assert "state-space layers cannot forget a rejected draft" in refusal(mamba, UnsupportedModelError)


def test_settings_are_refused_before_the_model_is_looked_for():
    """The cheapest mistake is said first: none of these asks whether the folder exists."""
    assert "target.attention='flash_attention_2'" in refusal("/nowhere", attention="flash_attention_2")
    assert "target.dtype='int3'" in refusal("/nowhere", dtype="int3")
    assert "target.device='abacus'" in refusal("/nowhere", device="abacus")


def test_quantised_checkpoint_without_its_backend_is_one_sentence(folder: Path):
    """Whatever from_pretrained says about a quantised model reaches the user as one sentence."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    edit_json(folder / "config.json", quantization_config=quantization)
    assert "its weights cannot be loaded" in refusal(folder)
