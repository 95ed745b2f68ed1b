"""Settings that the loaders share: device, dtype, placement, attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS
from transformers import AutoConfig

from specdec_lab.attention import PACKED_ATTENTION
from specdec_lab.errors import InputError, UnsupportedModelError
from specdec_lab.targets import loading

CPU = torch.device("cpu")
NOWHERE = loading.ModelSource("nowhere")

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


# --- device and dtype -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["gpu", "cpu:1", "cuda:x", "cuda:-1", "meta", "", "CPU", "mps:0"])
def test_unknown_device_is_named_with_those_to_use(device: str):
    """A device that torch would reject, or take and then fail on, is refused at once."""
    with pytest.raises(InputError, match=rf"target.device={device!r}: use auto, cpu, cuda"):
        loading.choose_device(device)


@WITHOUT_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_missing_cuda_device_is_said_before_anything_loads(device: str):
    """The sentence tells how many devices this torch sees."""
    with pytest.raises(InputError, match=rf"target.device='{device}': torch .* sees 0 CUDA devices; use cpu or auto"):
        loading.choose_device(device)


@WITHOUT_CUDA
def test_auto_is_the_cpu_where_there_is_nothing_else():
    """``auto`` never fails."""
    assert loading.choose_device("auto") == CPU


def test_dtype_names():
    """Only the documented names; no dtype that torch happens to have."""
    assert loading.choose_dtype("float32", CPU) == torch.float32
    assert loading.choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert loading.choose_dtype("float16", CPU) == torch.float16
    for wrong in ("float64", "bf16", "int8", "", "Float32"):
        with pytest.raises(InputError, match=rf"target.dtype='{wrong}': use auto, float32, bfloat16, float16"):
            loading.choose_dtype(wrong, CPU)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the CPU's features are read from /proc/cpuinfo")
def test_auto_dtype_follows_the_cpus_own_features():
    """bfloat16 by emulation would be slower than float32: the kernel's list of features decides."""
    features = set(Path("/proc/cpuinfo").read_text().split())
    native = bool(features & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
    assert loading.choose_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)


# --- placement ------------------------------------------------------------------------------------------------------


def test_placement_is_said_once():
    """device, device_map and tp_plan would contradict each other."""
    assert loading.choose_placement("cpu", None, None) == (CPU, {})
    assert loading.choose_placement("auto", {"": "cpu"}, None)[1] == {"device_map": {"": "cpu"}}
    assert loading.choose_placement("auto", None, "auto")[1] == {"tp_plan": "auto"}
    with pytest.raises(InputError, match=r"target.device='cpu': leave it at auto: device_map says"):
        loading.choose_placement("cpu", "auto", None)
    with pytest.raises(InputError, match=r"target.device='cpu': leave it at auto: tp_plan says"):
        loading.choose_placement("cpu", None, "auto")
    with pytest.raises(InputError, match=r"target.tp_plan='auto': give either"):
        loading.choose_placement("auto", "auto", "auto")


# --- attention ------------------------------------------------------------------------------------------------------


def small_config(model_type: str):
    """Return a small configuration of a family that the other tests do not run."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    return AutoConfig.for_model(model_type, **sizes)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("llama", PACKED_ATTENTION), ("gemma3", PACKED_ATTENTION), ("gemma2", "eager")],
)
def test_auto_attention_is_the_fastest_that_computes_the_same(model_type: str, expected: str):
    """Gemma 2 caps its scores, which only its own eager function does (older transformers would not say so)."""
    skeleton = loading.build_skeleton(NOWHERE, CONFIGS[model_type])
    assert loading.choose_attention("auto", skeleton) == expected
    assert next(skeleton.parameters()).is_meta


@pytest.mark.parametrize(("model_type", "expected"), [("falcon", "sdpa"), ("gpt_oss", "eager")])
def test_auto_attention_of_models_that_take_no_registered_function(model_type: str, expected: str):
    """Falcon has sdpa code of its own, gpt-oss has sinks that sdpa lacks."""
    config = small_config(model_type)
    assert loading.choose_attention("auto", loading.build_skeleton(NOWHERE, config)) == expected


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_attention_that_leaves_something_out_is_refused(attention: str):
    """Gemma 2 without its cap would give other logits without a word."""
    skeleton = loading.build_skeleton(NOWHERE, CONFIGS["gemma2"])
    with pytest.raises(InputError, match=f"target.attention='{attention}': gemma2 needs more.*use auto or eager"):
        loading.choose_attention(attention, skeleton)
    assert loading.choose_attention("eager", skeleton) == "eager"


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_flash_is_refused_by_name(attention: str):
    """Flash attention takes no 4-D mask: with it every tree would be verified as if it were a chain."""
    with pytest.raises(InputError, match=f"target.attention='{attention}': flash attention takes no tree mask"):
        loading.check_attention(attention)


def test_unknown_attention_is_refused():
    """A name that transformers would look up on the hub as a kernel never gets there."""
    with pytest.raises(InputError, match=r"target.attention='someone/kernel': use auto, packed, sdpa, eager"):
        loading.check_attention("someone/kernel")


# --- kinds of model, by configuration alone -------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["mamba", "jamba", "rwkv"])
def test_state_space_models_are_refused_by_configuration(model_type: str):
    """A state cannot forget a rejected draft."""
    with pytest.raises(UnsupportedModelError, match=f"{model_type} .*state-space"):
        loading.build_skeleton(NOWHERE, AutoConfig.for_model(model_type, num_hidden_layers=1, hidden_size=64))


def test_models_without_a_causal_head_are_refused():
    """An image model is no causal LM; the sentence is transformers' first line, not its list of all models."""
    with pytest.raises(InputError, match=r"target.model='nowhere'") as refused:
        loading.build_skeleton(NOWHERE, AutoConfig.for_model("vit"))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
