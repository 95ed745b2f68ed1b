"""Time of one verify forward by attention function, nodes and history: the table of decision 0001."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from rich.table import Table

from specdec_lab.attention import PACKED_ATTENTION
from specdec_lab.measure.alternate import Spread, spread
from specdec_lab.target import Target
from specdec_lab.tree import chain

IMPLEMENTATIONS = ("sdpa", PACKED_ATTENTION, "eager")


def measure_attention(
    target: Target,
    histories: Sequence[int] = (128, 1024, 4096, 8000),
    nodes: Sequence[int] = (1, 8, 16, 32),
    repeats: int = 5,
    on_step: Callable[[], None] = lambda: None,
) -> dict[tuple[int, int, str], Spread]:
    """Return milliseconds of one forward per ``(history tokens, nodes, implementation)``, interleaved.

    The model's attention function is set back afterwards.
    """
    before = target.model.config._attn_implementation
    results: dict[tuple[int, int, str], Spread] = {}
    try:
        for history in histories:
            target.allocate(1, history + max(nodes), max(nodes))
            target.prefill(0, torch.arange(10, 10 + history).remainder(target.vocab_size).tolist())
            for count in nodes:
                tree = chain(11, [12 + at for at in range(count - 1)])
                times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
                for repeat in range(repeats + 1):
                    for name in IMPLEMENTATIONS:
                        target.set_attention(name)
                        target.synchronize()
                        start = time.perf_counter()
                        target.forward({0: tree})
                        target.synchronize()
                        if repeat:  # the first one warms up
                            times[name].append(1e3 * (time.perf_counter() - start))
                results |= {(history, count, name): spread(values) for name, values in times.items()}
                on_step()
    finally:
        target.set_attention(before)
    return results


def attention_table(results: dict[tuple[int, int, str], Spread]) -> Table:
    """Render the measurements, one row per history and node count."""
    table = Table("history", "nodes", *(f"{name}, ms" for name in IMPLEMENTATIONS), title="One verify forward")
    for history, count in sorted({key[:2] for key in results}):
        table.add_row(str(history), str(count), *(results[history, count, name].text(1) for name in IMPLEMENTATIONS))
    return table
