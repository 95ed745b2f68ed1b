"""The output of a whole strategy, loop and all: its law on toy targets, its texts on a real one."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec_lab.audit.enumeration import EnumeratedNoise, Law, as_law, outcomes, total_variation
from specdec_lab.audit.toy import bigram_model, law_table
from specdec_lab.bench.exactness import first_divergence
from specdec_lab.choices import processed
from specdec_lab.decode import Generation, Request, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import Drafter
from specdec_lab.errors import SpecdecError
from specdec_lab.sampling import Processing, SamplingParams
from specdec_lab.target import Target
from specdec_lab.verify import REJECTION, Acceptance

TOY_PROMPT = (0, 2, 0, 0, 2, 2, 0)
"""Pairs of two of the three tokens have occurred, so that there is something to copy; the third has not, so that a
penalty on what occurred tells what was emitted and drafted."""

TOY_SAMPLING = (
    SamplingParams(1.0),
    SamplingParams(0.7, top_k=2),
    SamplingParams(1.0, repetition_penalty=1.5, min_p=0.1),
    SamplingParams(1.2, top_p=0.9, bad_words=((1, 2), (0, 0, 1))),
    SamplingParams(1.0, min_new_tokens=2),
)
"""Among them processors whose law depends on the whole text, and an EOS that is forbidden at first."""

TOY_EOS = 2

OUTCOMES = 40_000
"""Most outcomes of one enumerated decode."""


def toy_target(rng: random.Random) -> Target:
    """Return a target of three tokens with random laws, one of the tokens its EOS; what is forbidden leaves others."""
    laws = {token: as_law([0.1 + rng.expovariate(1) for _ in range(3)]).tolist() for token in range(3)}
    return Target(bigram_model(law_table(laws), eos=TOY_EOS), name="toy")


@torch.inference_mode()
def plain_law(
    model: PreTrainedModel, processing: Processing, prompt: Sequence[int], new_tokens: int, eos: frozenset[int]
) -> Law:
    """Return the law of plain decoding's answers, by forwards of the model alone, without a cache."""
    finished: dict[tuple[int, ...], float] = {}
    growing = {(): 1.0}
    processors = processing.processors(len(prompt))
    for _ in range(new_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in growing.items():
            ids = torch.tensor([[*prompt, *text]])
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            law = processed(logits, ids, processors)[0].double().softmax(dim=-1)
            for token in law.nonzero()[:, 0].tolist():
                kept = finished if token in eos else longer
                kept[*text, token] = mass * float(law[token])
        growing = longer
    return {**finished, **growing}


def decoded_law(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    new_tokens: int,
    sampling: SamplingParams,
    acceptance: Acceptance = REJECTION,
    limit: int = OUTCOMES,
) -> Law:
    """Return the law of a strategy's answers by running the loop once per outcome of chance.

    Raises:
        TooManyOutcomesError: there are more than ``limit``.
        SpecdecError: the request failed.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)
    request = Request(tuple(prompt), new_tokens)

    def run(noise: EnumeratedNoise) -> tuple[int, ...]:
        events = speculative_decode(target, drafter, [request], sampling=sampling, acceptance=acceptance, noise=noise)
        return answer_of(*(event.generation for event in events if event.generation is not None))

    for text, probability in outcomes(run, limit):
        law[text] += probability
    return law


def answer_of(generation: Generation) -> tuple[int, ...]:
    """Return the tokens of an answer.

    Raises:
        SpecdecError: there is none.
    """
    if generation.error is not None:
        raise SpecdecError(generation.error)
    return generation.output_ids


def law_error(
    make: Callable[[Target], Drafter],
    rng: random.Random,
    sampling: SamplingParams,
    acceptance: Acceptance = REJECTION,
    new_tokens: int = 4,
) -> float:
    """Return the total variation of a strategy's law from plain decoding's on a random toy target."""
    target = toy_target(rng)
    expected = plain_law(target.model, Processing(sampling, target), TOY_PROMPT, new_tokens, target.eos_ids)
    found = decoded_law(target, make(target), TOY_PROMPT, new_tokens, sampling, acceptance)
    return total_variation(found, expected)


@dataclass(frozen=True)
class TextCheck:
    """A strategy's answers against the baseline's at one setting.

    Attributes:
        first_difference: ``question``, ``position``, ``baseline_token`` and ``token`` of the first answer that parts.
    """

    sampling: SamplingParams
    batch_size: int
    compared: int
    identical: int
    first_difference: dict[str, object] | None


def compare_texts(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    settings: Sequence[tuple[SamplingParams, int]],
    acceptance: Acceptance = REJECTION,
    on_answer: Callable[[], None] = lambda: None,
) -> Iterator[TextCheck]:
    """Yield how many of a strategy's answers are the baseline's, token for token, per sampling and batch size.

    The baseline decodes one request at a time.

    Raises:
        SpecdecError: a request failed.
    """
    plain: dict[SamplingParams, list[tuple[int, ...]]] = {}
    for sampling, batch_size in settings:
        if sampling not in plain:
            plain[sampling] = _answers(
                target, AutoregressiveDrafter(target), requests, sampling, REJECTION, 1, on_answer
            )
        drafted = _answers(target, drafter, requests, sampling, acceptance, batch_size, on_answer)
        parted = [
            {"question": request.noise_key[0] if request.noise_key else number, **found}
            for number, request in enumerate(requests)
            if (found := first_divergence(drafted[number], plain[sampling][number])) is not None
        ]
        identical = len(requests) - len(parted)
        yield TextCheck(sampling, batch_size, len(requests), identical, parted[0] if parted else None)


def _answers(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    sampling: SamplingParams,
    acceptance: Acceptance,
    batch_size: int,
    on_answer: Callable[[], None],
) -> list[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for event in speculative_decode(
        target, drafter, requests, sampling=sampling, acceptance=acceptance, batch_size=batch_size
    ):
        if event.generation is not None:
            found[event.index] = answer_of(event.generation)
            on_answer()
    return [found[number] for number in range(len(requests))]
