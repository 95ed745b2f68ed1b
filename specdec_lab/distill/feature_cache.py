"""The offline cache of a target's hidden states: written once, read at random while a head is trained.

A folder belongs to one target in one dtype with one set of layers; whatever else changes the states of a text is in its
identity too. Within it a text is known by its token ids alone. So a part of the data, more data or another order finds
what is already there, and only what is missing is computed; a run that was killed goes on in the same way.

A shard is a safetensors file with one flat tensor ``[tokens, hidden]`` per layer. ``index.json`` lists the shards that
are complete, their hashes, and where each text lies. A file gets its name when it is complete, and a shard counts once
the index names it, so that a kill at any moment costs at most one shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec_lab.bench.console import progress
from specdec_lab.bench.files import write_atomically
from specdec_lab.distill.batch import Example, collate
from specdec_lab.errors import InputError, one_line
from specdec_lab.target import Target
from specdec_lab.targets.smollm2 import cache_root, is_disk_full, sha256_of

INDEX = "index.json"
FORMAT = 1
"""Raised when what a folder holds changes its meaning; folders of another format are left alone."""

SHARD_BYTES = 256_000_000
"""A shard is written once it holds this many bytes; so much may be lost to a kill, and so much memory is needed."""

BATCH_TOKENS = 2048
"""Padded tokens of one forward of the target while the cache is written."""

_TEMPORARY = ".tmp"
_UNSTABLE = ("_name_or_path", "transformers_version")  # fields of a configuration that say where, not what


@dataclass(frozen=True)
class Shard:
    """One complete file of a cache.

    Attributes:
        file: its name.
        bytes: its size.
        sha256: of its content, in hex.
        texts: ``{digest of the ids: (first row, rows)}`` of each text in it; a row is one token.
    """

    file: str
    bytes: int
    sha256: str
    texts: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Index:
    """What ``index.json`` says: what the cache is of, and its complete shards in the order of writing."""

    identity: Mapping[str, Any]
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class CachePlan:
    """What a cache folder holds of some texts, and what is still to be computed.

    Attributes:
        folder: where the cache lies.
        identity: see ``cache_identity``.
        kept: shards that are there and whole.
        missing: one example per text that none of them holds, the longest first.
        bytes_needed: of the missing texts' states.
    """

    folder: Path
    identity: Mapping[str, Any]
    kept: tuple[Shard, ...]
    missing: tuple[Example, ...]
    bytes_needed: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden states that are kept, counted as ``Drafter.feature_layers`` counts them."""
        return tuple(self.identity["layers"])

    @property
    def bytes_kept(self) -> int:
        """Bytes of the shards that are there."""
        return sum(shard.bytes for shard in self.kept)

    @property
    def sentence(self) -> str:
        """What will be written, for the user."""
        if not self.missing:
            return f"features: all are there, {size_text(self.bytes_kept)} in {self.folder}"
        tokens = sum(len(example.ids) for example in self.missing)
        return (
            f"features: {len(self.missing)} texts of {tokens} tokens x {len(self.layers)} layers are to be computed, "
            f"{size_text(self.bytes_needed)} in {self.folder}, which holds {size_text(self.bytes_kept)}"
        )


# --- what a cache is of -----------------------------------------------------------------------------------------------


def cache_identity(target: Target, layers: Sequence[int]) -> dict[str, Any]:
    """Return everything that changes the states of a text, as plain values."""
    config = {name: value for name, value in target.model.config.to_dict().items() if name not in _UNSTABLE}
    return {
        "format": FORMAT,
        "target": target.name,
        "weights": weights_sha256(target.model),
        "config": _sha256(json.dumps(config, sort_keys=True, default=str)),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "layers": list(layers),
        "attention": target.model.config._attn_implementation,
        "device": target.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def weights_sha256(model: PreTrainedModel) -> str:
    """Return the sha256 over names, shapes, dtypes and values of all parameters, tied ones once."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def text_digest(ids: Sequence[int]) -> str:
    """Return what a text is called in a cache: the first half of the sha256 of its token ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]


def cache_folder(identity: Mapping[str, Any], root: Path | None = None) -> Path:
    """Return the folder of an identity, in ``root`` or else in the lab's own cache (``$SPECDEC_LAB_CACHE``)."""
    name = f"{identity['target']}-{_sha256(json.dumps(identity, sort_keys=True))[:16]}"
    return (root or cache_root() / "features") / name


# --- planning ---------------------------------------------------------------------------------------------------------


def plan_cache(
    target: Target, identity: Mapping[str, Any], examples: Sequence[Example], root: Path | None = None
) -> CachePlan:
    """Find out which of some texts a cache lacks and how many bytes they take; nothing is written.

    Shards that are there are read once, to be sure that none is torn or damaged.

    Args:
        target: the teacher.
        identity: see ``cache_identity``.
        examples: the texts.
        root: folder of all caches; ``None`` for the lab's own.
    """
    folder = cache_folder(identity, root)
    kept = whole_shards(folder)
    known = {digest for shard in kept for digest in shard.texts}
    texts = {text_digest(example.ids): example for example in examples}
    missing = sorted((len(example.ids), digest) for digest, example in texts.items() if digest not in known)
    numbers = sum(length for length, _ in missing) * len(identity["layers"]) * target.hidden_size
    return CachePlan(
        folder=folder,
        identity=identity,
        kept=kept,
        missing=tuple(texts[digest] for _, digest in reversed(missing)),
        bytes_needed=numbers * target.model.dtype.itemsize,
    )


def refuse_without_room(plan: CachePlan, budget_bytes: int | None = None) -> None:
    """Refuse a plan that does not fit.

    Args:
        plan: what is to be written.
        budget_bytes: most bytes that the whole cache may take; ``None`` for no bound but the disk.

    Raises:
        InputError: more than the budget, or more than the disk has free.
    """
    total = plan.bytes_kept + plan.bytes_needed
    if budget_bytes is not None and total > budget_bytes:
        remedy = f"the cache would take {size_text(total)}; allow that much, take fewer tokens or features=online"
        raise InputError("feature_bytes", budget_bytes, remedy)
    there = next(folder for folder in (plan.folder, *plan.folder.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if plan.bytes_needed > free:
        remedy = (
            f"the cache needs {size_text(plan.bytes_needed)} and {there} has {size_text(free)} free; use "
            "features=online, take fewer tokens or set SPECDEC_LAB_CACHE to a folder on another disk"
        )
        raise InputError("features", "offline", remedy)


def whole_shards(folder: Path) -> tuple[Shard, ...]:
    """Return the shards of a folder whose files are as the index says; none where there is no readable index."""
    try:
        index = read_index(folder)
    except InputError:
        return ()
    return tuple(shard for shard in index.shards if _is_whole(folder / shard.file, shard))


def _is_whole(path: Path, shard: Shard) -> bool:
    return path.is_file() and path.stat().st_size == shard.bytes and sha256_of(path) == shard.sha256


def read_index(folder: Path) -> Index:
    """Return what a cache says that it holds, without looking at its shards.

    Raises:
        InputError: there is no cache, or its index is damaged.
    """
    path = folder / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, not {FORMAT}")
        shards = tuple(
            Shard(
                file=str(entry["file"]),
                bytes=int(entry["bytes"]),
                sha256=str(entry["sha256"]),
                texts={digest: (int(first), int(rows)) for digest, (first, rows) in entry["texts"].items()},
            )
            for entry in found["shards"]
        )
        return Index({**found["identity"], "layers": [int(layer) for layer in found["identity"]["layers"]]}, shards)
    except FileNotFoundError:
        raise InputError("features", str(folder), f"there is no {INDEX}; write the cache first") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = f"{INDEX} cannot be read ({one_line(error)}); remove the folder and write the cache again"
        raise InputError("features", str(folder), remedy) from error


# --- writing ----------------------------------------------------------------------------------------------------------


def prepare_cache(
    target: Target,
    layers: Sequence[int],
    examples: Sequence[Example],
    console: Console,
    root: Path | None = None,
    budget_bytes: int | None = None,
) -> Path:
    """Write what a cache lacks of some texts and return its folder; processes that start at once wait for one.

    What it will take is printed before it is written.

    Raises:
        InputError: it does not fit, or cannot be written.
    """
    identity = cache_identity(target, layers)
    folder = cache_folder(identity, root)
    with _storage(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            plan = plan_cache(target, identity, examples, root)
            console.print(plan.sentence, markup=False, highlight=False, soft_wrap=True)
            if plan.missing:
                refuse_without_room(plan, budget_bytes)
                write_cache(target, plan, console)
    return folder


def write_cache(
    target: Target,
    plan: CachePlan,
    console: Console,
    shard_bytes: int = SHARD_BYTES,
    batch_tokens: int = BATCH_TOKENS,
) -> None:
    """Compute the missing texts' states and add them to the cache, shard by shard. The caller holds the lock.

    Args:
        target: the teacher that the plan was made with.
        plan: what to write; files of the folder that it does not keep are removed.
        console: for the progress bar.
        shard_bytes: see ``SHARD_BYTES``.
        batch_tokens: see ``BATCH_TOKENS``.

    Raises:
        InputError: the disk is full or cannot be written; what was written before stays.
    """
    shards = list(plan.kept)
    with _storage(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(plan.folder, shards)
    row_bytes = plan.bytes_needed // max(1, sum(len(example.ids) for example in plan.missing))
    with progress(console, len(plan.missing), what="texts") as report:
        for number, batches in enumerate(_shares(plan.missing, shard_bytes // max(1, row_bytes), batch_tokens)):
            parts: dict[int, list[Tensor]] = {layer: [] for layer in plan.layers}
            texts: dict[str, tuple[int, int]] = {}
            rows = 0
            for examples in batches:
                batch = collate(examples)
                states = target.states(batch.ids, batch.lengths, plan.layers)
                for at, example in enumerate(examples):
                    for layer in plan.layers:
                        parts[layer].append(states[layer][at, : len(example.ids)].cpu())
                    texts[text_digest(example.ids)] = (rows, len(example.ids))
                    rows += len(example.ids)
                    report(f"of shard {number + 1}")
            with _storage(plan.folder):
                name = _free_name(shards)
                shards.append(_write_shard(plan.folder / name, parts, texts))
                _write_index(plan, shards)


def batches_by_length(examples: Sequence[Example], batch_tokens: int) -> Iterator[Sequence[Example]]:
    """Cut examples, which come longest first, into batches of at most so many tokens, padding included."""
    at = 0
    while at < len(examples):
        rows = max(1, batch_tokens // len(examples[at].ids))
        yield examples[at : at + rows]
        at += rows


def _shares(examples: Sequence[Example], shard_tokens: int, batch_tokens: int) -> Iterator[list[Sequence[Example]]]:
    """Group batches into shards. A shard holds whole batches, so that a resumed run computes the same batches."""
    share: list[Sequence[Example]] = []
    tokens = 0
    for batch in batches_by_length(examples, batch_tokens):
        share.append(batch)
        tokens += sum(len(example.ids) for example in batch)
        if tokens >= shard_tokens:
            yield share
            share, tokens = [], 0
    if share:
        yield share


def layer_name(layer: int) -> str:
    """Return a layer's name in a shard."""
    return f"layer_{layer}"


def _write_shard(path: Path, parts: Mapping[int, Sequence[Tensor]], texts: Mapping[str, tuple[int, int]]) -> Shard:
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        save_file({layer_name(layer): torch.cat(list(states)) for layer, states in parts.items()}, temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        shard = Shard(path.name, temporary.stat().st_size, sha256_of(temporary), dict(texts))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return shard


def _write_index(plan: CachePlan, shards: Sequence[Shard]) -> None:
    entries = [
        {"file": shard.file, "bytes": shard.bytes, "sha256": shard.sha256, "texts": shard.texts} for shard in shards
    ]
    found = {"format": FORMAT, "identity": plan.identity, "shards": entries}
    write_atomically(plan.folder / INDEX, json.dumps(found) + "\n")


def _free_name(shards: Sequence[Shard]) -> str:
    taken = {shard.file for shard in shards}
    return next(name for number in range(len(taken) + 1) if (name := f"shard_{number:05d}.safetensors") not in taken)


def _remove_leftovers(folder: Path, shards: Sequence[Shard]) -> None:
    """Remove shards that are torn or not in the index, and files without their final name."""
    kept = {shard.file for shard in shards}
    for path in (*folder.glob("shard_*.safetensors"), *folder.glob(f"*{_TEMPORARY}")):
        if path.name not in kept:
            path.unlink()


@contextmanager
def _storage(folder: Path) -> Iterator[None]:
    """Turn a failure to write into one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = "the disk is full" if is_disk_full(error) else one_line(error)
        remedy = (
            f"writing to {folder} failed ({reason}); what was complete stays, so make room and start again, set "
            "SPECDEC_LAB_CACHE to another folder or use features=online"
        )
        raise InputError("features", "offline", remedy) from error


# --- words ------------------------------------------------------------------------------------------------------------


def size_text(count: int) -> str:
    """Return a number of bytes in GB, or in MB below one GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
