"""The target ``hf``: any decoder-only causal LM by hub id, local folder or GGUF file."""

from __future__ import annotations

from specdec_lab.errors import InputError
from specdec_lab.target import Exact, Target
from specdec_lab.targets import loading


def load_hub(
    model: str | None = None,
    dtype: loading.Dtype = "auto",
    device: str = "auto",
    revision: str | None = None,
    exact: Exact = "off",
    attention: loading.Attention = "auto",
    trust_remote_code: bool = False,
    device_map: loading.DeviceMap | None = None,
    tp_plan: str | None = None,
    adapter: str | None = None,
) -> Target:
    """Load a model and its tokenizer; everything that can be refused without reading weights is refused first.

    Args:
        model: hub id, folder with a configuration and safetensors weights, or path of a ``.gguf`` file.
        dtype: ``auto`` (bfloat16 where the device computes in it, else float32), ``float32``, ``bfloat16`` or
            ``float16``.
        device: ``auto`` (the first CUDA device, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        revision: branch, tag or commit of a hub id.
        exact: see ``specdec_lab.target.Target``.
        attention: ``auto`` (the fastest that computes what the model needs), ``packed``, ``sdpa`` or ``eager``.
        trust_remote_code: run the model's own code, if it comes with code.
        device_map: spread the model over devices, as ``from_pretrained`` takes it; ``device`` stays ``auto``.
        tp_plan: transformers' tensor parallelism, under ``torchrun``; ``device`` stays ``auto``.
        adapter: folder of a LoRA adapter, merged into the weights; the answers are then those of another model.

    Raises:
        InputError: a setting, folder or file that cannot be used.
        UnsupportedModelError: a model that no tree of drafts can be verified on.
    """
    if not model:
        raise InputError("target.model", model, "this target needs one: target.model=<hub id, folder or .gguf file>")
    loading.check_attention(attention)
    chosen_device, placement = loading.choose_placement(device, device_map, tp_plan)
    chosen_dtype = loading.choose_dtype(dtype, chosen_device)
    source = loading.find_source(model, revision, trust_remote_code)
    return loading.load_target(
        source,
        name="hf",
        dtype=chosen_dtype,
        attention=attention,
        placement=placement,
        exact=exact,
        adapter=adapter,
    )
