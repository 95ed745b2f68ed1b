"""Where a round's time goes: why a strategy that accepts more can still be slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_lab.bench.metrics import Row, ratio

ROUND_PARTS = ("draft", "verify", "accept", "commit", "other")
"""Parts of a round; the prefill is no round."""


def ledger(numbers: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a round of a strategy costs and what it has to emit to be worth it.

    Args:
        numbers: the strategy's entry of ``summary.json``.
        baseline: the baseline's entry of the same run.

    Returns:
        ``round_parts_ms``: mean milliseconds per round of each part; ``cycle_ms``: their sum; ``baseline_cycle_ms``:
        the same of the baseline; ``nodes_per_round``: mean nodes of a verify forward, root included;
        ``extra_verify_ms``: what the forward takes beyond the baseline's over one node; ``extra_node_ms``: that per
        node beyond the root; ``break_even_acceptance_length``: tokens that a round has to emit to be as fast as the
        baseline, ``cycle_ms / baseline_cycle_ms``; ``predicted_speedup``: ``mean_acceptance_length`` over that.
        Undefined ones are null.
    """
    parts, base_parts = _parts_ms(numbers), _parts_ms(baseline)
    cycle = None if parts is None else sum(parts.values())
    base_cycle = None if base_parts is None else sum(base_parts.values())
    nodes = None if not numbers["rounds"] else 1 + numbers["proposed_nodes"] / numbers["rounds"]
    extra = None if parts is None or base_parts is None else parts["verify"] - base_parts["verify"]
    even = None if cycle is None or base_cycle is None else ratio(cycle, base_cycle)
    length = numbers["mean_acceptance_length"]
    return {
        "round_parts_ms": parts,
        "cycle_ms": cycle,
        "baseline_cycle_ms": base_cycle,
        "nodes_per_round": nodes,
        "extra_verify_ms": extra,
        "extra_node_ms": None if extra is None or nodes is None else ratio(extra, nodes - 1),
        "break_even_acceptance_length": even,
        "predicted_speedup": None if length is None or even is None else ratio(length, even),
    }


def _parts_ms(numbers: Mapping[str, Any]) -> dict[str, float] | None:
    if not numbers["rounds"] or numbers["time_seconds"] is None:
        return None
    return {part: 1e3 * numbers["time_seconds"][part] / numbers["rounds"] for part in ROUND_PARTS}


def budget(rows: Sequence[Row], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a strategy was allowed to spend.

    Args:
        rows: its successful rows.
        numbers: its entry of ``summary.json``.

    Returns:
        ``nodes``: of the largest tree that it offered, root included; ``draft_weights``: bytes of the drafter's
        parameters; ``training_tokens``: labels that they were trained on, where they say.
    """
    largest = max((nodes for row in rows for nodes in row["proposed_nodes_per_round"]), default=None)
    return {
        "nodes": None if largest is None else 1 + largest,
        "draft_weights": numbers["memory_bytes"]["draft_weights"],
        "training_tokens": numbers["draft_training_tokens"],
    }


def explanations(entries: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each pair in which the strategy that accepts more is the slower one.

    Args:
        entries: and ``pairs`` of a comparison; only pairs with a verdict count.
    """
    by_label = {entry["label"]: entry for entry in entries}
    found = []
    for pair in pairs:
        if pair["verdict"] == "cannot tell":
            continue
        fast, slow = (pair["first"], pair["second"])[:: 1 if pair["verdict"] == "faster" else -1]
        sentence = _explained(by_label[slow], by_label[fast])
        if sentence is not None:
            found.append(sentence)
    return found


def _explained(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> str | None:
    more, less = (entry["numbers"]["mean_acceptance_length"] for entry in (slow, fast))
    mine, theirs = slow["ledger"], fast["ledger"]
    if more is None or less is None or more <= less or mine["cycle_ms"] is None or theirs["cycle_ms"] is None:
        return None
    gaps = {part: mine["round_parts_ms"][part] - theirs["round_parts_ms"][part] for part in ROUND_PARTS}
    dearest = sorted((part for part in ROUND_PARTS if gaps[part] > 0), key=lambda part: -gaps[part])[:2]
    where = " and ".join(f"{part} +{gaps[part]:.1f} ms" for part in dearest)
    needed = mine["break_even_acceptance_length"]
    even = "" if needed is None else f"; it needs {needed:.2f} tokens a round to match its baseline"
    return (
        f"{slow['label']} emits more per round than {fast['label']} ({more:.2f} against {less:.2f} tokens) and is "
        f"still slower: a round takes {mine['cycle_ms']:.1f} ms against {theirs['cycle_ms']:.1f}"
        f"{f' ({where})' if where else ''}{even}."
    )
