"""In which order a run decodes: strategies interleaved prompt by prompt, in an order that rotates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec_lab.bench.prompts import Prompt

BATCHES_PER_BLOCK = 4
"""Prompts per block in batches: enough that rows which end early are filled again most of the time."""


@dataclass(frozen=True)
class Block:
    """Prompts that every strategy decodes, one strategy after the other, before the next block begins.

    Attributes:
        turn: which turn of each prompt; only prompts that have it are in the block.
        order: names of the strategies, as they take their turns.
    """

    repeat: int
    turn: int
    prompts: tuple[Prompt, ...]
    order: tuple[str, ...]


def blocks(prompts: Sequence[Prompt], strategies: Sequence[str], repeats: int, batch_size: int) -> Iterator[Block]:
    """Yield the blocks of a run.

    The machine drifts (heat, other load), so strategies share every stretch of time; whoever comes first in a block
    comes last in another, and a repeat of a prompt starts with another strategy than the repeat before.
    """
    size = 1 if batch_size == 1 else BATCHES_PER_BLOCK * batch_size
    for repeat in range(repeats):
        for number, start in enumerate(range(0, len(prompts), size)):
            members = prompts[start : start + size]
            for turn in range(max(len(prompt.turns) for prompt in members)):
                at = (number + repeat + turn) % len(strategies)
                present = tuple(prompt for prompt in members if turn < len(prompt.turns))
                yield Block(repeat, turn, present, (*strategies[at:], *strategies[:at]))
