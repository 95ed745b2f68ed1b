"""A run as answer files of Spec-Bench (arXiv 2401.07851), which that project's own scripts for speed and equality read.

One file per strategy, one line per question with ``choices[i]`` for repeat ``i``; the scripts read ``choices[0]``. What
they make of the numbers is in ``specdec_lab.compare.spec_bench``.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from specdec_lab.bench import metrics
from specdec_lab.bench.metrics import Row


def incomplete_questions(rows: Sequence[Row]) -> set[Hashable]:
    """Return the questions of which some strategy failed a turn: that project's scripts divide means over all lines."""
    return {row["question_id"] for row in rows if row["status"] != "ok"}


def answer_lines(rows: Sequence[Row], strategy: str) -> list[str]:
    """Return the lines of a strategy's answer file, without questions that some strategy failed.

    ``wall_time`` and ``new_tokens`` hold prefill and first token, as that project counts; ``accept_lengths`` has what
    each round emitted, bonus token included, over all turns of a repeat.

    Args:
        rows: of ``requests.jsonl``.
    """
    questions: dict[Hashable, dict[int, list[Row]]] = {}
    for row in rows:
        if row["strategy"] == strategy:
            questions.setdefault(row["question_id"], {}).setdefault(row["repeat"], []).append(row)
    lines, left_out = [], incomplete_questions(rows)
    for question, repeats in questions.items():
        turns = [turn for own in repeats.values() for turn in own]
        if question in left_out:
            continue
        choices = [_choice(at, sorted(repeats[at], key=lambda row: row["turn"])) for at in sorted(repeats)]
        document = {
            "question_id": question,
            "category": turns[0]["category"],
            "model_id": strategy,
            "choices": choices,
        }
        lines.append(json.dumps(document, ensure_ascii=False, allow_nan=False))
    return lines


def _choice(index: int, turns: Sequence[Row]) -> Mapping[str, Any]:
    return {
        "index": index,
        "turns": [turn["text"] for turn in turns],
        "decoding_steps": [metrics.rounds([turn]) for turn in turns],
        "new_tokens": [metrics.output_tokens([turn]) for turn in turns],
        "wall_time": [metrics.total_seconds([turn]) for turn in turns],
        "accept_lengths": [
            accepted + bonus
            for turn in turns
            for accepted, bonus in zip(turn["accepted_per_round"], turn["bonus_per_round"], strict=True)
        ],
    }
