"""Whether a strategy's answers are the baseline's, and how close a call it was where they part."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from specdec_lab.bench.metrics import Row
from specdec_lab.choices import processed
from specdec_lab.noise import HashedNoise, Key
from specdec_lab.sampling import Processing, SamplingParams
from specdec_lab.target import Target

log = logging.getLogger(__name__)

TIE_MARGIN_LOGITS = {torch.float32: 1e-4, torch.float16: 0.0625, torch.bfloat16: 0.5, torch.float64: 1e-9}
"""Largest margin, in logits, at which two answers that part count as a tie, per compute dtype.

A forward over many tokens sums in another order than one over a single token, so in low precision two tokens whose
logits are this close can swap places. A difference above the margin is no rounding: some path has a fault. Set just
above the largest move of the top-2 margin measured on the default target (``docs/decisions/0004-exactness.md``).
"""

EXAMPLES = 5
"""Divergences that the summary shows."""


def first_divergence(ids: Sequence[int], baseline_ids: Sequence[int]) -> dict[str, int | None] | None:
    """Return where an answer leaves the baseline's, or ``None`` if it never does.

    Returns:
        ``position`` in the answer, ``token`` and ``baseline_token`` there; null where that answer had ended.
    """
    for position, (token, baseline_token) in enumerate(zip_longest(ids, baseline_ids)):
        if token != baseline_token:
            return {"position": position, "baseline_token": baseline_token, "token": token}
    return None


def margin_logits(scores: Tensor, tokens: Sequence[int]) -> float:
    """Return how far the worst of ``tokens`` lies below the best score: the top-2 margin if they are the top two."""
    return float(scores.max() - scores[list(tokens)].min())


def choice_scores(
    target: Target, sampling: SamplingParams, tokens: Sequence[int], prompt_length: int, noise_key: Key
) -> Tensor:
    """Return the scores, in logits, whose maximum is the target's next token after ``tokens``, ``[vocab]``.

    A plain prefill, in the target's own dtype. When sampling, the scores hold the same noise as during decoding and
    are scaled back by the temperature.
    """
    target.allocate(1, len(tokens), 1)
    logits = target.prefill(0, tokens).row_logits(0)[-1].float()
    target.reset(0)
    ids = torch.tensor([list(tokens)], device=logits.device)
    scores = processed(logits[None], ids, Processing(sampling, target).processors(prompt_length))[0]
    if sampling.greedy:
        return scores
    noise = HashedNoise(sampling.seed).shared(len(scores), (*noise_key, len(tokens)), scores.device)
    return (scores + noise) * sampling.temperature


def compare(row: Row, baseline_row: Row, target: Target, sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields ``exact`` and ``divergence`` of a row: identical, a tie, or different.

    Both answers continue the same prompt. A tie is a choice between tokens whose margin is at most
    ``TIE_MARGIN_LOGITS``. With ``top_k``, ``top_p`` or ``min_p``, rounding can also move a token across the cut-off;
    one left out has no score, so that such a row is ``different`` with a null margin, however close the call was.
    """
    found = first_divergence(row["output_ids"], baseline_row["output_ids"])
    if found is None:
        return {"exact": "identical", "divergence": None}
    margin = _margin_at(row, found, target, sampling)
    tie = margin is not None and margin <= TIE_MARGIN_LOGITS[target.dtype]
    return {"exact": "tie" if tie else "different", "divergence": {**found, "margin_logits": margin}}


def _margin_at(
    row: Row, divergence: Mapping[str, int | None], target: Target, sampling: SamplingParams
) -> float | None:
    """Return the margin of the choice at a divergence, ``None`` where there is none or it cannot be computed."""
    token, baseline_token, position = (divergence[name] for name in ("token", "baseline_token", "position"))
    if token is None or baseline_token is None:
        return None
    context = [*row["prompt_ids"], *row["output_ids"][:position]]
    try:
        key = (row["question_id"], row["turn"], row["repeat"])
        scores = choice_scores(target, sampling, context, len(row["prompt_ids"]), key)
    except Exception:  # out of memory, say; the rows are measured, and a difference without margin is still one
        log.warning("question %s: the margin cannot be computed", row["question_id"], exc_info=True)
        return None
    margin = margin_logits(scores, (token, baseline_token))
    return margin if margin < float("inf") else None  # infinite where top-k, top-p or min-p left one of them out


def exactness(rows: Sequence[Row]) -> dict[str, Any]:
    """Count a strategy's compared rows by outcome, and show a few of the divergences, differences first."""
    counts = {outcome: sum(row["exact"] == outcome for row in rows) for outcome in ("identical", "tie", "different")}
    parted = sorted((row for row in rows if row["divergence"] is not None), key=lambda row: row["exact"] == "tie")
    examples: list[Mapping[str, Any]] = [
        {"question_id": row["question_id"], "turn": row["turn"], "repeat": row["repeat"], **row["divergence"]}
        for row in parted[:EXAMPLES]
    ]
    return {
        "compared": sum(counts.values()),
        "identical": counts["identical"],
        "ties": counts["tie"],
        "different": counts["different"],
        "examples": examples,
    }
