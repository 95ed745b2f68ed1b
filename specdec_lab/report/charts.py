"""The charts of a report: inline SVG by matplotlib, from the mappings of ``comparison.json`` alone.

Each chart takes the comparison's entries and returns a figure, or ``None`` where nothing is defined that it could draw;
``drawn`` calls it with the report's style. Strategies keep their colour and mark in every chart.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specdec_lab.bench.metrics import PERCENTILES
from specdec_lab.compare.ledger import ROUND_PARTS

Entries = Sequence[Mapping[str, Any]]
Chart = Callable[[Entries], Figure | None]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D31")
"""Told apart with any kind of colour vision (after Okabe and Ito; their yellow is too pale for lines)."""

MARKS = ("o", "s", "^", "D", "v", "P", "X")
"""Besides colours, so that a print in grey can be read; of another length, so that a pair is rarely used twice."""

HATCHES = ("", "//", "\\\\", "xx", "--")

WIDTH = 4.9
"""Inches; at 72 points to the inch and a font of 9 points still readable on a telephone."""

STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": ["sans-serif"],
    "font.size": 9,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,
}

HEAT_SPAN = 1.25
"""The heat map's colours reach at least from 1 / 1.25 to 1.25, so that small differences stay pale."""


def styled(**more: Any) -> AbstractContextManager[None]:
    """Return the context in which every picture of the lab is drawn, with more of matplotlib's parameters."""
    style: Any = {**STYLE, **more}  # the stubs want each key as a literal
    return rc_context(style)


def drawn(chart: Chart, entries: Entries, name: str, title: str, description: str) -> str | None:
    """Return a chart as an SVG element that stands alone in a page, ``None`` where there is nothing to draw.

    Args:
        name: a word that no other chart of the page has; it goes in front of every id.
        title: what a screen reader calls it.
        description: what it shows.
    """
    stream = io.StringIO()
    with styled(**{"svg.hashsalt": name}):
        figure = chart(entries)
        if figure is None:
            return None
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", metadata=metadata, transparent=True)
    return _standing_alone(stream.getvalue(), name, title, description)


def _standing_alone(svg: str, name: str, title: str, description: str) -> str:
    text = svg[svg.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    opening, rest = text.split(">", 1)
    labelled = f' role="img" aria-labelledby="{name}-title {name}-description"'
    heading = f'<title id="{name}-title">{escape(title)}</title>'
    return f'{opening}{labelled}>{heading}<desc id="{name}-description">{escape(description)}</desc>{rest}'


# --- speed ------------------------------------------------------------------------------------------------------------


def speedups(entries: Entries) -> Figure | None:
    """Draw each speed-up with its interval."""
    shown = [entry for entry in entries if entry["numbers"]["speedup"]["ratio_of_totals"] is not None]
    if not shown:
        return None
    figure, axes = _rows(shown)
    for place, entry in enumerate(shown):
        found = entry["numbers"]["speedup"]
        if found["ci95"] is not None and not entry["baseline"]:
            axes.plot(found["ci95"], [place, place], color=_colour(entries, entry), linewidth=2)
        axes.plot(found["ratio_of_totals"], place, **_mark(entries, entry))
    axes.axvline(1, color="#555555", linewidth=1, linestyle="--")
    axes.set_xlabel("speed-up over the baseline of the run")
    return figure


def rate_by_length(entries: Entries) -> Figure | None:
    """Draw tokens per second against acceptance length."""
    shown = _defined(entries, "decode_tokens_per_second", "mean_acceptance_length")
    if not shown:
        return None
    figure, axes = _plot()
    for entry in shown:
        numbers = entry["numbers"]
        mark = _mark(entries, entry)
        axes.plot(numbers["mean_acceptance_length"], numbers["decode_tokens_per_second"], label=entry["label"], **mark)
    axes.set_xlabel("mean acceptance length (tokens a round, bonus included)")
    axes.set_ylabel("tokens/s while decoding")
    axes.margins(0.1)
    _legend(axes, len(shown))
    return figure


def predictions(entries: Entries) -> Figure | None:
    """Draw the speed-up that a round's cost and yield give against the measured one."""
    shown = [
        entry
        for entry in entries
        if entry["ledger"]["predicted_speedup"] is not None
        and entry["numbers"]["speedup"]["ratio_of_totals"] is not None
    ]
    if not shown:
        return None
    figure, axes = _plot()
    points = [(entry["ledger"]["predicted_speedup"], entry["numbers"]["speedup"]["ratio_of_totals"]) for entry in shown]
    ends = [0.95 * min(map(min, points)), 1.05 * max(map(max, points))]
    axes.plot(ends, ends, color="#555555", linewidth=1, linestyle="--")
    for entry, (predicted, measured) in zip(shown, points, strict=True):
        axes.plot(predicted, measured, label=entry["label"], **_mark(entries, entry))
    axes.set_xlabel("predicted: acceptance length x baseline round / round")
    axes.set_ylabel("measured speed-up")
    _legend(axes, len(shown))
    return figure


def categories(entries: Entries) -> Figure | None:
    """Draw the speed-up of each strategy in each category, paler the closer to 1."""
    names = sorted({name for entry in entries for name in entry["numbers"]["by_category"]})
    shown = [entry for entry in entries if not entry["baseline"]]
    cells = [[_category_speedup(entry, name) for entry in shown] for name in names]  # NaN where undefined
    defined = [value for line in cells for value in line if not math.isnan(value)]
    if not defined:
        return None
    widest = max(len(entry["label"]) for entry in shown)
    figure = _figure(0.6 + 0.3 * len(names) + 0.06 * widest)
    axes = figure.subplots()
    span = max(HEAT_SPAN, *defined, *(1 / value for value in defined))
    axes.pcolormesh(cells, cmap="PuOr_r", norm=LogNorm(1 / span, span), edgecolors="white", linewidth=1)
    for place, line in enumerate(cells):
        for column, value in enumerate(line):
            if not math.isnan(value):
                dark = abs(math.log(value)) > 0.6 * math.log(span)
                style = {"color": "white" if dark else "black", "fontsize": 8}
                axes.text(column + 0.5, place + 0.5, f"{value:.2f}", ha="center", va="center", **style)
    axes.set_yticks([place + 0.5 for place in range(len(names))], names)
    axes.set_xticks([place + 0.5 for place in range(len(shown))], [entry["label"] for entry in shown])
    axes.tick_params(axis="x", rotation=90 if len(shown) > 3 else 0)
    axes.grid(visible=False)
    axes.invert_yaxis()
    return figure


def _category_speedup(entry: Mapping[str, Any], category: str) -> float:
    found = entry["numbers"]["by_category"].get(category)
    value = None if found is None else found["speedup"]["ratio_of_totals"]
    return math.nan if value is None else value


# --- acceptance -------------------------------------------------------------------------------------------------------


def acceptance_joint(entries: Entries) -> Figure | None:
    """Draw the share of all rounds that accepted at least so many drafts."""
    return _by_depth(entries, "joint", "share of rounds that accept this depth")


def acceptance_conditional(entries: Entries) -> Figure | None:
    """Draw the share accepted at each depth among rounds that were offered it and accepted all above."""
    return _by_depth(entries, "conditional", "accepted, given all above it")


def _by_depth(entries: Entries, kind: str, label: str) -> Figure | None:
    shown = [entry for entry in entries if entry["numbers"]["acceptance_by_depth"]["offered"]]
    if not shown:
        return None
    figure, axes = _plot()
    for entry in shown:
        values = entry["numbers"]["acceptance_by_depth"][kind]
        known = [(depth, value) for depth, value in enumerate(values, start=1) if value is not None]
        axes.plot(*zip(*known, strict=True), label=entry["label"], linewidth=1.2, **_mark(entries, entry))
    axes.set_xlabel("draft depth")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, len(shown))
    return figure


def accepted_histogram(entries: Entries) -> Figure | None:
    """Draw how many drafts rounds accepted, as shares of each strategy's rounds."""
    shown = [entry for entry in entries if entry["numbers"]["proposed"]]
    if not shown:
        return None
    figure, axes = _plot()
    width = 0.85 / len(shown)
    for place, entry in enumerate(shown):
        counts = entry["numbers"]["accepted_histogram"]
        lefts = [value - 0.425 + width * place for value in range(len(counts))]
        heights = [count / sum(counts) for count in counts]
        style = {"color": _colour(entries, entry), "hatch": _hatch(place), "edgecolor": "white", "linewidth": 0}
        axes.bar(lefts, heights, width, align="edge", label=entry["label"], **style)
    axes.set_xlabel("accepted drafts")
    axes.set_ylabel("share of rounds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, len(shown))
    return figure


# --- time and memory --------------------------------------------------------------------------------------------------


def time_split(entries: Entries) -> Figure | None:
    """Draw the mean time of a round by part."""
    shown = [entry for entry in entries if entry["ledger"]["round_parts_ms"] is not None]
    if not shown:
        return None
    lines = [[entry["ledger"]["round_parts_ms"][part] for part in ROUND_PARTS] for entry in shown]
    figure, axes = _rows(shown, extra=0.5)
    _stack(axes, lines, ROUND_PARTS)
    axes.set_xlabel("milliseconds a round")
    return figure


def memory(entries: Entries) -> Figure | None:
    """Draw what weights and caches take."""
    kinds = ("target_weights", "draft_weights", "target_kv", "draft_kv")
    lines = [[entry["numbers"]["memory_bytes"][kind] / 2**20 for kind in kinds] for entry in entries]
    figure, axes = _rows(entries, extra=0.5)
    _stack(axes, lines, [kind.replace("_", " ") for kind in kinds])
    axes.set_xlabel("MiB")
    return figure


def latency(entries: Entries) -> Figure | None:
    """Draw percentiles over requests of the time per emitted token."""
    shown = _defined(entries, "time_per_output_token_ms")
    if not shown:
        return None
    figure, axes = _rows(shown, extra=0.3)
    names = [f"p{percent}" for percent in PERCENTILES]
    for place, entry in enumerate(shown):
        values = [entry["numbers"]["time_per_output_token_ms"][name] for name in names]
        colour = _colour(entries, entry)
        axes.plot(values, [place] * len(values), color=colour, linewidth=1)
        for value, mark in zip(values, ("o", "|", "x"), strict=True):
            axes.plot(value, place, marker=mark, color=colour, markersize=6)
    for name, mark in zip(names, ("o", "|", "x"), strict=True):
        axes.plot([], [], linestyle="", marker=mark, color="#333333", label=name)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds per emitted token")
    _legend(axes, len(names))
    return figure


# --- parts of charts --------------------------------------------------------------------------------------------------


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _plot() -> tuple[Figure, Axes]:
    figure = _figure(3.3)
    return figure, figure.subplots()


def _rows(shown: Entries, extra: float = 0.0) -> tuple[Figure, Axes]:
    """Return axes with one line per entry, the first on top."""
    figure = _figure(0.8 + 0.28 * len(shown) + extra)
    axes = figure.subplots()
    axes.set_yticks(range(len(shown)), [entry["label"] for entry in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _stack(axes: Axes, lines: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Draw one stacked bar per line."""
    left = [0.0] * len(lines)
    for part, name in enumerate(names):
        widths = [line[part] for line in lines]
        style = {"color": COLOURS[part], "hatch": HATCHES[part], "edgecolor": "white", "linewidth": 0}
        axes.barh(range(len(lines)), widths, 0.7, left=left, label=name, **style)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _legend(axes, len(names))


def _legend(axes: Axes, entries: int) -> None:
    """Put the legend above the axes, so that it hides nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(entries, 3), fontsize=8, borderaxespad=0.2)


def _defined(entries: Entries, *names: str) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if all(entry["numbers"][name] is not None for name in names)]


def _place(entries: Entries, entry: Mapping[str, Any]) -> int:
    return [one["label"] for one in entries].index(entry["label"])


def _colour(entries: Entries, entry: Mapping[str, Any]) -> str:
    return COLOURS[_place(entries, entry) % len(COLOURS)]


def _hatch(place: int) -> str:
    return HATCHES[place % len(HATCHES)]


def _mark(entries: Entries, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"color": _colour(entries, entry), "marker": MARKS[_place(entries, entry) % len(MARKS)], "markersize": 6}
