"""``summary.json`` and ``summary.csv``: computed from the rows alone, so that a resumed run gives the same."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdec_lab.bench import metrics
from specdec_lab.bench.columns import scalars
from specdec_lab.bench.exactness import exactness
from specdec_lab.bench.files import SUMMARY, TABLE, write_atomically
from specdec_lab.bench.metrics import Row
from specdec_lab.bench.schemas import SCHEMA_VERSION, dumps
from specdec_lab.bench.settings import BASELINE, UNPADDED_BASELINE, RunPlan
from specdec_lab.bench.statistics import DECODE, END_TO_END, paired, speedup
from specdec_lab.provenance import provenance
from specdec_lab.target import Target

SETTINGS = ("exact", "acceptance", "max_new_tokens", "batch_size", "batch_nodes", "repeats", "seed")
"""Settings that the summary states as they were configured."""


@dataclass(frozen=True)
class StrategyFacts:
    """What is known about a strategy besides its rows.

    Attributes:
        config: its parameters.
        lossless: whether it keeps the target's output law.
        memory_bytes: ``target_weights``, ``draft_weights``, ``target_kv``, ``draft_kv``.
        draft_training_tokens: see ``Drafter.training_tokens``.
    """

    name: str
    config: Mapping[str, Any]
    lossless: bool
    memory_bytes: Mapping[str, int]
    draft_training_tokens: int | None = None


def run_facts(plan: RunPlan, target: Target, verify_ms: Mapping[int, float] | None) -> dict[str, Any]:
    """Return the part of the summary that does not come from rows."""
    node, prompts = plan.config["target"], plan.prompts
    return {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
        "target": {
            "name": target.name,
            "model": node.get("model"),
            "revision": node.get("revision"),
            "dtype": str(target.dtype).removeprefix("torch."),
            "parameters": target.parameter_count,
            "weight_bytes": target.weight_bytes,
        },
        "prompts": {
            "source": prompts.source,
            "sha256": prompts.sha256,
            "count": len(prompts.prompts),
            "turns": sum(len(prompt.turns) for prompt in prompts.prompts),
        },
        "sampling": plan.sampling.record(),
        "typical": plan.settings.typical.model_dump() if plan.acceptance.rule == "typical" else None,
        "verify_ms": None if verify_ms is None else {str(nodes): time for nodes, time in verify_ms.items()},
        **{name: getattr(plan.settings, name) for name in SETTINGS},
    }


def summarise(
    rows: Sequence[Row], facts: Mapping[str, Any], strategies: Sequence[StrategyFacts], expected_rows: int
) -> dict[str, Any]:
    """Return ``summary.json`` as a mapping.

    Args:
        rows: of ``requests.jsonl``.
        facts: see ``run_facts``; its ``seed`` seeds the bootstrap.
        strategies: in the order in which they are listed.
        expected_rows: how many rows a complete run has.
    """
    succeeded = sum(row["status"] == "ok" for row in rows)
    references = {name: [row for row in rows if row["strategy"] == name] for name in (BASELINE, UNPADDED_BASELINE)}
    entries = []
    for strategy in strategies:
        own = [row for row in rows if row["strategy"] == strategy.name]
        peaks = [row["peak_memory_bytes"] for row in own if row["peak_memory_bytes"] is not None]
        categories = sorted({row["category"] for row in own})
        entries.append(
            {
                "name": strategy.name,
                "config": dict(strategy.config),
                "lossless": strategy.lossless,
                **numbers(own, references, facts["seed"]),
                "draft_training_tokens": strategy.draft_training_tokens,
                "memory_bytes": {**strategy.memory_bytes, "peak": max(peaks, default=None)},
                "by_category": {
                    category: numbers([row for row in own if row["category"] == category], references, facts["seed"])
                    for category in categories
                },
            }
        )
    return {**facts, "complete": succeeded == expected_rows == len(rows), "strategies": entries}


def numbers(rows: Sequence[Row], references: Mapping[str, Sequence[Row]], seed: int) -> dict[str, Any]:
    """Return the numbers of one strategy's rows, or of those of one category.

    Args:
        references: rows to compare with, by name; speed-ups against the unpadded baseline appear if it has rows.
        seed: of the bootstrap.
    """
    good = [row for row in rows if row["status"] == "ok"]
    pairs = paired(good, references[BASELINE])
    found = {
        "requests": len(rows),
        "failed": len(rows) - len(good),
        **metrics.counters(good),
        "speedup": speedup(pairs, DECODE, BASELINE, seed),
        "speedup_end_to_end": speedup(pairs, END_TO_END, BASELINE, seed),
        "exactness": exactness(good),
    }
    if references[UNPADDED_BASELINE]:
        unpadded = paired(good, references[UNPADDED_BASELINE])
        found["speedup_over_unpadded"] = speedup(unpadded, DECODE, UNPADDED_BASELINE, seed)
    return found


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write both files, each complete or not at all.

    Raises:
        ValueError: the summary breaks its schema.
        OSError: it cannot be written.
    """
    write_atomically(folder / SUMMARY, dumps("summary", summary, indent=2) + "\n")
    write_atomically(folder / TABLE, to_csv(summary))


def to_csv(summary: Mapping[str, Any]) -> str:
    """Return the scalar columns of the strategies' entries; nested ones are named with dots, undefined ones empty."""
    lines = [dict(scalars(entry)) for entry in summary["strategies"]]
    names = dict.fromkeys(name for line in lines for name in line)
    # a strategy without any successful row has null where the others have a group of numbers
    columns = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
