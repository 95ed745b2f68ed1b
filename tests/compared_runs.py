"""Run folders without a model: rows with made-up rounds and times, counted and written as a benchmark does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from specdec_lab.bench.metrics import TIME_PARTS, check_identities
from specdec_lab.bench.records import write_rows
from specdec_lab.bench.schemas import SCHEMA_VERSION
from specdec_lab.bench.summary import StrategyFacts, summarise, write_summary

CATEGORIES = ("writing", "qa", "rag")
BASELINE_MS = {"draft": 0.0, "verify": 30.0, "accept": 0.5, "commit": 0.1, "other": 0.4}


@dataclass(frozen=True)
class Made:
    """How a strategy behaves in a made run.

    Attributes:
        accepts: probability that each draft of a chain is accepted after the one before; 0 drafts nothing.
        drafts: length of its chains.
        cost: milliseconds of a round by part.
    """

    accepts: float = 0.0
    drafts: int = 0
    cost: Mapping[str, float] = field(default_factory=lambda: BASELINE_MS)
    config: Mapping[str, Any] = field(default_factory=dict)
    lossless: bool = True


BASELINE = Made()
QUICK = Made(0.6, 4, {**BASELINE_MS, "draft": 1.0, "verify": 35.0}, {"k": 4})
"""Gains about a half."""

DEEP = Made(0.75, 8, {**BASELINE_MS, "draft": 25.0, "verify": 60.0}, {"k": 8})
"""Accepts more than ``QUICK`` and is slower, since its rounds are long."""

THREE = {"autoregressive": BASELINE, "ngram": QUICK, "deep": DEEP}


def made_row(
    strategy: str,
    made: Made,
    question: int,
    rng: np.random.Generator,
    *,
    turn: int = 0,
    repeat: int = 0,
    tokens: int = 40,
    slow: float = 1.0,
    status: str = "ok",
) -> dict[str, Any]:
    """Return the row of a request that emits ``tokens`` tokens after its prefill.

    Args:
        slow: factor of all times.
    """
    row: dict[str, Any] = {
        "strategy": strategy,
        "question_id": question,
        "category": CATEGORIES[question % len(CATEGORIES)],
        "turn": turn,
        "repeat": repeat,
        "status": status,
        "prompt_ids": [1, question + 2, turn + 2],
        "peak_memory_bytes": None,
        "exact": None,
        "divergence": None,
        "altered_per_round": None,
    }
    if status == "failed":
        lists = ("accepted_per_round", "proposed_per_round", "proposed_nodes_per_round", "bonus_per_round")
        nothing: dict[str, Any] = {name: [] for name in lists}
        empty = {"finish_reason": None, "output_ids": [], "text": "", "time_seconds": None, "round_seconds": []}
        return {**row, **nothing, **empty, "error": "it failed", "decode_elapsed_seconds": None}
    accepted, seconds, left = [], [], tokens
    while left:
        depth = min(made.drafts, left - 1)
        taken = int(np.argmin([*(rng.random(depth) < made.accepts), False]))
        accepted.append(taken)
        seconds.append(slow * rng.lognormal(0, 0.05) * sum(made.cost.values()) / 1e3)
        left -= taken + 1
    share = sum(seconds) / sum(made.cost.values())
    times = {"prefill": 0.1 * slow, **{part: share * made.cost[part] for part in TIME_PARTS if part != "prefill"}}
    proposed = [made.drafts] * len(accepted)
    row |= {
        "error": None,
        "finish_reason": "length",
        "output_ids": list(range(tokens + 1)),
        "text": "words",
        "accepted_per_round": accepted,
        "proposed_per_round": proposed,
        "proposed_nodes_per_round": proposed,
        "bonus_per_round": [1] * len(accepted),
        "round_seconds": seconds,
        "time_seconds": {**times, "total": sum(times.values())},
        "decode_elapsed_seconds": sum(seconds),
        "peak_memory_bytes": 10**8,
        "exact": "baseline" if strategy == "autoregressive" else "identical",
    }
    check_identities(row)
    return row


def made_rows(
    strategies: Mapping[str, Made], *, prompts: int = 15, repeats: int = 1, seed: int = 0, slow: float = 1.0
) -> list[dict[str, Any]]:
    """Return the rows of a run; a third of the prompts has two turns, and prompts differ in how hard they are."""
    rng, rows = np.random.default_rng(seed), []
    for repeat in range(repeats):
        for question in range(prompts):
            hard = rng.lognormal(0, 0.1)
            for turn in range(2 if question % 3 == 0 else 1):
                for name, made in strategies.items():
                    factor = slow * hard * rng.lognormal(0, 0.02)
                    rows.append(made_row(name, made, question, rng, turn=turn, repeat=repeat, slow=factor))
    return rows


def facts(**changes: Any) -> dict[str, Any]:
    """Return what a summary says about a run besides its strategies; ``changes`` replace single fields."""
    sampling = dict.fromkeys(("top_k", "top_p", "min_p", "repetition_penalty"))
    return {
        "schema_version": SCHEMA_VERSION,
        "created": "2026-01-02T03:04:05+00:00",
        "git_sha": "0123456789abcdef0123456789abcdef01234567",
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "machine": {"cpu": "A <fast> CPU & more", "threads": 2, "gpu": None},
        "target": {
            "name": "made",
            "model": "owner/made",
            "revision": "r1",
            "dtype": "bfloat16",
            "parameters": 1000,
            "weight_bytes": 2000,
        },
        "verify_ms": None,
        "prompts": {"source": "made.jsonl", "sha256": "ab" * 32, "count": 15, "turns": 20},
        "sampling": {
            **sampling,
            "temperature": 0.0,
            "bad_words": [],
            "min_new_tokens": 0,
            "seed": 0,
            "logits_processors": [],
        },
        "typical": None,
        "exact": "off",
        "acceptance": "rejection",
        "max_new_tokens": 41,
        "batch_size": 1,
        "batch_nodes": None,
        "repeats": 1,
        "seed": 0,
        **changes,
    }


def write_run(
    folder: Path,
    strategies: Mapping[str, Made],
    rows: Sequence[dict[str, Any]],
    *,
    config: Mapping[str, Any] | None = None,
    expected_rows: int | None = None,
    **changes: Any,
) -> Path:
    """Write a run folder and return it."""
    folder.mkdir(parents=True)
    memory = {"target_weights": 2000, "draft_weights": 0, "target_kv": 500, "draft_kv": 0}
    described = [StrategyFacts(name, made.config, made.lossless, memory) for name, made in strategies.items()]
    summary = summarise(rows, facts(**changes), described, expected_rows or len(rows))
    write_rows(folder / "requests.jsonl", rows)
    write_summary(folder, summary)
    settings = {"target": {"device": "cpu", "dtype": "auto"}, "stop": [], **(config or {})}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    return folder


def made_run(
    folder: Path, strategies: Mapping[str, Made] = THREE, *, noise: int = 0, slow: float = 1.0, **changes: Any
) -> Path:
    """Write a run folder of made rows and return it; ``noise`` seeds the rows."""
    return write_run(folder, strategies, made_rows(strategies, seed=noise, slow=slow), **changes)
