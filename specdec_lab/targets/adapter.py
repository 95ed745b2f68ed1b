"""LoRA adapters of a target (arXiv 2106.09685), through peft: trained with heads, merged into the weights for decoding.

A target with an adapter is another target: lossless means that its own law is kept, not that of the model without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from specdec_lab.errors import InputError, one_line
from specdec_lab.optional import library

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _peft() -> Any:
    return library("peft", "medusa2")


class Adapter(nn.Module):
    """Low-rank changes of every linear layer of a model but the output layer; off but within ``on``.

    The model's own weights are frozen, and its layers replaced by ones that hold both: with the adapter off it computes
    what it did before.

    Args:
        model: is changed in place.
        rank: of the changes.
        scale: what they are multiplied with.
    """

    def __init__(self, model: PreTrainedModel, rank: int, scale: float) -> None:
        super().__init__()
        peft = _peft()
        config = peft.LoraConfig(r=rank, lora_alpha=scale * rank, target_modules="all-linear", lora_dropout=0.0)
        peft.inject_adapter_in_model(config, model)
        self._model, self._config = (model,), config
        found = [weight for name, weight in model.named_parameters() if "lora_" in name]
        for weight in found:
            weight.data = weight.data.float()
        self.weights = nn.ParameterList(found)
        self._switch(False)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let the model compute with the changes."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def save(self, folder: Path) -> None:
        """Write the changes as peft does: ``adapter_model.safetensors`` and ``adapter_config.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        state = _peft().get_peft_model_state_dict(self._model[0])
        named = {f"base_model.model.{name}": weight.detach().cpu().contiguous() for name, weight in state.items()}
        save_file(named, folder / WEIGHTS)
        self._config.save_pretrained(str(folder))

    def _switch(self, on: bool) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in self._model[0].modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(on)
        for weight in self.weights:  # which switching off would freeze, between a forward and its backward
            weight.requires_grad_(True)


def _refuse_missing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse a file that lacks weights or has others: peft would leave layers as they are, with no more than a warning.

    Raises:
        ValueError: names one.
    """
    strip = {name.removeprefix("base_model.model.") for name in expected}
    there = {name.removeprefix("base_model.model.") for name in found}
    if strip != there:
        one = min(strip ^ there)
        raise ValueError(f"{one} is {'not in the file' if one in strip else 'in the file and not in this model'}")


def check_adapter(folder: str | None) -> None:
    """Refuse a folder without an adapter; nothing is loaded.

    Raises:
        InputError: names the file that is missing.
    """
    if folder is None:
        return
    for name in (CONFIG, WEIGHTS):
        if not (Path(folder) / name).is_file():
            remedy = f"there is no {name}; give the folder of an adapter as peft writes it, with safetensors"
            raise InputError("target.adapter", folder, remedy)


def merged(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Return the model with an adapter's changes added to its weights.

    Raises:
        InputError: the adapter is damaged, or another model's.
    """
    peft = _peft()
    try:
        wrapped = peft.PeftModel.from_pretrained(model, folder)
        _refuse_missing(peft.get_peft_model_state_dict(wrapped), load_file(Path(folder) / WEIGHTS))
        whole = wrapped.merge_and_unload()
    except Exception as error:  # peft raises whatever its parts raise, from JSON to shapes
        raise InputError(
            "target.adapter", folder, f"it does not fit this model ({one_line(error)}); give its own"
        ) from error
    assert isinstance(whole, PreTrainedModel)
    return whole.requires_grad_(False).eval()
