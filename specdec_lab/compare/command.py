"""The command line of a comparison: from run folders to tables, files and an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from specdec_lab.bench.console import result_console
from specdec_lab.bench.files import REPORT
from specdec_lab.command import SUCCESS, concluded, parsed, say
from specdec_lab.compare.comparison import Comparison, compare
from specdec_lab.compare.files import check_out, write_comparison
from specdec_lab.compare.tables import pair_table, strategy_table


def compare_main(words: Sequence[str] | None = None) -> int:
    """Compare run folders as the command line says and return the exit code.

    Args:
        words: of the command line without the program's name; ``None`` takes this process's.
    """
    out, err = result_console(), Console(stderr=True)
    options = parsed(_parser(), words)
    return options if isinstance(options, int) else concluded(lambda: _compare(options, out), err)


def _compare(options: argparse.Namespace, out: Console) -> int:
    folder = options.out or Path("outputs", "compare", datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    check_out(folder, overwrite=options.overwrite)
    comparison = compare(options.run_dirs, allow=options.allow, equal=options.equal)
    write_comparison(folder, comparison)
    show(comparison, out)
    say(out, f"results: {folder}; the page: {folder / REPORT}")
    return SUCCESS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare.py", description="Compare the strategies of finished benchmark runs.", allow_abbrev=False
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a finished benchmark")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the results (default: outputs/compare/TIME)")
    parser.add_argument(
        "--allow", type=_names, default=(), metavar="FACT,...", help="what the runs may differ in, as dtype,versions"
    )
    parser.add_argument(
        "--equal",
        type=_names,
        default=(),
        metavar="BUDGET,...",
        help="what all strategies that draft must have in common: nodes, draft_weights, training_tokens",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier comparison in the folder")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def show(comparison: Comparison, out: Console) -> None:
    """Print the tables, what the runs differ in, and what limits the comparison."""
    out.print(strategy_table(comparison))
    out.print(pair_table(comparison))
    for one in comparison.differences:
        say(out, f"The runs differ in {one.fact}: {one.effect}.")
    for sentence in (*comparison.explanations, *comparison.notices):
        say(out, sentence)
