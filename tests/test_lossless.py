"""Every strategy in ``conf/drafter/``, as it is configured there: its texts are the target's own.

A new file in that folder is tested here without an edit. Greedy texts are compared with a loop that shares no code
with the package; sampled ones with the baseline, since one seed gives one text whichever strategy drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from case_names import without_addresses
from oracles import check_greedy_identity, check_law, decode, naive_answers
from strategies_at_hand import Make, maker
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_lab.audit.toy import bigram_model, law_table
from specdec_lab.config import available_strategies
from specdec_lab.decode import Request
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Exact, Target
from specdec_lab.verify import Acceptance

GetTarget = Callable[..., Target]

BUDGETS = (1, 2, 3, 4, 5, 40)


@pytest.fixture(params=available_strategies())
def make_drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return ``target -> drafter``, with the file's own values."""
    return maker(request.param, tmp_path_factory.getbasetemp() / "drafts")


def repetitive_requests(count: int, budgets: Sequence[int], *, vocab: int = 128) -> list[Request]:
    """Return requests whose prompts repeat themselves, so that there is something to copy."""
    rng = random.Random(count)
    requests = []
    for at in range(count):
        phrase = [rng.randrange(3, vocab) for _ in range(rng.choice((1, 4, 6)))]
        prompt = tuple((phrase * 4)[: rng.choice((1, 7, 18))])
        requests.append(Request(prompt, budgets[at % len(budgets)], noise_key=("question", at)))
    return requests


def test_greedy_texts_are_those_of_the_naive_loop(
    make_drafter: Make, architecture: str, exact: Exact, tiny_target: GetTarget
):
    """Guards LC-13, CP and ST-02: six families, both exact modes, six budgets, batches of 1 and 3 with refills."""
    target = tiny_target(architecture, exact)
    drafter = make_drafter(target)
    requests = repetitive_requests(9, BUDGETS)
    answers = naive_answers(target.model, requests, target.eos_ids)
    generations = check_greedy_identity(target, drafter, requests, answers)
    if drafter.max_nodes > 1:
        proposed = sum(item.proposed for generation in generations for item in generation.rounds)
        assert proposed > 0, "the strategy never proposed anything, so nothing was proved"


def no_token_twice_in_a_row(ids: Tensor, scores: Tensor) -> Tensor:
    return scores.scatter(1, ids[:, -1:], float("-inf"))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"bad_words": ((3,), (4, 5)), "min_new_tokens": 7},
        {"logits_processors": (no_token_twice_in_a_row,), "repetition_penalty": 0.8},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_greedy_texts_under_processors_are_those_of_generate(
    make_drafter: Make, settings: dict[str, Any], tiny_target: GetTarget
):
    """Guards SP-01 and SP-05: each node is processed with its own history, as transformers' own loop would."""
    target = tiny_target("llama")
    requests = repetitive_requests(6, (25, 9))
    asked = {name: value for name, value in settings.items() if name not in ("bad_words", "logits_processors")}
    if "bad_words" in settings:
        asked["bad_words_ids"] = [list(ids) for ids in settings["bad_words"]]
    drafted = decode(target, make_drafter(target), requests, sampling=SamplingParams(**settings), batch_size=2)
    for request, generation in zip(requests, drafted, strict=True):
        ids = torch.tensor([request.prompt_ids])
        plain: Any = target.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            logits_processor=LogitsProcessorList(settings.get("logits_processors", ())),
            **asked,
        )
        assert generation.output_ids == tuple(plain[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.7, "min_p": 0.2, "seed": 9},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "seed": 1},
        {"temperature": 0.9, "repetition_penalty": 1.3, "min_new_tokens": 5},
        {"temperature": 1.0, "bad_words": ((3,), (20, 21)), "logits_processors": (no_token_twice_in_a_row,)},
    ],
    ids=without_addresses,
)
def test_sampled_texts_are_those_of_the_baseline(make_drafter: Make, settings: dict[str, Any], tiny_target: GetTarget):
    """Guards SP-02 and SP-04: with one seed the text is the baseline's, token for token, in any batch."""
    target = tiny_target("qwen2")
    drafter, sampling = make_drafter(target), SamplingParams(**settings)
    requests = repetitive_requests(8, (1, 3, 25))
    plain = decode(target, AutoregressiveDrafter(target), requests, sampling=sampling)
    coupled = Acceptance("coupled")
    for batch_size in (1, 3):
        drafted = decode(target, drafter, requests, sampling=sampling, acceptance=coupled, batch_size=batch_size)
        assert [item.output_ids for item in drafted] == [item.output_ids for item in plain]
    other = SamplingParams(**{**settings, "seed": 100})
    again = decode(target, AutoregressiveDrafter(target), requests, sampling=other)
    assert [item.output_ids for item in again] != [item.output_ids for item in plain]


def test_sampled_tokens_follow_the_targets_law(make_drafter: Make):
    """Guards LC-03, LC-07 and LC-12: over many questions the second and third token have the law of the target."""
    laws = {0: (0.4, 0.35, 0.25), 1: (0.25, 0.3, 0.45), 2: (0.5, 0.25, 0.25)}
    target = Target(bigram_model(law_table(laws)), name="toy")
    prompt = (0, 1, 2, 0, 0, 2, 1, 1, 0, 1, 2, 2, 0)  # every pair has occurred, so there is always a draft
    requests = [Request(prompt, 3, noise_key=(number,)) for number in range(400)]
    generations = decode(
        target, make_drafter(target), requests, sampling=SamplingParams(temperature=1.0), batch_size=50
    )
    law: dict[Any, float] = {
        (first, second): sum(laws[0][start] * laws[start][first] for start in range(3)) * laws[first][second]
        for first in range(3)
        for second in range(3)
    }
    check_law(lambda number: generations[number].output_ids[1:], law, len(requests))


def test_log_probabilities_do_not_depend_on_the_strategy(make_drafter: Make, tiny_target: GetTarget):
    """Guards SP-07: an accepted draft is reported with the target's probability, as a plain step would."""
    target = tiny_target("gemma3")
    requests = [Request(item.prompt_ids, 20, logprobs=True) for item in repetitive_requests(4, (20,))]
    plain = decode(target, AutoregressiveDrafter(target), requests)
    drafted = decode(target, make_drafter(target), requests, batch_size=2)
    for one, other in zip(plain, drafted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_the_folder_is_found():
    """An empty list would let every test above pass."""
    known = {"autoregressive", "draft_model", "eagle", "eagle3", "hybrid"}
    known |= {"hybrid_eagle", "lookahead", "medusa", "ngram", "recycling"}
    assert known <= set(available_strategies())
