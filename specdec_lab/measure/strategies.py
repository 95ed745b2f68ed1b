"""Strategies side by side on the same prompts: parts of one strategy, and batches of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.base import Drafter
from specdec_lab.measure.alternate import Spread, ratio, spread
from specdec_lab.target import Target

BASELINE = "autoregressive"


@dataclass(frozen=True)
class StrategyRates:
    """What one strategy did with one batch size.

    Attributes:
        tokens_per_second: decode rate, one value per alternation.
        speedup: over the baseline at the same batch size, within each alternation.
        acceptance_length: emitted tokens per round of a row, bonus included.
        nodes: mean draft nodes per round of a row.
        user_ms: per answer, wall time from first to last token over tokens: 50th, 95th and 99th percentile.
    """

    strategy: str
    batch_size: int
    tokens_per_second: tuple[float, ...]
    speedup: Spread
    acceptance_length: float
    nodes: float
    user_ms: tuple[float, float, float]


def measure_strategies(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    *,
    batch_size: int = 1,
    alternations: int = 1,
    batch_nodes: int | None = None,
    on_answer: Callable[[str], None] = lambda name: None,
) -> list[StrategyRates]:
    """Decode all prompts with every strategy, strategies taking turns batch by batch.

    Args:
        drafters: ``autoregressive`` among them; new ones for each batch size, since trees are cut by the times of
            forwards that so many rows share.
        batch_nodes: see ``speculative_decode``.
    """
    names = list(drafters)
    rates: dict[str, list[float]] = {name: [] for name in names}
    rounds, emitted, nodes = (dict.fromkeys(names, 0) for _ in range(3))
    waits: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(alternations):
        seconds, tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for at in range(0, len(prompts), batch_size):
            requests = [Request(prompt, max_new_tokens) for prompt in prompts[at : at + batch_size]]
            shift = (turn + at // batch_size) % len(names)
            for name in names[shift:] + names[:shift]:
                for event in speculative_decode(
                    target, drafters[name], requests, batch_size=len(requests), batch_nodes=batch_nodes
                ):
                    generation = event.generation
                    if generation is None or generation.error is not None:
                        continue
                    count = len(generation.output_ids) - 1
                    seconds[name] += generation.time_seconds.total - generation.time_seconds.prefill
                    tokens[name] += count
                    rounds[name] += len(generation.rounds)
                    emitted[name] += count
                    nodes[name] += sum(item.proposed_nodes for item in generation.rounds)
                    if count:
                        waits[name].append(1e3 * generation.decode_elapsed_seconds / count)
                    on_answer(name)
        for name in names:
            rates[name].append(tokens[name] / seconds[name])
    found = []
    for name in names:
        p50, p95, p99 = (float(np.percentile(waits[name], percent)) for percent in (50, 95, 99))
        found.append(
            StrategyRates(
                name,
                batch_size,
                tuple(rates[name]),
                ratio(rates, name, BASELINE),
                emitted[name] / max(1, rounds[name]),
                nodes[name] / max(1, rounds[name]),
                (p50, p95, p99),
            )
        )
    return found


def strategies_table(found: Sequence[StrategyRates], title: str) -> Table:
    """Render the measurements."""
    table = Table("strategy", "batch", "tok/s", "speed-up", "tau", "nodes", "ms per token p50 / p95 / p99", title=title)
    for one in found:
        table.add_row(
            one.strategy,
            str(one.batch_size),
            spread(one.tokens_per_second).text(1),
            "1 (baseline)" if one.strategy == BASELINE else one.speedup.text(2),
            f"{one.acceptance_length:.2f}",
            f"{one.nodes:.1f}",
            " / ".join(f"{value:.0f}" for value in one.user_ms),
        )
    return table
