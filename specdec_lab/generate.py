"""One call that decodes one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Literal, overload

import numpy as np
from torch import Tensor

from specdec_lab.chat import render_chat
from specdec_lab.decode import GREEDY, Generation, Progress, Request, speculative_decode
from specdec_lab.drafters.base import Drafter
from specdec_lab.errors import InputError, SpecdecError
from specdec_lab.sampling import SamplingParams
from specdec_lab.stopping import check_stop
from specdec_lab.streaming import TextStream
from specdec_lab.target import Target
from specdec_lab.verify import REJECTION, Acceptance, RuleName

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | Tensor | np.ndarray


@overload
def generate(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    *,
    max_new_tokens: int = ...,
    sampling: SamplingParams = ...,
    acceptance: Acceptance | RuleName = ...,
    stop: Sequence[str] = ...,
    logprobs: bool = ...,
    stream: Literal[False] = ...,
) -> Generation: ...


@overload
def generate(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    *,
    max_new_tokens: int = ...,
    sampling: SamplingParams = ...,
    acceptance: Acceptance | RuleName = ...,
    stop: Sequence[str] = ...,
    logprobs: bool = ...,
    stream: Literal[True],
) -> Iterator[Progress]: ...


def generate(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams = GREEDY,
    acceptance: Acceptance | RuleName = REJECTION,
    stop: Sequence[str] = (),
    logprobs: bool = False,
    stream: bool = False,
) -> Generation | Iterator[Progress]:
    """Decode one prompt with one strategy.

    Args:
        target: the model that decides.
        drafter: the strategy that proposes, made for this target.
        prompt: a user's message, a conversation as ``[{"role": ..., "content": ...}]``, or token ids as they are, a
            tensor or an array too. Text goes through the tokenizer's chat template.
        max_new_tokens: most tokens of the answer, EOS included.
        sampling: how tokens are chosen; greedy by default.
        acceptance: how drafts are accepted, an ``Acceptance`` or the name of its rule; ``typical`` is lossy.
        stop: strings that end the answer.
        logprobs: record the target's log-probability of each token.
        stream: yield ``Progress`` as tokens are committed, with the text that they settle: never half a character, nor
            the beginning of a stop string. The last one carries the finished ``generation``.

    Raises:
        InputError: a prompt or a limit that cannot be used.
        SpecdecError: decoding failed, such as a prompt that is longer than the target's positions.
    """
    if max_new_tokens < 1:
        raise InputError("max_new_tokens", max_new_tokens, "give a whole number of at least 1")
    sampling.check_budget(max_new_tokens)
    if isinstance(acceptance, str):
        acceptance = Acceptance(acceptance)
    request = Request(prompt_ids(target, prompt), max_new_tokens, check_stop(stop), logprobs=logprobs)
    events = _checked(speculative_decode(target, drafter, [request], sampling=sampling, acceptance=acceptance))
    if stream:
        return _with_text(target, stop, events)
    (*_, last) = events
    assert last.generation is not None
    return last.generation


def prompt_ids(target: Target, prompt: Prompt) -> tuple[int, ...]:
    """Render a prompt to token ids.

    Raises:
        InputError: an empty prompt, an id outside the vocabulary, or text for a target without tokenizer.
    """
    if isinstance(prompt, Tensor | np.ndarray):
        prompt = prompt.reshape(-1).tolist() if prompt.ndim < 2 or prompt.shape[0] == 1 else []
    if not prompt:
        raise InputError("prompt", prompt, "give at least one token, of one prompt")
    if not isinstance(prompt, str) and isinstance(prompt[0], Integral):
        ids = tuple(int(token) for token in prompt)  # type: ignore[call-overload]
        strange = [token for token in ids if not 0 <= token < target.vocab_size]
        if strange:
            raise InputError("prompt", strange[0], f"token ids run from 0 to {target.vocab_size - 1}")
        return ids
    if not isinstance(prompt, str) and not all(isinstance(message, Mapping) for message in prompt):
        raise InputError("prompt", prompt, "give a text, messages with role and content, or token ids, whole numbers")
    if target.tokenizer is None:
        raise InputError("prompt", prompt, "this target has no tokenizer; give token ids")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return render_chat(target.tokenizer, messages)  # type: ignore[arg-type]


def _checked(events: Iterator[Progress]) -> Iterator[Progress]:
    for event in events:
        if event.generation is not None and event.generation.error is not None:
            raise SpecdecError(event.generation.error)
        yield event


def _with_text(target: Target, stop: Sequence[str], events: Iterator[Progress]) -> Iterator[Progress]:
    if target.tokenizer is None:
        yield from events
        return
    text = TextStream(target.tokenizer, stop, target.eos_ids)
    for event in events:
        piece = text.push(event.new_tokens)
        yield replace(event, text=piece if event.generation is None else piece + text.finish())
