"""The picture of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specdec_lab.report.charts import COLOURS, MARKS, styled


def draw_replay(strategies: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw acceptance by depth beside calibration: what strategies believed, and what was so."""
    with styled():
        figure = Figure(figsize=(8.6, 3.6), layout="constrained")
        depth, belief = figure.subplots(1, 2)
        for at, (name, numbers) in enumerate(strategies.items()):
            look: dict[str, Any] = {"color": COLOURS[at % len(COLOURS)], "marker": MARKS[at % len(MARKS)]}
            joint = numbers["acceptance_by_depth"]["joint"]
            depth.plot(range(1, len(joint) + 1), joint, label=name, **look)
            if numbers["calibration"]:
                bins = numbers["calibration"]
                believed, right = ([one[field] for one in bins] for field in ("mean_confidence", "share_right"))
                belief.plot(believed, right, label=name, **look)
        depth.set(xlabel="depth of the draft", ylabel="share of positions accepted so deep", ylim=(0, 1))
        belief.plot([0, 1], [0, 1], color="#555555", linewidth=0.8)
        belief.set(xlabel="confidence of a node", ylabel="share on the text", xlim=(0, 1), ylim=(0, 1))
        depth.legend()
        figure.savefig(path)
