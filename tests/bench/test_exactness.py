"""What counts as the same answer, as a tie and as a difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_lab.bench.exactness import (
    TIE_MARGIN_LOGITS,
    compare,
    exactness,
    first_divergence,
    margin_logits,
)
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target
from specdec_lab.targets.tiny import load_tiny

GREEDY = SamplingParams()
PROMPT = (1, 3, 20, 30, 40, 4)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_tiny(device="cpu")


def answer(target: Target, sampling: SamplingParams = GREEDY, count: int = 6) -> tuple[int, ...]:
    request = Request(PROMPT, count, noise_key=(1, 0, 0))
    *_, last = speculative_decode(target, AutoregressiveDrafter(target), [request], sampling=sampling)
    assert last.generation is not None
    return last.generation.output_ids


def row(output_ids: Sequence[int]) -> dict[str, Any]:
    return {"question_id": 1, "turn": 0, "repeat": 0, "prompt_ids": list(PROMPT), "output_ids": list(output_ids)}


def plain_logits(target: Target, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize(
    ("ids", "baseline", "found"),
    [
        ([5, 6], [5, 6], None),
        ([5, 7, 8], [5, 6, 8], (1, 7, 6)),
        ([5], [5, 6], (1, None, 6)),
        ([5, 6, 7], [5, 6], (2, 7, None)),
        ([0], [1], (0, 0, 1)),
    ],
)
def test_first_divergence(ids: list[int], baseline: list[int], found: tuple[int, int | None, int | None] | None):
    """An answer that stops early or late leaves the baseline's at its end; token 0 is a token."""
    expected = None if found is None else {"position": found[0], "token": found[1], "baseline_token": found[2]}
    assert first_divergence(ids, baseline) == expected


def test_margin_is_the_gap_to_the_worse_of_both_tokens():
    """The top-2 margin if the two are the top two; a third token is not excused by a close race of others."""
    scores = torch.tensor([1.0, 4.0, 3.5, 0.0])
    assert margin_logits(scores, (1, 2)) == 0.5
    assert margin_logits(scores, (1, 0)) == 3.0
    assert margin_logits(scores, (2, 0)) == 3.0


def test_another_token_than_the_models_own_is_a_difference(target: Target):
    """Its margin is that of a plain forward of the model, without any of our cache."""
    ids = answer(target)
    logits = plain_logits(target, (*PROMPT, *ids[:3]))
    best, second = logits.topk(2).indices.tolist()
    assert best == ids[3]
    found = compare(row([*ids[:3], second, 7]), row(ids), target, GREEDY)
    assert found["exact"] == "different"
    divergence = found["divergence"]
    margin = float(logits[best] - logits[second])
    assert divergence == {
        "position": 3,
        "baseline_token": best,
        "token": second,
        "margin_logits": pytest.approx(margin, abs=1e-5),
    }
    assert compare(row(ids), row(ids), target, GREEDY) == {"exact": "identical", "divergence": None}


def test_a_choice_between_equal_logits_is_a_tie():
    """Two rows of the output layer are the same, so only the order of summation can decide between their tokens."""
    target = load_tiny(device="cpu")
    ids = answer(target)
    twin = 319
    assert twin not in ids
    weight = target.model.get_parameter("lm_head.weight")
    with torch.no_grad():
        weight[twin] = weight[ids[3]]
    found = compare(row([*ids[:3], twin]), row(ids), target, GREEDY)
    assert found["exact"] == "tie"
    assert found["divergence"]["margin_logits"] <= TIE_MARGIN_LOGITS[torch.float32]


def test_a_margin_at_the_limit_is_a_tie(target: Target, monkeypatch: pytest.MonkeyPatch):
    """The documented rule is "at most"."""
    ids = answer(target)
    second = plain_logits(target, (*PROMPT, *ids[:3])).topk(2).indices.tolist()[1]
    other = row([*ids[:3], second])
    margin = compare(other, row(ids), target, GREEDY)["divergence"]["margin_logits"]
    for limit, outcome in ((margin, "tie"), (margin * 0.999, "different")):
        monkeypatch.setitem(TIE_MARGIN_LOGITS, torch.float32, limit)
        assert compare(other, row(ids), target, GREEDY)["exact"] == outcome


def test_an_answer_that_ends_elsewhere_is_never_a_tie(target: Target):
    """No token stands against the baseline's, so no margin can excuse it."""
    ids = answer(target)
    found = compare(row(ids[:3]), row(ids), target, GREEDY)
    assert found == {
        "exact": "different",
        "divergence": {"position": 3, "baseline_token": ids[3], "token": None, "margin_logits": None},
    }


def test_sampled_answers_are_compared_under_the_noise_they_were_drawn_with(target: Target):
    """The margin is that of processed logits plus noise, in logits; a token that top-k left out has none."""
    sampling = SamplingParams(temperature=0.7, top_k=5, seed=3)
    ids = answer(target, sampling)
    assert ids != answer(target)
    kept = plain_logits(target, (*PROMPT, *ids[:2])).topk(5).indices.tolist()
    other = next(token for token in kept if token != ids[2])
    found = compare(row([*ids[:2], other]), row(ids), target, sampling)
    assert found["exact"] == "different"
    assert found["divergence"]["margin_logits"] > 0
    left_out = next(token for token in range(5, 300) if token not in kept)
    found = compare(row([*ids[:2], left_out]), row(ids), target, sampling)
    assert found["exact"] == "different"
    assert found["divergence"]["margin_logits"] is None


def test_counts_and_examples():
    """Every compared row is in exactly one count; differences are shown before ties."""
    divergence = {"position": 3, "baseline_token": 1, "token": 2, "margin_logits": 0.5}
    rows = [
        {**row([1]), "exact": "identical", "divergence": None},
        {**row([1]), "exact": "tie", "divergence": divergence},
        {**row([1]), "question_id": 2, "exact": "different", "divergence": divergence},
        {**row([1]), "exact": None, "divergence": None},
    ]
    found = exactness(rows)
    assert (found["compared"], found["identical"], found["ties"], found["different"]) == (3, 1, 1, 1)
    assert [example["question_id"] for example in found["examples"]] == [2, 1]
    assert found["examples"][0] == {"question_id": 2, "turn": 0, "repeat": 0, **divergence}
