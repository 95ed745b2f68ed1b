"""The cache of hidden states: killed at any moment, damaged, extended, or too large for the disk."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_models import VOCAB, tiny_model

from specdec_lab.distill import feature_cache
from specdec_lab.distill.batch import Example
from specdec_lab.distill.feature_cache import (
    INDEX,
    batches_by_length,
    cache_folder,
    cache_identity,
    plan_cache,
    prepare_cache,
    read_index,
    text_digest,
    write_cache,
)
from specdec_lab.distill.features import CachedFeatures, OnlineFeatures
from specdec_lab.errors import InputError
from specdec_lab.target import Target

GetTarget = Callable[..., Target]

LAYERS = (1, -1)
QUIET = Console(quiet=True)


def texts(count: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    ids = [tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(4, 40))) for _ in range(count)]
    return [Example(f"{seed}/{number}", one, (True,) * len(one)) for number, one in enumerate(ids)]


def fill(target: Target, examples: list[Example], root: Path) -> Path:
    """Write what is missing in shards of a few texts each, and return the folder."""
    plan = plan_cache(target, cache_identity(target, LAYERS), examples, root)
    write_cache(target, plan, QUIET, shard_bytes=20_000, batch_tokens=64)
    return plan.folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stamps(folder: Path) -> dict[str, int]:
    """Return when each shard was written, in ns."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("shard_*.safetensors")}


def check_serves(folder: Path, target: Target, examples: list[Example]) -> None:
    online, offline = OnlineFeatures(target, LAYERS).batch(examples), CachedFeatures(folder, LAYERS).batch(examples)
    for layer in LAYERS:
        assert torch.allclose(online.features[layer], offline.features[layer], atol=1e-4)


# --- killed ---------------------------------------------------------------------------------------------------------


def killed_at(replacement: int, work: Callable[[], Any]) -> None:
    """Run work in a process of its own, which is killed when it is about to give a file its name for the n-th time."""
    child = os.fork()
    if child == 0:
        real, left = os.replace, [replacement]

        def replace(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*arguments)

        os.replace = replace  # type: ignore[assignment]  # in the child alone
        try:
            work()
        finally:
            os._exit(1)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.WIFSIGNALED(status), "the work ended before it was killed"
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


@pytest.mark.parametrize("replacement", [1, 2, 3, 6])
def test_a_killed_run_goes_on_where_it_was(replacement: int, tiny_target: GetTarget, tmp_path: Path):
    """SIGKILL before a shard or the index gets its name: no text is lost or doubled, and the files are the same."""
    target, examples = tiny_target(), texts(24)
    whole = fill(target, examples, tmp_path / "whole")
    assert len(stamps(whole)) >= 4
    killed_at(replacement, lambda: fill(target, examples, tmp_path / "killed"))
    folder = cache_folder(cache_identity(target, LAYERS), tmp_path / "killed")
    assert any(path.suffix == ".tmp" for path in folder.iterdir())
    done = (replacement - 1) // 2
    before = stamps(folder)
    fill(target, examples, tmp_path / "killed")
    assert content(folder) == content(whole)
    assert sum(before.get(name) == stamp for name, stamp in stamps(folder).items()) == done
    rows = sum(rows for shard in read_index(folder).shards for _, rows in shard.texts.values())
    assert rows == sum(len(example.ids) for example in examples)
    check_serves(folder, target, examples)


@pytest.mark.parametrize("harm", ["truncated", "one bit", "missing"])
def test_a_damaged_shard_is_computed_again(harm: str, tiny_target: GetTarget, tmp_path: Path):
    target, examples = tiny_target(), texts(24)
    folder = fill(target, examples, tmp_path)
    right, before = content(folder), stamps(folder)
    shard = folder / "shard_00001.safetensors"
    data = bytearray(shard.read_bytes())
    shard.unlink()
    if harm == "truncated":
        shard.write_bytes(data[:-100])
    elif harm == "one bit":
        data[-5] ^= 1
        shard.write_bytes(data)
    plan = plan_cache(target, cache_identity(target, LAYERS), examples, tmp_path)
    assert {text_digest(example.ids) for example in plan.missing} == set(read_index(folder).shards[1].texts)
    fill(target, examples, tmp_path)
    assert {name: data for name, data in content(folder).items() if name != INDEX} == {
        name: data for name, data in right.items() if name != INDEX
    }
    assert {name for name, stamp in stamps(folder).items() if before[name] != stamp} == {shard.name}
    check_serves(folder, target, examples)


def test_files_that_no_index_names_are_removed(tiny_target: GetTarget, tmp_path: Path):
    """What killed runs leave would fill the disk, and could be taken for a shard."""
    target, examples = tiny_target(), texts(6)
    folder = fill(target, examples[:3], tmp_path)
    for name in ("shard_00009.safetensors", "shard_00010.safetensors.tmp", f"{INDEX}.tmp"):
        (folder / name).write_bytes(b"left")
    fill(target, examples, tmp_path)
    assert {path.name for path in folder.iterdir()} == {INDEX, *(shard.file for shard in read_index(folder).shards)}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "identity": {}, "shards": []}'])
def test_a_damaged_index_starts_anew_and_serves_nobody(text: str, tiny_target: GetTarget, tmp_path: Path):
    target, examples = tiny_target(), texts(6)
    folder = fill(target, examples, tmp_path)
    right = content(folder)
    (folder / INDEX).write_text(text)
    with pytest.raises(InputError, match="cannot be read"):
        CachedFeatures(folder, LAYERS)
    fill(target, examples, tmp_path)
    assert content(folder) == right


# --- what is there is used ------------------------------------------------------------------------------------------


def test_more_data_adds_shards_and_less_data_finds_all(
    tiny_target: GetTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A learning curve over 65 k, 250 k and 1 M tokens computes each text once, whatever order and keys it comes in."""
    target, examples = tiny_target(), texts(12)
    folder = prepare_cache(target, LAYERS, examples[:8], QUIET, tmp_path)
    before = stamps(folder)
    assert prepare_cache(target, LAYERS, examples, QUIET, tmp_path) == folder
    assert before.items() <= stamps(folder).items()
    assert len(stamps(folder)) == 2
    assert set(read_index(folder).shards[1].texts) == {text_digest(example.ids) for example in examples[8:]}
    check_serves(folder, target, examples)

    def run(*_: Any) -> None:
        raise AssertionError("the target ran")

    monkeypatch.setattr(target, "states", run)
    renamed = [Example(f"new/{example.key}", example.ids, example.supervised) for example in reversed(examples[3:9])]
    assert prepare_cache(target, LAYERS, renamed, QUIET, tmp_path) == folder


def test_a_text_that_occurs_twice_is_kept_once(tiny_target: GetTarget, tmp_path: Path):
    target, (one, other) = tiny_target(), texts(2)
    twin = Example("twin", one.ids, (False,) * len(one.ids))
    folder = prepare_cache(target, LAYERS, [one, other, twin], QUIET, tmp_path)
    (shard,) = read_index(folder).shards
    assert len(shard.texts) == 2
    check_serves(folder, target, [twin, one, other])


def test_batches_hold_texts_of_like_length_within_the_bound():
    lengths = [90, 40, 39, 38, 20, 8, 8, 8, 8, 2]
    examples = [Example(f"{at}", (5,) * length, (True,) * length) for at, length in enumerate(lengths)]
    cut = [[len(example.ids) for example in batch] for batch in batches_by_length(examples, 80)]
    assert cut == [[90], [40, 39], [38, 20], [8, 8, 8, 8, 2]]


# --- whose it is ----------------------------------------------------------------------------------------------------


def test_the_identity_changes_with_all_that_changes_states():
    """Guards TD-10 too: it is made of content, so that the same model built anew finds its cache, and nothing else."""

    def folder(target: Target, layers: tuple[int, ...] = LAYERS) -> Path:
        return cache_folder(cache_identity(target, layers), Path("root"))

    base = Target(tiny_model("llama"), name="one")
    assert folder(Target(tiny_model("llama"), name="one")) == folder(base)
    nudged = tiny_model("llama")
    with torch.no_grad():
        next(nudged.parameters()).view(-1)[-1] += 1e-3
    eager = tiny_model("llama")
    eager.set_attn_implementation("eager")
    others = [
        Target(nudged, name="one"),
        Target(eager, name="one"),
        Target(tiny_model("llama").to(torch.bfloat16), name="one"),  # type: ignore[arg-type]
        Target(tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}), name="one"),
        Target(tiny_model("llama", rms_norm_eps=1e-3), name="one"),
        Target(tiny_model("llama"), name="two"),
    ]
    folders = [folder(base), folder(base, (-1,)), folder(base, (-1, 1)), *map(folder, others)]
    assert len(set(folders)) == len(folders)


def test_the_identity_names_no_place():
    """A checkpoint that was moved is the same target."""
    here, there = tiny_model("llama"), tiny_model("llama")
    there.config._name_or_path = "/somewhere/else"
    assert cache_identity(Target(here), LAYERS) == cache_identity(Target(there), LAYERS)


def test_states_are_kept_in_the_targets_dtype(tmp_path: Path):
    target = Target(tiny_model("llama").to(torch.bfloat16))  # type: ignore[arg-type]
    examples = texts(3)
    batch = CachedFeatures(prepare_cache(target, LAYERS, examples, QUIET, tmp_path), LAYERS).batch(examples)
    assert batch.features[-1].dtype == torch.bfloat16


# --- room -----------------------------------------------------------------------------------------------------------


def test_the_bytes_are_said_before_and_are_right(tiny_target: GetTarget, tmp_path: Path):
    target, examples = tiny_target(), texts(24)
    plan = plan_cache(target, cache_identity(target, LAYERS), examples, tmp_path)
    tokens = sum(len(example.ids) for example in examples)
    assert plan.bytes_needed == tokens * 2 * 32 * 4
    assert list(tmp_path.iterdir()) == []
    console = Console(record=True, file=io.StringIO(), width=300)
    folder = prepare_cache(target, LAYERS, examples, console, tmp_path)
    said = console.export_text()
    assert f"24 texts of {tokens} tokens x 2 layers" in said
    assert f"{plan.bytes_needed / 1e6:.1f} MB" in said
    written = sum(path.stat().st_size for path in folder.glob("shard_*"))
    assert plan.bytes_needed <= written <= plan.bytes_needed + 1000


def test_a_budget_bounds_the_whole_cache(tiny_target: GetTarget, tmp_path: Path):
    target, examples = tiny_target(), texts(12)
    identity = cache_identity(target, LAYERS)
    first, both = (plan_cache(target, identity, some, tmp_path).bytes_needed for some in (examples[:6], examples))
    with pytest.raises(InputError, match=r"feature_bytes=.*features=online"):
        prepare_cache(target, LAYERS, examples[:6], QUIET, tmp_path, budget_bytes=first - 1)
    assert not list(tmp_path.rglob("shard_*"))
    prepare_cache(target, LAYERS, examples[:6], QUIET, tmp_path, budget_bytes=first)
    with pytest.raises(InputError, match=r"feature_bytes"):
        prepare_cache(target, LAYERS, examples, QUIET, tmp_path, budget_bytes=both - 1)


def test_a_full_disk_is_refused_before_anything_is_written(
    tiny_target: GetTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(InputError, match=r"features='offline'.*0\.0 MB free"):
        prepare_cache(tiny_target(), LAYERS, texts(6), QUIET, tmp_path)
    assert not list(tmp_path.rglob("shard_*"))


def test_a_place_that_cannot_be_written_is_one_sentence(tiny_target: GetTarget, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="SPECDEC_LAB_CACHE"):
        prepare_cache(tiny_target(), LAYERS, texts(2), QUIET, tmp_path / "file" / "features")


def test_the_default_place_is_the_labs_cache(tiny_target: GetTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECDEC_LAB_CACHE", str(tmp_path))
    folder = prepare_cache(tiny_target(), LAYERS, texts(2), QUIET)
    assert folder.parent == tmp_path / "features"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    assert json.loads((folder / INDEX).read_text())["identity"]["dtype"] == "float32"
