"""The state of a training on disk: what it takes to go on as if nothing had happened, in safetensors and JSON alone.

A checkpoint is a folder ``checkpoints/step_00000100``. It holds the trained weights, the optimizer's moments, counters
and the settings, and a manifest with the size and hash of each file. It appears under its name when all of that is on
disk. Random state is no part of it: the random numbers of a step depend on the seed, the step and the process alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from specdec_lab.errors import InputError, listed, one_line

log = logging.getLogger(__name__)

HEAD, OPTIMIZER, STATE, MANIFEST = "head.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
FILES = (HEAD, OPTIMIZER, STATE)
SCHEMA_VERSION = 1
_PREFIX, _TEMPORARY = "step_", ".tmp"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read back whole.

    Attributes:
        head: see ``head_tensors``.
        optimizer: see ``optimizer_tensors``.
        state: the JSON part; ``step`` is the number of optimizer steps done.
    """

    folder: Path
    head: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]


# --- tensors ---------------------------------------------------------------------------------------------------------


def trained_parameters(head: nn.Module) -> dict[str, nn.Parameter]:
    """Return what is trained, by name; a parameter that stands in two places has its first name only.

    Raises:
        ValueError: nothing is trained, or in less than float32, in which small steps would be lost.
    """
    found = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError("the head has no parameter that is trained")
    for name, parameter in found.items():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}; weights are trained in float32, whatever the precision")
    return found


def head_tensors(head: nn.Module) -> dict[str, Tensor]:
    """Return copies of a head's trained parameters and its buffers on the CPU; frozen parameters are the target's.

    Every process has to call it: sharded weights are put together.
    """
    return {name: _whole(tensor) for name, tensor in _saved_tensors(head).items()}


def load_head_tensors(head: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a checkpoint's weights into a head.

    Raises:
        InputError: names or shapes are others than the head's.
    """
    own = _saved_tensors(head)
    strange = sorted({*own} ^ {*tensors})
    strange += [name for name in own if name in tensors and own[name].shape != tensors[name].shape]
    if strange:
        remedy = f"the checkpoint is of another head: {listed(strange, most=3)} do not fit; give the head's own folder"
        raise InputError("resume", True, remedy)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_shared_like(tensors[name], tensor))


def optimizer_tensors(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return copies of the optimizers' tensors on the CPU as ``PARAMETER/FIELD``; every process has to call it."""
    return {
        f"{name}/{field}": _whole(value)
        for name, parameter in parameters.items()
        for optimizer in optimizers
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put a checkpoint's tensors into the optimizers, each into the one that holds its parameter."""
    holders = {
        id(one): optimizer for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]
    }
    for name, parameter in parameters.items():
        optimizer = holders[id(parameter)]
        own = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
        optimizer.state[parameter] = {  # all lie where the parameter does: a fused step counts there too
            field: value.to(parameter.device) if field == "step" else _shared_like(value, parameter.detach())
            for field, value in own.items()
        }


def _saved_tensors(head: nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in head.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in head.state_dict().items() if name not in parameters}
    return {name: parameter.detach() for name, parameter in trained_parameters(head).items()} | buffers


def _whole(tensor: Tensor) -> Tensor:
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach().to("cpu", copy=True).contiguous()


def _shared_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor on the device, and split over the processes, as another one is."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)


def make_whole(head: nn.Module) -> None:
    """Replace sharded parameters by whole ones, for writing the head; it is not trained after that."""
    for module in head.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                module._parameters[name] = nn.Parameter(parameter.full_tensor().detach(), parameter.requires_grad)


# --- folders ---------------------------------------------------------------------------------------------------------


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"{_PREFIX}{step:08d}"


def write_checkpoint(
    folder: Path, head: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any], keep: int
) -> Path:
    """Write a checkpoint and remove older ones beyond the last ``keep``.

    Args:
        folder: that holds the checkpoints.
        head: see ``head_tensors``.
        optimizer: see ``optimizer_tensors``.
        state: plain values with ``step``.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: it cannot be written; the checkpoints before it are still there.
    """
    path = folder / checkpoint_name(state["step"])
    temporary = path.with_name(path.name + _TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(dict(head), temporary / HEAD)
    save_file(dict(optimizer), temporary / OPTIMIZER)
    _write_json(temporary / STATE, {"schema_version": SCHEMA_VERSION, **state})
    files = {name: {"bytes": (temporary / name).stat().st_size, "sha256": _sha256(temporary / name)} for name in FILES}
    _write_json(temporary / MANIFEST, {"schema_version": SCHEMA_VERSION, "files": files})
    for name in (*FILES, MANIFEST):
        _to_disk(temporary / name)
    _to_disk(temporary)
    if path.exists():  # a torn one, or one that an earlier attempt wrote after the checkpoint it went on from
        shutil.rmtree(path)
    temporary.rename(path)
    _to_disk(folder)
    for old in _folders(folder)[keep:]:
        shutil.rmtree(old)
    return path


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the newest checkpoint that is whole; newer ones that are damaged are named in a warning.

    Returns:
        ``None`` if there has never been one.

    Raises:
        InputError: there are some, and none is whole.
    """
    found = _folders(folder)
    for path in found:
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            log.warning("%s is damaged (%s); the checkpoint before it is tried.", path.name, one_line(error))
    if found:
        remedy = (
            f"none of the {len(found)} checkpoints in {folder} is whole; restore one or start anew with overwrite=true"
        )
        raise InputError("resume", True, remedy)
    return None


def stated_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings that the newest readable checkpoint states, without its tensors; ``None`` if there is none.

    They are there to refuse what will not go on early; what the training goes on from is read whole, and checked.
    """
    for path in _folders(folder):
        try:
            return json.loads((path / STATE).read_bytes())["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def remove_later(folder: Path, step: int) -> None:
    """Remove what a training that goes on from a step must not find later: torn checkpoints, and unfinished ones."""
    for path in folder.glob(f"{_PREFIX}*{_TEMPORARY}"):
        shutil.rmtree(path)
    for path in _folders(folder):
        if path.name > checkpoint_name(step):
            shutil.rmtree(path)


def _read(path: Path) -> Checkpoint:
    manifest = json.loads((path / MANIFEST).read_bytes())
    for name in FILES:
        stated = manifest["files"][name]
        if (path / name).stat().st_size != stated["bytes"]:
            raise ValueError(f"{name} is cut off")
        if _sha256(path / name) != stated["sha256"]:
            raise ValueError(f"{name} was changed")
    state = json.loads((path / STATE).read_bytes())
    return Checkpoint(path, load_file(path / HEAD), load_file(path / OPTIMIZER), state)


def _folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if path.name.removeprefix(_PREFIX).isdecimal() and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.removeprefix(_PREFIX)), reverse=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
