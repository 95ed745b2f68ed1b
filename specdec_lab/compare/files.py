"""The files of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

from specdec_lab.bench.files import COMPARISON, COMPARISON_TABLE, REPORT, START_ANEW, storage, write_atomically
from specdec_lab.compare.comparison import Comparison
from specdec_lab.compare.tables import comparison_csv
from specdec_lab.errors import InputError
from specdec_lab.report.html import report_html


def check_out(folder: Path, *, overwrite: bool) -> None:
    """Decide whether a comparison may be written into a folder; nothing is changed.

    Raises:
        InputError: it is a file, or holds an earlier comparison that is not to be replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError("--out", str(folder), "this is a file; give a folder")
    held = [name for name in (COMPARISON, COMPARISON_TABLE, REPORT) if (folder / name).exists()]
    if held and not overwrite:
        raise InputError("--out", str(folder), f"it holds {held[0]}; add --overwrite or give another folder")


def write_comparison(folder: Path, comparison: Comparison, remedy: str = START_ANEW, option: str = "--out") -> None:
    """Write ``comparison.json``, ``comparison.csv`` and ``report.html``, each complete or not at all.

    Args:
        remedy: see ``specdec_lab.bench.files.storage``, as ``option``.

    Raises:
        StorageError: they cannot be written.
    """
    document = comparison.document()
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    report = report_html(json.loads(text))
    with storage(folder, remedy, option):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / COMPARISON, text)
        write_atomically(folder / COMPARISON_TABLE, comparison_csv(comparison))
        write_atomically(folder / REPORT, report)
