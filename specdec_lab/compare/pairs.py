"""Two strategies over the requests that both decoded: how their speeds compare, and how sure that is.

A speed here is a decode rate over that of the baseline of the same run. Within a run the baseline is the same on both
sides and drops out; between runs it takes out what made one run faster as a whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_lab.bench.statistics import RequestKey, percentile_interval
from specdec_lab.compare.entries import Entry

SWAPS = 10_000
"""Random exchanges of a permutation test; with few prompts every possible one is tried instead."""

Columns = NDArray[np.float64]
"""Tokens, seconds, the baseline's tokens, the baseline's seconds; first strategy, then second: ``[8, ...]``."""

EQUAL_WITHIN = 1e-12
"""Logarithms of ratios this close are one value in another order of summation."""


def shared_requests(first: Entry, second: Entry) -> list[RequestKey]:
    """Return the requests that both and both baselines have finished, and whose prompts are the same tokens in both.

    In the order in which the first finished them, as in its run's own bootstrap.
    """
    keys = first.baseline.keys() & second.requests.keys() & second.baseline.keys()
    return [key for key in first.requests if key in keys and first.texts.get(key) == second.texts.get(key)]


def request_columns(first: Entry, second: Entry, keys: Sequence[RequestKey]) -> Columns:
    """Return tokens and seconds of each request, ``[8, requests]``."""
    sides = (first.requests, first.baseline, second.requests, second.baseline)
    return np.array(
        [[float(side[key][part]) for key in keys] for side in sides for part in (0, 1)], dtype=np.float64
    ).reshape(8, len(keys))


def prompt_sums(columns: Columns, questions: Sequence[Hashable]) -> Columns:
    """Sum requests, turns and repeats alike, by prompt.

    Args:
        columns: ``[8, requests]``.
        questions: of each request.

    Returns:
        ``[8, prompts]``, prompts in the order in which they occur.
    """
    place = {question: index for index, question in enumerate(dict.fromkeys(questions))}
    where = [place[question] for question in questions]
    summed = [np.bincount(where, weights=line, minlength=len(place)) for line in columns]
    return np.array(summed, dtype=np.float64)


def log_ratio(columns: Columns) -> NDArray[np.float64]:
    """Return the logarithm of the first strategy's speed over the second's, of sums ``[8, ...]``."""
    tokens, seconds, base_tokens, base_seconds = np.log(columns[:4]) - np.log(columns[4:])
    return (tokens - seconds) - (base_tokens - base_seconds)


def statistics_of_pair(columns: Columns, questions: Sequence[Hashable], seed: int) -> dict[str, Any]:
    """Compare two strategies over some requests.

    Args:
        columns: ``[8, requests]``.
        questions: of each request; requests of one question are one observation.
        seed: of the bootstrap and of the exchanges.

    Returns:
        ``prompts`` and ``requests``: their numbers; ``ratio_of_totals``: the first strategy's speed over the second's,
        all tokens over all seconds; ``mean_of_ratios``: mean over requests of the request's own ratio; ``ci95``:
        bootstrap interval of ``ratio_of_totals`` over prompts; ``p_value``: see ``exchange_p_value``. The last two are
        null with fewer than two prompts, all four without any request.
    """
    found: dict[str, Any] = {"prompts": len(set(questions)), "requests": len(questions)}
    if not questions:
        return {**found, "ratio_of_totals": None, "mean_of_ratios": None, "ci95": None, "p_value": None}
    sums = prompt_sums(columns, questions)
    several = sums.shape[1] > 1
    return {
        **found,
        "ratio_of_totals": float(np.exp(log_ratio(sums.sum(axis=1)))),
        "mean_of_ratios": float(np.mean(np.exp(log_ratio(columns)))),
        "ci95": interval(sums, seed) if several else None,
        "p_value": exchange_p_value(sums, seed) if several else None,
    }


def interval(sums: Columns, seed: int) -> list[float]:
    """Return the 95 % percentile bootstrap interval of the ratio of totals; all sides are resampled at once.

    Args:
        sums: ``[8, prompts]``, two prompts or more.
    """
    return percentile_interval(
        sums, lambda *sides, axis: np.exp(log_ratio(np.stack([side.sum(axis=axis) for side in sides]))), seed
    )


def exchange_p_value(sums: Columns, seed: int) -> float:
    """Return how often exchanging the two strategies, prompt by prompt, makes a difference as large as the one seen.

    If the two are equally fast, which of them a measurement belongs to is chance, so every exchange is as likely as
    what was seen (a paired permutation test, two-sided, of the ratio of totals). Prompts keep their weights.

    Args:
        sums: ``[8, prompts]``.
    """
    count = sums.shape[1]
    exact = 2**count <= SWAPS
    if exact:
        swapped = (np.arange(2**count)[:, None] >> np.arange(count) & 1).astype(np.float64)  # [exchanges, prompts]
    else:
        swapped = np.random.default_rng(seed).integers(0, 2, (SWAPS, count)).astype(np.float64)
    gained = swapped @ (sums[4:] - sums[:4]).T  # [exchanges, 4]: what the first strategy's sums gain
    totals = sums.sum(axis=1)
    seen = log_ratio(totals)
    exchanged = log_ratio(np.concatenate([totals[:4] + gained, totals[4:] - gained], axis=1).T)
    extreme = int(np.sum(np.abs(exchanged) >= np.abs(seen) - EQUAL_WITHIN))
    return extreme / len(swapped) if exact else (1 + extreme) / (1 + len(swapped))


def baseline_ratio(sums: Columns) -> float:
    """Return the first run's baseline rate over the second run's, of sums ``[8, prompts]``."""
    totals = sums.sum(axis=1)
    return float((totals[2] / totals[3]) / (totals[6] / totals[7]))
