"""Checkpoints: bit-equal round trips, only trained weights, whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec_lab.distill.training_state import (
    HEAD,
    MANIFEST,
    OPTIMIZER,
    STATE,
    head_tensors,
    last_checkpoint,
    load_head_tensors,
    load_optimizer_tensors,
    optimizer_tensors,
    remove_later,
    trained_parameters,
    write_checkpoint,
)
from specdec_lab.errors import InputError


class Head(nn.Module):
    """Two layers of which one stands twice, a frozen one, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Linear(3, 3)
        self.again = self.one
        self.two = nn.Linear(3, 2, bias=False)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("ids", torch.randint(0, 99, (4,)))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.two(self.again(self.one(states)) + self.frozen(states))


def trained(seed: int, steps: int = 2) -> tuple[Head, torch.optim.AdamW]:
    head = Head(seed)
    optimizer = torch.optim.AdamW(trained_parameters(head).values(), lr=0.1)
    for _ in range(steps):
        step(head, optimizer)
    return head, optimizer


def step(head: Head, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    head(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
    optimizer.step()


def write(folder: Path, number: int, keep: int = 9, seed: int = 0) -> Path:
    head, optimizer = trained(seed)
    tensors = optimizer_tensors([optimizer], trained_parameters(head))
    return write_checkpoint(folder, head_tensors(head), tensors, {"step": number}, keep)


def test_what_comes_back_is_bit_equal(tmp_path: Path):
    """Guards CF-01 and TD-04: weights, buffers and the optimizer's moments; the next step is the same step."""
    head, optimizer = trained(0)
    parameters = trained_parameters(head)
    write_checkpoint(tmp_path, head_tensors(head), optimizer_tensors([optimizer], parameters), {"step": 2}, keep=1)
    found = last_checkpoint(tmp_path)
    assert found is not None
    other, other_optimizer = trained(1, steps=0)
    other.frozen.load_state_dict(head.frozen.state_dict())
    load_head_tensors(other, found.head)
    load_optimizer_tensors([other_optimizer], trained_parameters(other), found.optimizer)
    assert all(torch.equal(*pair) for pair in zip(head.state_dict().values(), other.state_dict().values(), strict=True))
    step(head, optimizer)
    step(other, other_optimizer)
    assert all(torch.equal(*pair) for pair in zip(head.state_dict().values(), other.state_dict().values(), strict=True))


def test_only_what_is_trained_is_saved():
    """Guards CF-02: no frozen weights, no second copy of a shared one, and buffers."""
    head, optimizer = trained(0)
    assert set(head_tensors(head)) == {"one.weight", "one.bias", "two.weight", "ids"}
    names = {name.rpartition("/")[0] for name in optimizer_tensors([optimizer], trained_parameters(head))}
    assert names == {"one.weight", "one.bias", "two.weight"}


def test_a_checkpoint_is_a_copy():
    """Training goes on while, and after, it is written."""
    head, _ = trained(0)
    saved = head_tensors(head)["two.weight"]
    with torch.no_grad():
        head.two.weight.zero_()
    assert saved.abs().sum() > 0


def test_another_head_is_refused():
    """Guards CF-01: a missing, a superfluous or a differently shaped tensor is named."""
    head, _ = trained(0)
    good = head_tensors(head)
    for bad, name in (
        ({name: tensor for name, tensor in good.items() if name != "one.bias"}, "one.bias"),
        ({**good, "three.weight": torch.zeros(1)}, "three.weight"),
        ({**good, "two.weight": torch.zeros(2, 4)}, "two.weight"),
    ):
        with pytest.raises(InputError, match=name):
            load_head_tensors(head, bad)


def test_weights_of_low_precision_are_not_trained():
    """Small steps would be lost in them."""
    with pytest.raises(ValueError, match=r"one\.weight is torch\.bfloat16"):
        trained_parameters(Head(0).bfloat16())
    with pytest.raises(ValueError, match="no parameter"):
        trained_parameters(Head(0).requires_grad_(False))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", [HEAD, OPTIMIZER, STATE, MANIFEST])
@pytest.mark.parametrize("damage", [cut, flip, os.remove])
def test_the_one_before_a_torn_checkpoint_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Any], None]
):
    """Guards TD-04: a file that is cut, changed or missing is seen, and said."""
    write(tmp_path, 5)
    newest = write(tmp_path, 10)
    damage(newest / name)
    with caplog.at_level(logging.WARNING):
        found = last_checkpoint(tmp_path)
    assert found is not None
    assert found.state["step"] == 5
    assert newest.name in caplog.text
    assert ("cut off" in caplog.text) == (damage is cut and name != MANIFEST)


def test_nothing_whole_is_refused_and_nothing_at_all_is_not(tmp_path: Path):
    """A user who asked to go on must not silently start anew."""
    assert last_checkpoint(tmp_path / "absent") is None
    assert last_checkpoint(tmp_path) is None
    cut(write(tmp_path, 5) / HEAD)
    with pytest.raises(InputError, match="none of the 1 checkpoints"):
        last_checkpoint(tmp_path)


def test_a_checkpoint_appears_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kill before the last moment leaves no folder of that name; what it leaves is cleared away."""
    write(tmp_path, 5)
    seen: list[set[str]] = []

    def killed(self: Path, target: Path) -> None:
        seen.append({path.name for path in self.iterdir()})
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 10)
    monkeypatch.undo()
    assert seen == [{HEAD, OPTIMIZER, STATE, MANIFEST}]
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found.state["step"] == 5
    remove_later(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_the_last_ones_are_kept(tmp_path: Path):
    """Old ones go when a new one is there; torn later ones neither stay in the way nor count."""
    for number in (0, 5, 10, 15):
        write(tmp_path, number, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000015"]
    cut(tmp_path / "step_00000015" / HEAD)
    remove_later(tmp_path, 10)
    write(tmp_path, 12, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000012"]
    write(tmp_path, 12, keep=1)


def test_pickles_are_not_opened(tmp_path: Path):
    """Guards SE-01: a file that would run code when unpickled is no safetensors file, and nothing runs."""
    marker = tmp_path / "marker"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    for name in (HEAD, OPTIMIZER, STATE):
        folder = tmp_path / name
        path = write(folder, 5)
        attack = pickle.dumps(Attack())
        (path / name).write_bytes(attack)
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["files"][name] = {"bytes": len(attack), "sha256": hashlib.sha256(attack).hexdigest()}
        (path / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(InputError, match="none of the 1"):
            last_checkpoint(folder)
    assert not marker.exists()
