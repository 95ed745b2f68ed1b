"""The plan of a training as pure functions: which examples make up a step, and its learning rate.

Nothing here depends on what happened before, so a training that goes on at step *s* goes on with what an uninterrupted
one would do there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import torch

Shape = Literal["cosine", "linear", "constant"]
"""How the learning rate falls after the warm-up."""


def derived_seed(*parts: int | str) -> int:
    """Return a seed for ``torch.manual_seed`` that differs wherever one of the parts does."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def groups_in_epoch(examples: int, group_size: int) -> int:
    """Return the optimizer steps of an epoch; an incomplete last group is a step too."""
    return math.ceil(examples / group_size)


def planned_steps(examples: int, group_size: int, epochs: int, max_steps: int | None) -> int:
    """Return the optimizer steps of a whole training."""
    steps = epochs * groups_in_epoch(examples, group_size)
    return steps if max_steps is None else min(steps, max_steps)


def epoch_order(examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the indices of all examples in the order in which an epoch visits them."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "epoch", epoch))
    return tuple(torch.randperm(examples, generator=generator).tolist())


def step_examples(order: Sequence[int], step: int, group_size: int) -> tuple[int, ...]:
    """Return the indices that an optimizer step takes, over all micro-batches and processes.

    Args:
        order: of the step's own epoch, see ``epoch_order``.
        step: counted from 0 over the whole training.
    """
    start = step % groups_in_epoch(len(order), group_size) * group_size
    return tuple(order[start : start + group_size])


def rank_slices(
    group: Sequence[int], lengths: Sequence[int], batch_size: int, processes: int, rank: int
) -> list[tuple[int, ...]]:
    """Return the micro-batches of one process, in order.

    The group is sorted by length first, so that micro-batches hold little padding; their sum stays the same. Every
    process gets the same number of micro-batches, some of them empty where the group does not fill them.

    Args:
        group: indices of examples.
        lengths: tokens of every example, by index.
        batch_size: most examples of a micro-batch.
    """
    by_length = sorted(group, key=lambda index: (-lengths[index], index))
    share = batch_size * processes
    starts = range(rank * batch_size, math.ceil(len(group) / share) * share, share)
    return [tuple(by_length[start : start + batch_size]) for start in starts]


def learning_rate(step: int, steps: int, peak: float, shape: Shape, warmup_steps: int, floor: float) -> float:
    """Return the learning rate of an optimizer step.

    It rises by equal parts to ``peak`` over the warm-up, then falls towards ``floor * peak`` at the end.

    Args:
        step: counted from 0.
        steps: of the whole training.
        peak: the largest learning rate.
        floor: share of ``peak`` that is left at the end; without a meaning for ``constant``.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if shape == "constant":
        return peak
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    left = 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (floor + (1 - floor) * left)
