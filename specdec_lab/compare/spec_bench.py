"""The numbers that Spec-Bench's own scripts would compute from the same answers; they are not ours, and differ.

That benchmark (arXiv 2401.07851) takes the mean over questions of each question's rate, with the prefill in its time,
where we divide all tokens by all seconds of decoding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from specdec_lab.bench import metrics
from specdec_lab.bench.metrics import Row, ratio
from specdec_lab.bench.prompts import sub_task

SUB_TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def spec_bench_numbers(rows: Sequence[Row], baseline_rows: Sequence[Row]) -> dict[str, Any]:
    """Return Spec-Bench's numbers of one strategy, overall and by its sub-tasks.

    Args:
        rows: a strategy's successful rows.
        baseline_rows: the baseline's; only questions that are in both with as many turns count.

    Returns:
        ``questions``; ``tokens_per_second``: mean over questions, and repeats, of all output tokens over all time of
        the turns; ``speedup``: that over the baseline's; ``mean_accepted_tokens``: tokens per round over all rounds,
        bonus included; ``by_task``: the same for each sub-task, empty unless all categories are Spec-Bench's.
    """
    mine, base = _by_question(rows), _by_question(baseline_rows)
    shared = [key for key, turns in mine.items() if len(turns) == len(base.get(key, ()))]
    tasks = {key: sub_task(mine[key][0]["category"]) for key in shared}
    known = set(tasks.values()) <= set(SUB_TASKS)
    chosen = [task for task in SUB_TASKS if task in tasks.values()] if known else []
    return {
        **_numbers(mine, base, shared),
        "by_task": {task: _numbers(mine, base, [key for key in shared if tasks[key] == task]) for task in chosen},
    }


_Question = tuple[Hashable, int]


def _by_question(rows: Sequence[Row]) -> dict[_Question, list[Row]]:
    found: dict[_Question, list[Row]] = {}
    for row in rows:
        found.setdefault((row["question_id"], row["repeat"]), []).append(row)
    return found


def _numbers(
    mine: dict[_Question, list[Row]], base: dict[_Question, list[Row]], keys: Sequence[_Question]
) -> dict[str, Any]:
    rate, base_rate = _mean_rate(mine, keys), _mean_rate(base, keys)
    return {
        "questions": len({question for question, _ in keys}),
        "tokens_per_second": rate,
        "speedup": None if rate is None or base_rate is None else ratio(rate, base_rate),
        "mean_accepted_tokens": metrics.mean_acceptance_length([row for key in keys for row in mine[key]]),
    }


def _mean_rate(questions: dict[_Question, list[Row]], keys: Sequence[_Question]) -> float | None:
    rates = [metrics.end_to_end_tokens_per_second(questions[key]) for key in keys]
    defined = [rate for rate in rates if rate is not None]
    return ratio(sum(defined), len(defined))
