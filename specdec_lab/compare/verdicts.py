"""Which of two strategies is faster, for every pair at once, and never more than the numbers allow."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from specdec_lab.compare.comparable import Difference
from specdec_lab.compare.entries import Entry
from specdec_lab.compare.pairs import (
    EQUAL_WITHIN,
    baseline_ratio,
    prompt_sums,
    request_columns,
    shared_requests,
    statistics_of_pair,
)

LEVEL = 0.05
"""Largest chance of even one wrong "faster" or "slower" among all pairs."""

SHOWN_DIGITS = 2
"""Decimals of a ratio wherever it is shown; a verdict is that of the numbers shown."""

Verdict = Literal["faster", "slower", "cannot tell"]


def all_pairs(entries: Sequence[Entry], differences: Sequence[Difference], seed: int) -> list[dict[str, Any]]:
    """Compare every two strategies, overall and by category, and correct for how many pairs that makes.

    Baselines of different runs are not compared: each speed is relative to its own. In a pair with a baseline the
    baseline comes second.

    Args:
        differences: what the runs differ in.
        seed: of bootstrap and permutations.

    Returns:
        One mapping per pair: ``first`` and ``second``, their labels; ``unlike``, names of what the two differ in
        besides the strategy; ``baseline_ratio``, the first one's run's baseline over the second's; what
        ``statistics_of_pair`` returns; ``p_corrected``, ``verdict`` and ``reason``; ``by_category``, the same numbers
        for each category. Overall verdicts are one family for the correction, those of categories another.
    """
    found = [_pair(first, second, differences, seed) for first, second in _chosen(entries)]
    inner = iter(_decided([one for pair in found for one in pair["by_category"].values()]))
    return [
        {**pair, "by_category": {category: next(inner) for category in pair["by_category"]}} for pair in _decided(found)
    ]


def _chosen(entries: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    found = []
    for place, one in enumerate(entries):
        for other in entries[place + 1 :]:
            if one.is_baseline and other.is_baseline:
                continue
            if (one.is_baseline or other.is_baseline) and one.run != other.run:
                continue  # over its own run's baseline a strategy is in the list already, with the same ratio
            found.append((one, other) if other.is_baseline else (other, one))
    return found


def _pair(first: Entry, second: Entry, differences: Sequence[Difference], seed: int) -> dict[str, Any]:
    keys = shared_requests(first, second)
    columns = request_columns(first, second, keys)
    questions = [key[0] for key in keys]
    unlike = _unlike(first, second, differences)
    drift = baseline_ratio(prompt_sums(columns, questions)) if keys and first.run != second.run else None
    common = {"baseline_ratio": drift, "unlike": unlike}
    overall = {**common, **statistics_of_pair(columns, questions, seed)}
    categories = [first.requests[key].category for key in keys]
    if len(set(categories)) == 1:
        return {"first": first.label, "second": second.label, **overall, "by_category": {categories[0]: overall}}
    by_category = {}
    for category in sorted(set(categories)):
        chosen = [place for place, name in enumerate(categories) if name == category]
        inner = statistics_of_pair(columns[:, chosen], [questions[place] for place in chosen], seed)
        by_category[category] = {**common, **inner}
    return {"first": first.label, "second": second.label, **overall, "by_category": by_category}


def _unlike(first: Entry, second: Entry, differences: Sequence[Difference]) -> list[str]:
    """Return what tells the two apart besides the strategy."""
    found = [one.fact for one in differences if one.values[first.run] != one.values[second.run]]
    lossy = first.numbers["lossless"] != second.numbers["lossless"]
    return [*found, "lossless"] if lossy else found


def _decided(family: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each pair of one family with ``p_corrected``, ``verdict`` and ``reason``."""
    found = []
    for pair, corrected in zip(family, holm([pair["p_value"] for pair in family]), strict=True):
        judged = {**pair, "p_corrected": corrected}
        word, reason = verdict(judged)
        found.append({**judged, "verdict": word, "reason": reason})
    return found


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p-values for their number (Holm 1979), so that one wrong rejection among all is as rare as in one test.

    Args:
        p_values: undefined ones stay undefined and count as no test.

    Returns:
        In the same order: the smallest times their number, the next times one less, ..., never falling, at most 1.
    """
    defined = sorted((value, place) for place, value in enumerate(p_values) if value is not None)
    found: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (value, place) in enumerate(defined):
        highest = max(highest, min(1.0, value * (len(defined) - rank)))
        found[place] = highest
    return found


def verdict(pair: Mapping[str, Any]) -> tuple[Verdict, str | None]:
    """Return whether the first strategy is faster, and if that cannot be told, why.

    Between runs that agree in everything, the two baselines should be equally fast. How far they are not shows what a
    run can do to a strategy, so a smaller difference is not told.
    """
    if not pair["prompts"]:
        return "cannot tell", "no request in common"
    if pair["p_corrected"] is None:
        return "cannot tell", "one prompt"
    if 2 ** (1 - pair["prompts"]) > LEVEL:  # the p-value of the clearest outcome that so many prompts can have
        return "cannot tell", "too few prompts"
    if pair["p_corrected"] > LEVEL:
        return "cannot tell", "within the noise"
    low, high = (round(bound, SHOWN_DIGITS) for bound in pair["ci95"])
    if low <= 1 <= high:
        return "cannot tell", "the interval holds 1"
    difference = abs(math.log(pair["ratio_of_totals"]))
    drift = pair["baseline_ratio"]
    if drift is not None and not _changes_speed(pair["unlike"]) and difference <= abs(math.log(drift)) + EQUAL_WITHIN:
        return "cannot tell", "the runs' baselines differ as much"
    return ("faster" if low > 1 else "slower"), None


def _changes_speed(unlike: Collection[str]) -> bool:
    """Return whether two runs' baselines may differ for a reason that is named."""
    return bool(set(unlike) - {"repeats", "seed", "git_sha", "complete", "lossless"})
