"""What a training takes of the memory, estimated before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_lab.distill.batch import Batch, Example
from specdec_lab.distill.feature_cache import size_text
from specdec_lab.distill.features import FeatureSource
from specdec_lab.distill.learner import Learner
from specdec_lab.errors import InputError
from specdec_lab.target import free_bytes

OPTIMIZER_STATES = 2
"""Most numbers that an optimizer keeps per weight: AdamW's two; Muon keeps one for a matrix."""


@dataclass(frozen=True)
class Memory:
    """Bytes that training takes on the head's device, as far as they can be told beforehand.

    Attributes:
        weights: of the head; they are there already.
        gradients: of the trained weights.
        optimizer: AdamW's two numbers per trained weight; Muon keeps one for its own.
        activations: what the head's forward keeps for the backward, for the largest batch.
        features: of the largest batch.
        free: what the device has left before training.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    features: int
    free: int

    @property
    def needed(self) -> int:
        """Bytes that are still to be allocated."""
        return self.gradients + self.optimizer + self.activations + self.features


def check_memory(learner: Learner, examples: Sequence[Example], source: FeatureSource, batch_size: int) -> Memory:
    """Estimate what training takes, from forwards over the longest text, and compare it with what is free.

    Raises:
        InputError: it is more.
    """
    longest = max((example for example in examples if example.labels), key=lambda example: len(example.ids))
    one, two = source.batch([longest]), source.batch([longest, longest])
    for_one, for_two = activation_bytes(learner, one), activation_bytes(learner, two)
    trained = [weight for weight in learner.head.parameters() if weight.requires_grad]
    device = trained[0].device
    memory = Memory(
        weights=sum(weight.nbytes for weight in learner.head.parameters()),
        gradients=sum(weight.nbytes for weight in trained),
        optimizer=OPTIMIZER_STATES * sum(weight.nbytes for weight in trained),
        activations=for_one + (batch_size - 1) * (for_two - for_one),  # some of it is there once per batch
        features=batch_size * sum(states.nbytes for states in one.features.values()),
        free=free_bytes(device),
    )
    if memory.needed > memory.free:
        remedy = (
            f"training takes about {size_text(memory.needed)} and {device} has {size_text(memory.free)} free; use a "
            "smaller batch_size with more accumulation, or shorter texts"
        )
        raise InputError("batch_size", batch_size, remedy)
    return memory


def activation_bytes(learner: Learner, batch: Batch) -> int:
    """Return the bytes that a forward keeps for its backward, without weights and features.

    Torch's random state is the same afterwards; no gradient is made.
    """
    given = [*learner.parameters(), *learner.target.model.parameters(), *batch.features.values()]
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(learner.head.parameters()).device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        outcome = learner(batch)
    del outcome
    return sum(kept.values())
