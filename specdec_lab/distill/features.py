"""Where the hidden states of a training batch come from: the target itself, or the cache that was made with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec_lab.distill.batch import Batch, Example, collate
from specdec_lab.distill.feature_cache import layer_name, read_index, text_digest
from specdec_lab.errors import InputError, one_line
from specdec_lab.target import Target


class FeatureSource(Protocol):
    """Makes batches with features; both kinds give the same numbers, up to rounding.

    Attributes:
        layers: hidden states that each batch brings, counted as ``Drafter.feature_layers`` counts them.
    """

    layers: tuple[int, ...]

    def batch(self, examples: Sequence[Example]) -> Batch:
        """Return the examples side by side with their features, all on one device, zero in the padding."""
        ...


class OnlineFeatures:
    """Runs the target in the training step.

    Args:
        target: the teacher.
        layers: see ``FeatureSource``; without any the target does not run.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    def batch(self, examples: Sequence[Example]) -> Batch:
        """Return the examples with the target's states.

        Raises:
            NoRoomError: a text is longer than the target has positions for.
        """
        batch = collate(examples)
        features = self.target.states(batch.ids, batch.lengths, self.layers) if self.layers else {}
        return on_device(replace(batch, features=features), self.target.device)


class CachedFeatures:
    """Reads what ``feature_cache.prepare_cache`` wrote; a shard is read when it is first needed.

    Args:
        folder: of the cache.
        layers: see ``FeatureSource``; some or all of those in the cache.
        device: where the batches are wanted.

    Raises:
        InputError: there is no cache, it is damaged, or it lacks one of the layers.
    """

    def __init__(self, folder: Path, layers: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.folder, self.layers, self.device = folder, tuple(layers), torch.device(device)
        self._places: dict[str, tuple[str, int, int]] = {}
        self._shards: dict[str, dict[str, Tensor]] = {}
        index = read_index(folder)
        lacking = [layer for layer in self.layers if layer not in index.identity["layers"]]
        if lacking:
            remedy = f"the cache in {folder} holds layers {index.identity['layers']}; write one with these layers"
            raise InputError("features", lacking, remedy)
        for shard in index.shards:
            path = folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.bytes:
                raise InputError("features", str(path), "this shard is torn or missing; write the cache again")
            self._places.update({digest: (shard.file, *rows) for digest, rows in shard.texts.items()})

    def batch(self, examples: Sequence[Example]) -> Batch:
        """Return the examples with the states that the cache holds of their texts.

        Raises:
            InputError: the cache lacks a text, or a shard is damaged.
        """
        batch = collate(examples)
        found = [self._text(example) for example in examples]
        features: dict[int, Tensor] = {}
        for layer in self.layers:
            first = found[0][layer]
            padded = first.new_zeros(*batch.ids.shape, first.shape[-1])  # [rows, tokens, hidden]
            for row, states in enumerate(found):
                padded[row, : len(states[layer])] = states[layer]
            features[layer] = padded
        return on_device(replace(batch, features=features), self.device)

    def _text(self, example: Example) -> dict[int, Tensor]:
        place = self._places.get(text_digest(example.ids))
        if place is None:
            remedy = f"the cache in {self.folder} does not hold this text; write the cache with the data of this run"
            raise InputError("features", example.key, remedy)
        file, first, rows = place
        held = self._shard(file)
        return {layer: held[layer_name(layer)][first : first + rows] for layer in self.layers}

    def _shard(self, file: str) -> dict[str, Tensor]:
        if file not in self._shards:
            path = self.folder / file
            try:
                with safe_open(path, framework="pt") as held:  # a head needs few of the layers that a cache has for all
                    names = map(layer_name, self.layers)
                    self._shards[file] = {name: held.get_tensor(name) for name in names}
            except (OSError, SafetensorError) as error:
                remedy = f"this shard cannot be read ({one_line(error)}); write the cache again"
                raise InputError("features", str(path), remedy) from error
        return self._shards[file]


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with all its tensors on one device."""
    return replace(
        batch,
        ids=batch.ids.to(device),
        supervised=batch.supervised.to(device),
        lengths=batch.lengths.to(device),
        features={layer: states.to(device) for layer, states in batch.features.items()},
    )
