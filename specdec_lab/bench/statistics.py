"""Speed-ups: ratios of paired runs, with an interval that says how far to trust them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from specdec_lab.bench.metrics import Row, decode_seconds, emitted, output_tokens, total_seconds

RESAMPLES = 2000
CONFIDENCE = 0.95

RequestKey = tuple[Hashable, int, int]
"""Question, turn and repeat."""

Pair = tuple[Row, Row]
"""A strategy's row and the baseline's row of the same question, turn and repeat."""


@dataclass(frozen=True)
class Rate:
    """Tokens over seconds, as two sums over rows."""

    tokens: Callable[[Sequence[Row]], int]
    seconds: Callable[[Sequence[Row]], float]


DECODE = Rate(emitted, decode_seconds)
END_TO_END = Rate(output_tokens, total_seconds)


def request_key(row: Row) -> RequestKey:
    """Return what two strategies' rows share when they decoded the same request: question, turn, repeat."""
    return row["question_id"], row["turn"], row["repeat"]


def paired(rows: Sequence[Row], baseline_rows: Sequence[Row]) -> list[Pair]:
    """Match successful rows by question, turn and repeat; a request that failed on either side is left out."""
    baseline = {request_key(row): row for row in baseline_rows if row["status"] == "ok"}
    return [(row, baseline[request_key(row)]) for row in rows if row["status"] == "ok" and request_key(row) in baseline]


def speedup(pairs: Sequence[Pair], rate: Rate, baseline: str, seed: int) -> dict[str, Any]:
    """Return the ratio of a strategy's rate to the baseline's over the same requests.

    Pairs in which either side has no tokens to speak of (an answer that ended with the prefill has no decode rate)
    take no part.

    Returns:
        ``ratio_of_totals``: all tokens over all seconds, divided by the same of the baseline; ``mean_of_ratios``: mean
        over requests of the request's own ratio; ``ci95``: paired bootstrap interval of ``ratio_of_totals`` over
        prompts, null with fewer than two; ``baseline``: its name.
    """
    usable = [pair for pair in pairs if all(rate.tokens([row]) and rate.seconds([row]) > 0 for row in pair)]
    if not usable:
        return {"ratio_of_totals": None, "mean_of_ratios": None, "ci95": None, "baseline": baseline}
    totals = [_totals([pair], rate) for pair in usable]
    return {
        "ratio_of_totals": float(_ratio_of_totals(*_totals(usable, rate))),
        "mean_of_ratios": float(np.mean([_ratio_of_totals(*values) for values in totals])),
        "ci95": _interval(usable, rate, seed),
        "baseline": baseline,
    }


def _totals(pairs: Sequence[Pair], rate: Rate) -> NDArray[np.float64]:
    """Return tokens and seconds of the strategy, then of the baseline, ``[4]``."""
    mine, base = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return np.array([rate.tokens(mine), rate.seconds(mine), rate.tokens(base), rate.seconds(base)], dtype=np.float64)


def _ratio_of_totals(tokens: Any, seconds: Any, base_tokens: Any, base_seconds: Any, axis: int = -1) -> Any:
    mine = np.sum(tokens, axis=axis) / np.sum(seconds, axis=axis)
    return mine / (np.sum(base_tokens, axis=axis) / np.sum(base_seconds, axis=axis))


def _interval(pairs: Sequence[Pair], rate: Rate, seed: int) -> list[float] | None:
    """Resample prompts, with all their turns and repeats, on both sides at once."""
    by_prompt: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair[0]["question_id"], []).append(pair)
    if len(by_prompt) < 2:
        return None
    columns = np.stack([_totals(group, rate) for group in by_prompt.values()], axis=1)  # [4, prompts]
    return percentile_interval(columns, _ratio_of_totals, seed)


def percentile_interval(
    columns: NDArray[np.float64], statistic: Callable[..., NDArray[np.float64]], seed: int
) -> list[float]:
    """Return the percentile bootstrap interval of a statistic whose columns are resampled together.

    Args:
        columns: ``[columns, prompts]``, two prompts or more.
        statistic: of the columns, with ``axis``.
    """
    found = bootstrap(
        tuple(columns),
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",  # BCa is undefined where all prompts agree
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return [float(found.low), float(found.high)]
