"""A comparison as one HTML file that needs nothing else: no network, no other file, no library in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from specdec_lab.compare.comparable import plain
from specdec_lab.report import charts, tables
from specdec_lab.report.parts import embedded, figure, items, section

DATA = "comparison"
"""Id of the element that holds ``comparison.json``."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing from anywhere."""


class ChartOf(NamedTuple):
    """A chart of the report."""

    name: str
    title: str
    description: str
    draw: charts.Chart


CHARTS = (
    ChartOf(
        "speedup",
        "Speed-up",
        "Ratio of decode rates to the baseline of the same run, all tokens over all seconds, with its 95 % bootstrap "
        "interval over prompts. An interval that holds 1 tells nothing.",
        charts.speedups,
    ),
    ChartOf(
        "rate",
        "Speed against acceptance length",
        "More tokens a round help only as far as rounds do not get longer: a strategy to the right of another and "
        "below it accepts more and is slower.",
        charts.rate_by_length,
    ),
    ChartOf(
        "joint",
        "Acceptance by depth",
        "Share of all rounds that accept at least so many drafts.",
        charts.acceptance_joint,
    ),
    ChartOf(
        "conditional",
        "Acceptance by depth, given all above",
        "Among rounds that were offered this depth and accepted everything above it. A curve that rises speaks of few "
        "texts that repeat themselves.",
        charts.acceptance_conditional,
    ),
    ChartOf(
        "histogram",
        "Accepted lengths",
        "How many drafts a round accepts, the bonus token not counted.",
        charts.accepted_histogram,
    ),
    ChartOf(
        "time",
        "Time of a round",
        "Mean milliseconds a round by part; the prefill is no round. The baseline's bar is what one token costs "
        "without drafts.",
        charts.time_split,
    ),
    ChartOf(
        "categories",
        "Speed-up by category",
        "Ratio of decode rates to the baseline within each category; orange is faster, purple slower. A category "
        "of few prompts says little. The table of categories has the intervals.",
        charts.categories,
    ),
    ChartOf(
        "latency",
        "Time per token",
        "Decode time per emitted token over requests: median, 95th and 99th percentile.",
        charts.latency,
    ),
    ChartOf("memory", "Memory", "Parameters and caches as allocated.", charts.memory),
    ChartOf(
        "predicted",
        "Predicted against measured",
        "Acceptance length times the baseline's round over the strategy's round, against the measured ratio. Both come "
        "from the same times, so a point off the line means requests that one side did not finish.",
        charts.predictions,
    ),
)


def report_html(document: Mapping[str, Any]) -> str:
    """Return the report of a comparison.

    Args:
        document: ``comparison.json``; every number of the report is read from it, and the page holds it whole.
    """
    entries, pairs = document["entries"], document["pairs"]
    files = resources.files("specdec_lab.report")
    style, script = ((files / name).read_text("utf-8") for name in ("page.css", "page.js"))
    title = _title(document)
    body = "".join(
        (
            f'<header><h1>{escape(title)}</h1><p class="lead">{escape(_lead(document))}</p></header><main>',
            items([_difference(one) for one in document["differences"]], "warnings"),
            items(document["notices"], "warnings"),
            items(document["explanations"], "findings"),
            section("Strategies", tables.strategies_table(entries)),
            section("Which is faster", tables.pairs_table(pairs)) if pairs else "",
            section("Charts", f'<div class="charts">{"".join(_charts(entries))}</div>'),
            section("What a round costs", tables.ledger_table(entries)),
            section("By category", tables.categories_table(entries, pairs)),
            section("Time per token and memory", tables.latency_table(entries)),
            section("As Spec-Bench would count", tables.spec_bench_table(entries)),
            section("Runs", tables.runs_table(document["runs"])),
            "</main>",
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style></head>'
        f"<body>{body}{embedded(DATA, document)}<script>{script}</script></body></html>\n"
    )


def _title(document: Mapping[str, Any]) -> str:
    targets = dict.fromkeys(f"{run['target']['name']} ({run['target']['dtype']})" for run in document["runs"])
    return f"Strategies compared on {', '.join(targets)}"


def _lead(document: Mapping[str, Any]) -> str:
    runs, entries = document["runs"], document["entries"]
    first = runs[0]
    sampling = first["sampling"]["temperature"]
    decoding = "greedy" if sampling == 0 else f"temperature {sampling:g}"
    equal = document["equal_budget"]
    budget = f" All that draft have the same {' and '.join(name.replace('_', ' ') for name in equal)}." if equal else ""
    return (
        f"{len(entries)} strategies in {len(runs)} run{'s' if len(runs) > 1 else ''}; "
        f"{first['prompts']['count']} prompts from {first['prompts']['source']}, {first['max_new_tokens']} new tokens, "
        f"batch {first['batch_size']}, {decoding}, acceptance {first['acceptance']}, {tables.machine_text(first)}. "
        f"Made {document['created']}.{budget}"
    )


def _difference(one: Mapping[str, Any]) -> str:
    values = "; ".join(f"run {number}: {plain(value)}" for number, value in enumerate(one["values"], start=1))
    return f"The runs differ in {one['fact']} ({values}): {one['effect']}."


def _charts(entries: charts.Entries) -> list[str]:
    found = []
    for one in CHARTS:
        svg = charts.drawn(one.draw, entries, one.name, one.title, one.description)
        if svg is not None:
            found.append(figure(svg, one.title, one.description))
    return found
