"""The picture of a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specdec_lab.report.charts import COLOURS, MARKS, styled


def draw_projection(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw speed-up against batch size, a panel for each context length and a line for each strategy."""
    contexts = sorted({point["context_tokens"] for point in points})
    names = list(dict.fromkeys(point["strategy"] for point in points))
    with styled():
        figure = Figure(figsize=(4.2 * len(contexts), 3.4), layout="constrained")
        panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
        for panel, context in zip(panels, contexts, strict=True):
            for at, name in enumerate(names):
                own = [one for one in points if one["strategy"] == name and one["context_tokens"] == context]
                own.sort(key=lambda one: one["batch_size"])
                panel.plot(
                    [one["batch_size"] for one in own],
                    [one["speedup"] for one in own],
                    color=COLOURS[at % len(COLOURS)],
                    marker=MARKS[at % len(MARKS)],
                    label=name,
                )
            panel.axhline(1, color="#555555", linewidth=0.8)
            panel.set(xscale="log", xlabel="rows decoded together", title=f"{context} tokens behind each row")
            panel.set_xticks(sorted({one["batch_size"] for one in points}), minor=False)
            panel.get_xaxis().set_major_formatter("{x:g}")
        panels[0].set_ylabel("projected speed-up")
        panels[0].legend()
        figure.savefig(path)


def draw_predicted(points: Sequence[Mapping[str, Any]], path: Path, within: float) -> None:
    """Draw predicted against measured speed-ups, with the band in which a prediction counts as good."""
    with styled():
        figure = Figure(figsize=(4.6, 4.2), layout="constrained")
        axes = figure.subplots()
        values = [one[name] for one in points for name in ("predicted_speedup", "measured_speedup")]
        low, high = 0.9 * min(values), 1.1 * max(values)
        axes.fill_between(
            [low, high], [low * (1 - within), high * (1 - within)], [low * (1 + within), high * (1 + within)],
            color="#eeeeee", label=f"within {within:.0%}",
        )  # fmt: skip
        axes.plot([low, high], [low, high], color="#555555", linewidth=0.8)
        for at, one in enumerate(points):
            axes.plot(
                one["measured_speedup"],
                one["predicted_speedup"],
                MARKS[at % len(MARKS)],
                color=COLOURS[at % len(COLOURS)],
                label=one["strategy"],
            )
        axes.set(xlabel="measured speed-up", ylabel="predicted speed-up", xlim=(low, high), ylim=(low, high))
        axes.legend()
        figure.savefig(path)
