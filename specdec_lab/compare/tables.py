"""A comparison as tables: for a terminal, and as ``comparison.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from specdec_lab.bench.console import plain_table, speedup_text
from specdec_lab.bench.summary import to_csv
from specdec_lab.compare.comparison import Comparison
from specdec_lab.compare.verdicts import LEVEL, SHOWN_DIGITS

STRATEGY_CAPTION = (
    "prompts: that the speed-up counts. tau: emitted tokens per verify round, bonus token included. tok/s: emitted "
    "tokens over decode time. speed-up: over the baseline of the same run, [95 % bootstrap interval over prompts]. "
    "round ms: mean time of a round, and of it draft and verify. break-even: tokens a round has to emit to be as fast "
    "as the baseline."
)

PAIR_CAPTION = (
    "ratio: speed of the first over the second's, each over the baseline of its run, all tokens over all seconds; "
    f"[95 % bootstrap interval over prompts]. p: of a paired permutation test, corrected for all pairs (Holm); above "
    f"{LEVEL:g} nothing is told. unlike: what the two differ in besides the strategy."
)


def strategy_table(comparison: Comparison) -> Table:
    """Return one line per strategy and run."""
    table = plain_table("strategies", STRATEGY_CAPTION)
    table.add_column("strategy", overflow="fold")
    for name in ("prompts", "tau", "tok/s", "speed-up", "round ms", "draft / verify", "break-even"):
        table.add_column(name, justify="right", overflow="fold")
    for entry in comparison.entries:
        numbers, costs = entry["numbers"], entry["ledger"]
        parts = costs["round_parts_ms"]
        table.add_row(
            escape(entry["label"]) + ("" if numbers["lossless"] else " (lossy)"),
            str(entry["prompts"]),
            number(numbers["mean_acceptance_length"], 2),
            number(numbers["decode_tokens_per_second"], 1),
            speedup_text(numbers["speedup"], numbers["name"]),
            number(costs["cycle_ms"], 1),
            "-" if parts is None else f"{parts['draft']:.1f} / {parts['verify']:.1f}",
            number(costs["break_even_acceptance_length"], 2),
        )
    return table


def pair_table(comparison: Comparison) -> Table:
    """Return one line per pair of strategies."""
    unlike = any(pair["unlike"] for pair in comparison.pairs)
    table = plain_table("pairs", PAIR_CAPTION)
    for name in ("first", "verdict", "second"):
        table.add_column(name, overflow="fold")
    for name in ("ratio", "p", "prompts"):
        table.add_column(name, justify="right", overflow="fold")
    if unlike:
        table.add_column("unlike", overflow="fold")
    for pair in comparison.pairs:
        cells = (
            escape(pair["first"]),
            verdict_text(pair),
            escape(pair["second"]),
            ratio_text(pair),
            p_text(pair["p_corrected"]),
            str(pair["prompts"]),
        )
        table.add_row(*cells, *([", ".join(pair["unlike"])] if unlike else []))
    return table


def verdict_text(pair: Mapping[str, Any]) -> str:
    """Return a verdict as it reads between two names."""
    return f"{pair['verdict']} than" if pair["reason"] is None else f"{pair['verdict']} ({pair['reason']})"


def ratio_text(pair: Mapping[str, Any]) -> str:
    """Return a ratio with its interval; without one if there is none."""
    if pair["ratio_of_totals"] is None:
        return "-"
    text = f"{pair['ratio_of_totals']:.{SHOWN_DIGITS}f}x"
    if pair["ci95"] is None:
        return text
    low, high = pair["ci95"]
    return f"{text} [{low:.{SHOWN_DIGITS}f}, {high:.{SHOWN_DIGITS}f}]"


def p_text(value: float | None) -> str:
    """Return a p-value in three decimals."""
    if value is None:
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def number(value: float | None, digits: int) -> str:
    """Return a number with so many decimals, a dash where it is undefined."""
    return "-" if value is None else f"{value:.{digits}f}"


def comparison_csv(comparison: Comparison) -> str:
    """Return one line per strategy and run: the columns of ``summary.csv`` between those of the comparison."""
    lines = []
    for entry in comparison.entries:
        own = {name: entry[name] for name in ("label", "run", "prompts")}
        theirs = {name: value for name, value in entry["spec_bench"].items() if name != "by_task"}
        costs = {name: entry[name] for name in ("ledger", "budget")}
        lines.append({**own, **entry["numbers"], **costs, "spec_bench": theirs})
    return to_csv({"strategies": lines})
