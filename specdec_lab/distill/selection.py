"""Which examples are trained on, in which order, and what in them is learnt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specdec_lab.distill.batch import Example
from specdec_lab.distill.leak import words_of
from specdec_lab.distill.rendering import shared_length


def without_doubles(found: Sequence[tuple[str, Example]]) -> list[tuple[str, Example]]:
    """Drop examples that another one holds: the same text and marks, or the beginning of them."""
    groups: dict[tuple[int, ...], list[tuple[str, Example]]] = {}
    for pair in sorted(found, key=lambda pair: -len(pair[1].ids)):
        example = pair[1]
        group = groups.setdefault(example.ids[: example.supervised.index(True)], [])
        if not any(_holds(longer, example) for _, longer in group):
            group.append(pair)
    return [pair for group in groups.values() for pair in group]


def _holds(longer: Example, example: Example) -> bool:
    size = len(example.ids)
    return longer.ids[:size] == example.ids and longer.supervised[:size] == example.supervised


def in_seeded_order(found: Sequence[tuple[str, Example]], seed: int) -> list[tuple[str, Example]]:
    """Return examples in an order that depends on their ids and the seed alone."""
    return sorted(found, key=lambda pair: _digest(seed, np.array(pair[1].ids, dtype=np.int64).tobytes()))


def in_validation(first_words: str, seed: int, share: float) -> bool:
    """Return whether a question is validated on: a matter of its words alone, so that more data moves none of them."""
    return _digest(seed, " ".join(words_of(first_words)).encode()) < share * 2**64


def first_tokens(examples: Sequence[Example], limit: int | None) -> list[Example]:
    """Return examples from the start until they have ``limit`` labels, so that a smaller limit gives a subset."""
    chosen: list[Example] = []
    labels = 0
    for example in examples:
        if limit is not None and labels >= limit:
            break
        chosen.append(example)
        labels += example.labels
    return chosen


def with_prompts_learnt(examples: Sequence[Example], opening: Sequence[int]) -> list[Example]:
    """Mark the tokens of prompts as labels too, except those that the template opens every text with.

    The target has a law after every token, whoever wrote it, and the forwards that make it for the answers make it for
    the prompts. Heads are measured and their vocabularies chosen by the answers alone.

    Args:
        opening: see ``template_opening``.
    """
    found: list[Example] = []
    for example in examples:
        first = max(1, shared_length(example.ids, opening))  # nothing can foresee the first token
        marks = tuple(mark or at >= first for at, mark in enumerate(example.supervised))
        found.append(replace(example, supervised=marks))
    return found


def _digest(seed: int, data: bytes) -> int:
    """Return 64 bits that depend on seed and data alone."""
    digest = hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")
