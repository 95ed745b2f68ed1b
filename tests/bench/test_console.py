"""What a run shows."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from specdec_lab.bench.console import progress, speedup_text


def speedup(ratio: float | None, ci95: list[float] | None) -> dict[str, Any]:
    return {"ratio_of_totals": ratio, "mean_of_ratios": ratio, "ci95": ci95, "baseline": "autoregressive"}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (speedup(1.5, [1.2, 1.8]), "1.50x [1.20, 1.80]"),
        (speedup(0.8, [0.7, 0.9]), "0.80x [0.70, 0.90]"),
        (speedup(1.1, [0.95, 1.3]), "1.10x [0.95, 1.30] cannot tell"),
        (speedup(1.07, [1.0013, 1.27]), "1.07x [1.00, 1.27] cannot tell"),
        (speedup(1.5, None), "1.50x cannot tell (one prompt)"),
        (speedup(None, None), "-"),
    ],
)
def test_no_winner_inside_the_noise(found: dict[str, Any], text: str):
    """An interval that holds 1, or none at all, is said to decide nothing."""
    assert speedup_text(found, "ngram") == text


def test_the_baseline_is_named_rather_than_compared():
    """It is 1 by definition, which no interval has to support."""
    assert speedup_text(speedup(1.0, [1.0, 1.0]), "autoregressive") == "1 (baseline)"


def test_progress_without_a_terminal_is_plain_lines():
    """No control characters in a log; few lines however many rows there are, the last one always."""
    file = io.StringIO()
    with progress(Console(file=file), total=500, done=100) as report:
        for _ in range(400):
            report("ngram")
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().startswith("500/500 rows, last ngram")
    assert "\x1b" not in file.getvalue()


def test_progress_on_a_terminal_is_a_bar():
    """With the rows that are done, and the strategy that was last."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with progress(console, total=3, what="answers compared") as report:
        report("ngram")
    assert "1/3" in file.getvalue()
    assert "answers compared" in file.getvalue()
    assert "ngram" in file.getvalue()
