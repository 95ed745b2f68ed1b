"""Files of a head's checkpoint: where they lie, which tensors they hold, and how a folder is written.

Nothing here runs code from a checkpoint. Weights come from safetensors; a pickle is opened only when the user names
that very file, and then for its tensors alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec_lab.errors import InputError, listed, one_line
from specdec_lab.targets.loading import PICKLED_SUFFIXES

CONFIG = "config.json"
SAFE = ".safetensors"
INDEX = ".safetensors.index.json"
BLOCK = "specdec_lab"
"""Key of ``config.json`` under which this package states what the published layouts have no place for."""

FORMAT_VERSION = 1

_HUB_SOURCE = re.compile(r"(?P<repository>\w[\w.-]*(/\w[\w.-]*)?)")
_HUB_FILE = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)/(?P<file>\w[\w.-]*)")


class Checkpoint:
    """A checkpoint of a head, whose tensors are read when they are asked for.

    Args:
        source: folder, file or hub id as the user named it.
        config: content of its ``config.json``.
        files: the file of safetensors that holds each tensor.
        held: tensors that are in memory already.
    """

    def __init__(
        self, source: str, config: dict[str, Any], files: Mapping[str, Path], held: Mapping[str, Tensor]
    ) -> None:
        self.source, self.config, self._files, self._held = source, config, files, held

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted({*self._files, *self._held})

    @property
    def block(self) -> dict[str, Any]:
        """What this package wrote into ``config.json``; empty for a checkpoint from elsewhere."""
        block = self.config.get(BLOCK, {})
        if not isinstance(block, dict):
            raise self.refusal(f'"{BLOCK}" in {CONFIG} is no group of fields; mend or remove it')
        return block

    def refusal(self, remedy: str) -> InputError:
        """Return the error that says why the checkpoint cannot be used."""
        return InputError("head", self.source, remedy)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        if name in self._held:
            return tuple(self._held[name].shape)
        with _opened(self.source, self._files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as it is stored, on the CPU.

        Raises:
            InputError: the file is damaged, or does not hold what its index says.
        """
        if name in self._held:
            return self._held[name]
        with _opened(self.source, self._files[name]) as file:
            return file.get_tensor(name)


# --- reading ----------------------------------------------------------------------------------------------------------


def open_checkpoint(source: str, revision: str | None = None, preferred: str = "model.safetensors") -> Checkpoint:
    """Find a checkpoint's files and list its tensors; a hub id is downloaded first, without any pickle.

    Args:
        source: folder, hub id, or one file: of a folder, or of a hub id as ``owner/name/file``.
        revision: branch, tag or commit of a hub id.
        preferred: the file to take where a folder holds several.

    Raises:
        InputError: nothing is there, or not in a form that can be opened safely.
    """
    try:
        folder, named = _located(source, revision)
        config = _read_json(source, folder / CONFIG)
        if named is not None and named.suffix in PICKLED_SUFFIXES:
            return Checkpoint(source, config, {}, _unpickled(source, named))
        return Checkpoint(source, config, _tensor_files(source, folder, named, preferred), {})
    except OSError as error:  # no permission, a name that is too long
        raise InputError("head", source, f"it cannot be opened ({one_line(error)}); check the path") from error


def is_on_disk(source: str) -> bool:
    """Return whether a source is a folder or file here, and not a hub id."""
    try:
        return bool(source.strip()) and Path(source).expanduser().exists()
    except (OSError, RuntimeError):  # a name that is too long, the home of nobody
        return False


def _located(source: str, revision: str | None) -> tuple[Path, Path | None]:
    """Return the folder with ``config.json`` and the file of weights that the user named, if he named one."""
    if not is_on_disk(source):
        return _downloaded(source, revision)
    path = Path(source).expanduser()
    if revision is not None:
        remedy = f"only a hub id has revisions, and {source} is on disk; leave it null"
        raise InputError("revision", revision, remedy)
    if path.is_dir():
        return path, None
    if path.suffix not in PICKLED_SUFFIXES | {SAFE}:
        raise InputError("head", source, "this is no file of weights; give a folder, a hub id or a *.safetensors file")
    return path.parent, path


def _downloaded(source: str, revision: str | None) -> tuple[Path, Path | None]:
    one_file, whole = _HUB_FILE.fullmatch(source), _HUB_SOURCE.fullmatch(source)
    if one_file is not None and Path(source).suffix in PICKLED_SUFFIXES | {SAFE}:
        repository, name = one_file["repository"], one_file["file"]
    elif whole is not None:
        repository, name = whole["repository"], None
    else:
        raise InputError("head", source, "there is no such folder or file; check the path")
    patterns = ["*.json", name or f"*{SAFE}"]
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # no network, no such repository, no such revision, no permission
        remedy = f"no such folder, and nothing from the hub ({one_line(error)}); download it and give its folder"
        raise InputError("head", source, remedy) from error
    if name is not None and not (folder / name).is_file():
        raise InputError("head", source, f"{repository} has no {name}; look at its list of files")
    return folder, None if name is None else folder / name


def _read_json(source: str, path: Path) -> dict[str, Any]:
    if not path.is_file():
        if (path.parent / "head" / path.name).is_file():
            raise InputError("head", source, "this is the folder of a training; its head is in the folder head/ within")
        if not any(file.suffix in PICKLED_SUFFIXES | {SAFE} for file in path.parent.iterdir()):
            raise InputError("head", source, f"it holds no head, neither {path.name} nor weights; give another folder")
        raise InputError("head", source, f"there is no {path.name} beside the weights; copy it there")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError("head", source, f"{path.name} is damaged ({one_line(error)}); copy it again") from error
    if not isinstance(found, dict):
        raise InputError("head", source, f"{path.name} holds no fields; copy it again")
    return found


def _tensor_files(source: str, folder: Path, named: Path | None, preferred: str) -> dict[str, Path]:
    """Return the file of each tensor."""
    files = [named] if named is not None else sorted(folder.glob(f"*{SAFE}"))
    indices = [] if named is not None else sorted(folder.glob(f"*{INDEX}"))
    if folder / preferred in files:
        files, indices = [folder / preferred], []
    if len(indices) == 1:
        return _indexed(source, indices[0])
    if not files:
        raise InputError("head", source, _no_weights(folder))
    if len(files) + len(indices) > 1:
        names = listed([path.name for path in (*files, *indices)], most=3)
        raise InputError("head", source, f"it holds several files of weights ({names}); name the one that is meant")
    with _opened(source, files[0]) as file:
        return dict.fromkeys(file.keys(), files[0])


def _indexed(source: str, index: Path) -> dict[str, Path]:
    """Return the shard of each tensor; shards lie beside their index."""
    shards = _read_json(source, index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise InputError("head", source, f"{index.name} has no weight_map; copy it again")
    for shard in sorted(set(shards.values())):
        if not shard.endswith(SAFE) or Path(shard).name != shard:
            raise InputError("head", source, f"{index.name} names {shard}, which is no *{SAFE} file beside it")
        if not (index.parent / shard).is_file():
            raise InputError("head", source, f"{index.name} names {shard}, which is missing; copy it there")
    return {name: index.parent / shard for name, shard in shards.items()}


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if pickles:
        remedy = "convert it to safetensors, or name the file itself to have its tensors read without running code"
        return f"{pickles[0]} is a pickle, which can run code when it is opened; {remedy}"
    return f"it has no *{SAFE} weights; if it has a .bin or .pt file, name that file itself"


def _unpickled(source: str, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle; anything in it but tensors and plain containers is refused by torch."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, for damage as well as for what it will not run
        remedy = f"{path.name} does not hold tensors alone ({one_line(error)}); convert it where it comes from"
        raise InputError("head", source, remedy) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError("head", source, f"{path.name} is no table of tensors; save the state_dict of the head alone")
    return {str(name): value for name, value in found.items()}


@contextmanager
def _opened(source: str, path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError("head", source, f"{path.name} is damaged ({one_line(error)}); copy it again") from error


# --- writing ----------------------------------------------------------------------------------------------------------


def named_target(facts: Mapping[str, Any]) -> str | None:
    """Return the hub id or folder of the target that a head's facts name, as ``target`` or as ``target.model``."""
    target = facts.get("target")
    model = target.get("model") if isinstance(target, Mapping) else target
    return model if isinstance(model, str) and model else None


def write_folder(folder: Path, weights: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write a checkpoint beside its place and move it there once it is whole; an earlier checkpoint is replaced.

    Args:
        folder: where it goes.
        weights: name of its file of weights.
        tensors: by name, contiguous, on the CPU.
        config: content of ``config.json``.

    Raises:
        InputError: the folder holds something that is no checkpoint.
    """
    held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in held if name != CONFIG and not name.endswith(SAFE)]
    if foreign or (folder.exists() and not folder.is_dir()):
        remedy = f"it holds {listed(foreign, most=3) or 'a file'}, which is no part of a head; give another folder"
        raise InputError("head", str(folder), remedy)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        save_file(dict(tensors), new / weights, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, allow_nan=False)
        (new / CONFIG).write_text(text + "\n", encoding="utf-8")
        shutil.copymode(new / CONFIG, new / weights)  # safetensors makes files that nobody else can read
        _flush([new / weights, new / CONFIG])
        if held:
            os.rename(folder, old)
        os.rename(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.is_dir() and not folder.exists():
            os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def _flush(paths: Sequence[Path]) -> None:
    for path in paths:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
