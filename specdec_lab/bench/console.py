"""What a run shows: a progress bar while it runs, a table of results at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PLAIN_LINE_SECONDS = 10.0
"""Without a terminal, how often a line tells how far the run is."""

PIPE_WIDTH = 140
"""Characters per line of a table that is not shown on a terminal."""

CAPTION = (
    "tau: emitted tokens per verify round, the target's own (bonus) token included. accepted / proposed: draft tokens "
    "emitted / summed depth of the offered trees. tok/s: emitted tokens over decode time, prefill excluded. speed-up: "
    "ratio of tok/s to the baseline's over the same requests, [95 % bootstrap interval over prompts]; 'cannot tell' "
    "where the interval holds 1. exact: answers identical to the baseline's + ties within rounding / compared; '-' "
    "where drafts drawn at random keep no more than the law. draft / verify: share of decode time in the forwards of "
    "drafter and target."
)

PADDED_CAPTION = " over unpadded: speed-up over the baseline without exact=fixed_shape."

LOSSY_CAPTION = (
    " altered: share of emitted tokens that plain decoding would not have emitted there with the same noise; a lossy "
    "strategy's speed-up is not that of the same output."
)

FEW_PROMPTS = 10
"""Below this many prompts a bootstrap interval is visibly too narrow."""


class Report(Protocol):
    """Is told about each finished row."""

    def __call__(self, strategy: str) -> None:
        """Note that a row of this strategy is finished."""


def result_console(*, quiet: bool = False) -> Console:
    """Return the console for results; without a terminal, wide enough to keep every column whole."""
    console = Console(quiet=quiet)
    return console if console.is_terminal else Console(quiet=quiet, width=max(console.width, PIPE_WIDTH))


@contextmanager
def progress(console: Console, total: int, done: int = 0, what: str = "rows") -> Iterator[Report]:
    """Show how many of ``total`` things are done: a bar on a terminal, now and then a plain line elsewhere.

    Args:
        done: how many of them an earlier run has done.
        what: the things, in the plural.
    """
    if not console.is_terminal:
        yield _PlainProgress(console, what, total, done)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda strategy: bar.update(task, advance=1, description=strategy)


class _PlainProgress:
    def __init__(self, console: Console, what: str, total: int, done: int) -> None:
        self._console, self._what, self._total, self._done, self._resumed = console, what, total, done, done
        self._start = self._shown = time.monotonic()

    def __call__(self, strategy: str) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._shown < PLAIN_LINE_SECONDS and self._done < self._total:
            return
        self._shown, elapsed = now, now - self._start
        left = elapsed / (self._done - self._resumed) * (self._total - self._done)
        text = (
            f"{self._done}/{self._total} {self._what}, last {strategy}, {elapsed:.0f} s gone, about {left:.0f} s left"
        )
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def few_prompts(count: int) -> str:
    """Return the sentence about intervals from few prompts."""
    prompts = "prompt" if count == 1 else "prompts"
    return f"Only {count} {prompts}: intervals from fewer than {FEW_PROMPTS} are narrower than they should be."


def plain_table(title: str, caption: str) -> Table:
    """Return an empty table as all of the lab's look."""
    return Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))


def result_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of a finished run; its caption defines every column."""
    count, turns = summary["prompts"]["count"], summary["prompts"]["turns"]
    title = (
        f"{summary['target']['name']} ({summary['target']['dtype']}), {count} prompts, {turns} turns x "
        f"{summary['repeats']}, {summary['max_new_tokens']} new tokens, batch {summary['batch_size']}, "
        f"{_decoding(summary)}"
    )
    entries = summary["strategies"]
    padded, failed = summary["exact"] == "fixed_shape", any(entry["failed"] for entry in entries)
    lossy = any(not entry["lossless"] for entry in entries)
    caption = CAPTION + (PADDED_CAPTION if padded else "") + (LOSSY_CAPTION if lossy else "")
    if count < FEW_PROMPTS:
        caption += f"\n{few_prompts(count)}"
    table = plain_table(title, caption)
    table.add_column("strategy", overflow="fold")
    for name in ("tau", "accepted / proposed", "tok/s", "speed-up", "exact", "draft / verify"):
        table.add_column(name, justify="right", overflow="fold")
    if padded:
        table.add_column("over unpadded", justify="right", overflow="fold")
    if lossy:
        table.add_column("altered", justify="right", overflow="fold")
    if failed:
        table.add_column("failed", justify="right", style="red")
    for entry in entries:
        extra = [speedup_text(entry["speedup_over_unpadded"], entry["name"])] if padded else []
        extra += [_percent(entry["altered_share"])] if lossy else []
        table.add_row(*_cells(entry), *extra, *([f"{entry['failed']} / {entry['requests']}"] if failed else []))
    return table


def _decoding(summary: Mapping[str, Any]) -> str:
    """Return how tokens were chosen and drafts accepted, as far as it is not the default."""
    sampling = summary["sampling"]
    shown = ["greedy" if sampling["temperature"] == 0 else f"T={sampling['temperature']:g}"]
    shown += [f"{name}={value}" for name, value in sampling.items() if value and name not in ("temperature", "seed")]
    if summary["acceptance"] != "rejection":
        shown.append(f"acceptance={summary['acceptance']}")
    if summary.get("batch_nodes") is not None:
        shown.append(f"batch_nodes={summary['batch_nodes']}")
    return ", ".join(shown)


def _cells(entry: Mapping[str, Any]) -> Sequence[str]:
    exact = entry["exactness"]
    compared = f"{exact['identical']}+{exact['ties']}/{exact['compared']}" if exact["compared"] else "-"
    return (
        entry["name"] + ("" if entry["lossless"] else " (lossy)"),
        _number(entry["mean_acceptance_length"], ".2f"),
        f"{entry['accepted']} / {entry['proposed']}",
        _number(entry["decode_tokens_per_second"], ".1f"),
        speedup_text(entry["speedup"], entry["name"]),
        compared,
        f"{_share(entry['time_seconds'], 'draft')} / {_share(entry['time_seconds'], 'verify')}",
    )


def speedup_text(speedup: Mapping[str, Any], name: str) -> str:
    """Return a speed-up with its interval, and whether it can be told from 1 at all."""
    if speedup["ratio_of_totals"] is None:
        return "-"
    if name == speedup["baseline"]:
        return "1 (baseline)"
    text = f"{speedup['ratio_of_totals']:.2f}x"
    if speedup["ci95"] is None:
        return f"{text} cannot tell (one prompt)"
    low, high = (round(bound, 2) for bound in speedup["ci95"])  # the verdict is that of the numbers shown
    return f"{text} [{low:.2f}, {high:.2f}]" + (" cannot tell" if low <= 1 <= high else "")


def _share(times: Mapping[str, float] | None, part: str) -> str:
    if times is None or times["total"] <= times["prefill"]:
        return "-"
    return f"{100 * times[part] / (times['total'] - times['prefill']):.0f} %"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
