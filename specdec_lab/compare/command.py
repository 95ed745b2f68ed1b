"""The command line of a comparison: from run folders to tables, files and an exit code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from specdec_lab.bench.command import REFUSED, SUCCESS, say, say_error
from specdec_lab.bench.console import result_console
from specdec_lab.bench.files import StorageError, write_atomically
from specdec_lab.compare.comparison import Comparison, compare
from specdec_lab.compare.tables import comparison_csv, pair_table, strategy_table
from specdec_lab.errors import InputError, SpecdecError
from specdec_lab.report.html import report_html

DOCUMENT, TABLE, REPORT = "comparison.json", "comparison.csv", "report.html"


def compare_main(words: Sequence[str] | None = None) -> int:
    """Compare run folders as the command line says and return the exit code.

    Args:
        words: of the command line without the program's name; ``None`` takes this process's.
    """
    out, err = result_console(), Console(stderr=True)
    try:
        options = _parser().parse_args(words)
    except SystemExit as end:  # argparse has said what is wrong and ends with 2
        return REFUSED if end.code else SUCCESS
    folder = options.out or Path("outputs", "compare", datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    try:
        check_out(folder, overwrite=options.overwrite)
        comparison = compare(options.run_dirs, allow=options.allow, equal=options.equal)
        write_comparison(folder, comparison)
    except SpecdecError as error:
        say_error(err, str(error))
        return REFUSED
    show(comparison, out)
    say(out, f"results: {folder}")
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
        help="what all strategies that draft must have in common: nodes, draft_weights",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier comparison in the folder")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def check_out(folder: Path, *, overwrite: bool) -> None:
    """Decide whether a comparison may be written into a folder; nothing is changed.

    Raises:
        InputError: it is a file, or holds an earlier comparison that is not to be replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError("--out", str(folder), "this is a file; give a folder")
    held = [name for name in (DOCUMENT, TABLE, REPORT) if (folder / name).exists()]
    if held and not overwrite:
        raise InputError("--out", str(folder), f"it holds {held[0]}; add --overwrite or give another folder")


def write_comparison(folder: Path, comparison: Comparison) -> None:
    """Write ``comparison.json``, ``comparison.csv`` and ``report.html``, each complete or not at all.

    Raises:
        StorageError: they cannot be written.
    """
    document = comparison.document()
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    report = report_html(json.loads(text))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / DOCUMENT, text)
        write_atomically(folder / TABLE, comparison_csv(comparison))
        write_atomically(folder / REPORT, report)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"--out={str(folder)!r}: writing failed ({reason}); make room or give another") from error


def show(comparison: Comparison, out: Console) -> None:
    """Print the tables, what the runs differ in, and what limits the comparison."""
    out.print(strategy_table(comparison))
    out.print(pair_table(comparison))
    for one in comparison.differences:
        say(out, f"The runs differ in {one.fact}: {one.effect}.")
    for sentence in (*comparison.explanations, *comparison.notices):
        say(out, sentence)
