"""Every number of a result file, defined once, from the rows of ``requests.jsonl``.

Functions take rows with ``status`` ``ok``, as plain mappings, and return ``None`` where a number is not defined, never
NaN and never a stand-in 0. The prefill is no round: the token that it yields counts in ``output_tokens`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]

TIME_PARTS = ("prefill", "draft", "verify", "accept", "commit", "other")
PERCENTILES = (50, 95, 99)


def check_identities(row: Row) -> None:
    """Check that a row's counters and times agree with each other.

    Raises:
        AssertionError: they do not; the loop that wrote the row has miscounted.
    """
    rounds = len(row["accepted_per_round"])
    lengths = {len(row[name]) for name in ("proposed_per_round", "proposed_nodes_per_round", "round_seconds")}
    _demand(lengths == {rounds} and len(row["bonus_per_round"]) == rounds, row, "lists of rounds differ in length")
    offered = zip(row["accepted_per_round"], row["proposed_per_round"], strict=True)
    _demand(all(taken <= depth for taken, depth in offered), row, "a round accepted more than it was offered")
    _demand(set(row["bonus_per_round"]) <= {0, 1}, row, "a round has more than one bonus token")
    if row["altered_per_round"] is not None:
        changed = zip(row["altered_per_round"], row["accepted_per_round"], strict=True)
        _demand(all(some <= taken for some, taken in changed), row, "a round altered more than it accepted")
    _demand(output_tokens([row]) == 1 + emitted([row]), row, "output_tokens is not 1 + emitted")
    parts = sum(row["time_seconds"][part] for part in TIME_PARTS)
    _demand(abs(parts - row["time_seconds"]["total"]) <= 1e-9 * (1 + parts), row, "times do not add up to the total")


def _demand(holds: bool, row: Row, fault: str) -> None:
    if not holds:
        raise AssertionError(f"{row['strategy']}, question {row['question_id']}, turn {row['turn']}: {fault}")


# --- counters ---------------------------------------------------------------------------------------------------------


def rounds(rows: Sequence[Row]) -> int:
    """Verify forwards, counted per row of a batch; prefills are not among them."""
    return sum(len(row["accepted_per_round"]) for row in rows)


def accepted(rows: Sequence[Row]) -> int:
    """Draft tokens that were emitted."""
    return sum(sum(row["accepted_per_round"]) for row in rows)


def bonus(rows: Sequence[Row]) -> int:
    """Tokens that the target added after accepted drafts and that were emitted."""
    return sum(sum(row["bonus_per_round"]) for row in rows)


def emitted(rows: Sequence[Row]) -> int:
    """Tokens that rounds produced: accepted drafts and bonus tokens."""
    return accepted(rows) + bonus(rows)


def output_tokens(rows: Sequence[Row]) -> int:
    """Tokens of the answers, EOS and each prefill's token included."""
    return sum(len(row["output_ids"]) for row in rows)


def proposed(rows: Sequence[Row]) -> int:
    """Summed depth of the offered trees: what acceptance could have reached."""
    return sum(sum(row["proposed_per_round"]) for row in rows)


def proposed_nodes(rows: Sequence[Row]) -> int:
    """Summed nodes of the offered trees without their roots."""
    return sum(sum(row["proposed_nodes_per_round"]) for row in rows)


# --- acceptance -------------------------------------------------------------------------------------------------------


def mean_acceptance_length(rows: Sequence[Row]) -> float | None:
    """Emitted tokens per round, bonus included: 1.0 for plain decoding, ``tau`` in papers."""
    return ratio(emitted(rows), rounds(rows))


def mean_accepted_drafts(rows: Sequence[Row]) -> float | None:
    """Accepted draft tokens per round, bonus excluded."""
    return ratio(accepted(rows), rounds(rows))


def acceptance_rate(rows: Sequence[Row]) -> float | None:
    """Accepted over proposed."""
    return ratio(accepted(rows), proposed(rows))


def altered(rows: Sequence[Row]) -> int | None:
    """Emitted drafts that plain decoding would not have emitted at that place with the same noise.

    Counted under a lossy acceptance rule; not defined under the others, nor without rows.
    """
    if not rows or any(row["altered_per_round"] is None for row in rows):
        return None
    return sum(sum(row["altered_per_round"]) for row in rows)


def altered_share(rows: Sequence[Row]) -> float | None:
    """Altered over emitted: the share of the tokens of rounds that are not the target's own."""
    count = altered(rows)
    return None if count is None else ratio(count, emitted(rows))


def acceptance_by_depth(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Acceptance at each draft depth; list index ``d`` stands for depth ``d + 1``.

    Returns:
        ``offered[d]``: rounds whose tree reached depth d + 1; ``joint[d]``: share of all rounds that accepted at least
        d + 1; ``conditional[d]``: share that accepted at least d + 1 among rounds offered it that accepted d.
    """
    pairs = [
        pair for row in rows for pair in zip(row["accepted_per_round"], row["proposed_per_round"], strict=True)
    ]  # (accepted, depth) per round
    deepest = max((depth for _, depth in pairs), default=0)
    offered, joint, conditional = [], [], []
    for depth in range(1, deepest + 1):
        reached = sum(taken >= depth for taken, _ in pairs)
        offered.append(sum(tree >= depth for _, tree in pairs))
        joint.append(ratio(reached, len(pairs)))
        conditional.append(ratio(reached, sum(tree >= depth and taken >= depth - 1 for taken, tree in pairs)))
    return {"offered": offered, "joint": joint, "conditional": conditional}


def accepted_histogram(rows: Sequence[Row]) -> list[int]:
    """Return how many rounds accepted 0, 1, 2, ... draft tokens, ``[largest accepted + 1]``."""
    taken = [count for row in rows for count in row["accepted_per_round"]]
    return [taken.count(value) for value in range(max(taken, default=-1) + 1)]


# --- time -------------------------------------------------------------------------------------------------------------


def total_seconds(rows: Sequence[Row]) -> float:
    """Wall time of the requests, prefill included."""
    return sum(row["time_seconds"]["total"] for row in rows)


def decode_seconds(rows: Sequence[Row]) -> float:
    """Wall time of the requests without their prefills."""
    return sum(row["time_seconds"]["total"] - row["time_seconds"]["prefill"] for row in rows)


def decode_tokens_per_second(rows: Sequence[Row]) -> float | None:
    """Emitted tokens over decode time: totals over totals, not a mean of rates."""
    return ratio(emitted(rows), decode_seconds(rows)) if emitted(rows) else None


def end_to_end_tokens_per_second(rows: Sequence[Row]) -> float | None:
    """All output tokens over all time."""
    return ratio(output_tokens(rows), total_seconds(rows)) if rows else None


def time_seconds(rows: Sequence[Row]) -> dict[str, float] | None:
    """Summed wall time by part, and their ``total``."""
    if not rows:
        return None
    parts = {part: float(sum(row["time_seconds"][part] for row in rows)) for part in TIME_PARTS}
    return {**parts, "total": sum(parts.values())}


def time_per_output_token_ms(rows: Sequence[Row]) -> dict[str, float] | None:
    """Percentiles over requests of decode time per emitted token, in milliseconds.

    The request's own share of the time, as in the rates: in a batch the shares of its rows add up to the wall time.
    """
    return percentiles([1e3 * decode_seconds([row]) / emitted([row]) for row in rows if emitted([row])])


def user_time_per_output_token_ms(rows: Sequence[Row]) -> dict[str, float] | None:
    """Percentiles over requests of the time that the request's user waited per emitted token, in milliseconds.

    In a batch a round keeps every row waiting for its whole length, and so does the prefill of a row that joins.
    """
    return percentiles([1e3 * row["decode_elapsed_seconds"] / emitted([row]) for row in rows if emitted([row])])


def round_ms(rows: Sequence[Row]) -> dict[str, float] | None:
    """Percentiles over rounds of the wall time of a whole round, in milliseconds."""
    return percentiles([1e3 * seconds for row in rows for seconds in row["round_seconds"]])


# --- arithmetic -------------------------------------------------------------------------------------------------------


def ratio(numerator: float, denominator: float) -> float | None:
    """Return the quotient, ``None`` where there is nothing to divide by."""
    return numerator / denominator if denominator else None


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return ``{"p50": ..., "p95": ..., "p99": ...}`` with linear interpolation; ``None`` of no values."""
    if not values:
        return None
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}


def counters(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the summary says about one strategy's successful rows alone, named as in ``docs/results.md``."""
    return {
        "rounds": rounds(rows),
        "proposed": proposed(rows),
        "proposed_nodes": proposed_nodes(rows),
        "accepted": accepted(rows),
        "bonus": bonus(rows),
        "emitted": emitted(rows),
        "output_tokens": output_tokens(rows),
        "mean_acceptance_length": mean_acceptance_length(rows),
        "mean_accepted_drafts": mean_accepted_drafts(rows),
        "acceptance_rate": acceptance_rate(rows),
        "altered": altered(rows),
        "altered_share": altered_share(rows),
        "acceptance_by_depth": acceptance_by_depth(rows),
        "accepted_histogram": accepted_histogram(rows),
        "decode_tokens_per_second": decode_tokens_per_second(rows),
        "end_to_end_tokens_per_second": end_to_end_tokens_per_second(rows),
        "time_seconds": time_seconds(rows),
        "time_per_output_token_ms": time_per_output_token_ms(rows),
        "user_time_per_output_token_ms": user_time_per_output_token_ms(rows),
        "round_ms": round_ms(rows),
    }
