"""What a round costs outside the forwards, and whether anything grows with the text or with the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from rich.table import Table

from specdec_lab.decode import Generation, Request, speculative_decode
from specdec_lab.drafters.base import Drafter
from specdec_lab.errors import InputError
from specdec_lab.measure.alternate import Spread, spread
from specdec_lab.target import Target

STRIDE = 97
"""Tokens between the places at which repeats begin."""


@dataclass(frozen=True)
class RoundCost:
    """Cost of a strategy's rounds at one length of history.

    Attributes:
        outside_ms: milliseconds per round outside the target's forward, one value per answer.
        outside_share: share of decode time outside the target's forward, in percent.
    """

    strategy: str
    history: int
    outside_ms: Spread
    outside_share: Spread


def measure_round_cost(
    target: Target,
    drafters: dict[str, Drafter],
    prompt: Sequence[int],
    histories: Sequence[int],
    max_new_tokens: int,
    repeats: int = 3,
    on_answer: Callable[[], None] = lambda: None,
) -> list[RoundCost]:
    """Decode behind histories of several lengths, cut from a repeated prompt, strategies taking turns.

    Each repeat begins at another place of the prompt. An answer that ends with its first token has no round, and is
    not counted.

    Raises:
        InputError: all answers behind a history ended so.
    """
    costs = []
    for history in histories:
        samples: dict[str, list[Generation]] = {name: [] for name in drafters}
        for at in range(repeats):
            ids = repeated(prompt[at * STRIDE % len(prompt) :], history)
            for name, drafter in drafters.items():
                samples[name].append(_decode(target, drafter, ids, max_new_tokens))
                on_answer()
        for name, answers in samples.items():
            generations = [answer for answer in answers if answer.rounds]
            if not generations:
                remedy = f"every answer behind {history} tokens ended at once; give other prompts"
                raise InputError("prompts.path", None, remedy)
            outside = [1e3 * _outside_seconds(g) / max(1, len(g.rounds)) for g in generations]
            share = [100 * _outside_seconds(g) / _decode_seconds(g) for g in generations]
            costs.append(RoundCost(name, history, spread(outside), spread(share)))
    return costs


def measure_memory(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[tuple[int, ...]],
    requests: int,
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[list[int], bool]:
    """Run many requests one after another.

    Returns:
        Resident bytes of the process after each request, and whether the cache buffers stayed where they were.
    """
    process, resident = psutil.Process(), []
    target.allocate(1, max(map(len, prompts)) + 8, drafter.max_nodes)
    places = set()
    for at in range(requests):
        _decode(target, drafter, prompts[at % len(prompts)], 8)
        places.add(target.cache.address)
        resident.append(process.memory_info().rss)
        on_answer()
    return resident, len(places) == 1


def repeated(text: Sequence[int], length: int) -> list[int]:
    """Return the first ``length`` tokens of a text that starts anew where it ends."""
    return (list(text) * (length // len(text) + 1))[:length]


def _decode(target: Target, drafter: Drafter, ids: Sequence[int], max_new_tokens: int) -> Generation:
    (*_, last) = speculative_decode(target, drafter, [Request(tuple(ids), max_new_tokens)])
    assert last.generation is not None
    return last.generation


def _decode_seconds(generation: Generation) -> float:
    return generation.time_seconds.total - generation.time_seconds.prefill


def _outside_seconds(generation: Generation) -> float:
    return _decode_seconds(generation) - generation.time_seconds.verify


def round_cost_table(costs: Sequence[RoundCost]) -> Table:
    """Render the measurements."""
    table = Table("strategy", "history", "outside the forward, ms per round", "share of decode time, %")
    for cost in costs:
        table.add_row(cost.strategy, str(cost.history), cost.outside_ms.text(2), cost.outside_share.text(1))
    return table
