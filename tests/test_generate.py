"""The one call: prompts of every kind, streaming, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_lab import Generation, Target, generate
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.errors import InputError, SpecdecError
from specdec_lab.targets.tiny import load_tiny


@pytest.fixture(scope="module")
def target() -> Target:
    return load_tiny(max_positions=128)


def test_a_message_a_conversation_and_ids_are_the_same_prompt(target: Target) -> None:
    drafter = NgramDrafter(target)
    message = generate(target, drafter, "Hello there", max_new_tokens=12)
    conversation = generate(target, drafter, [{"role": "user", "content": "Hello there"}], max_new_tokens=12)
    ids = generate(target, drafter, list(message.request.prompt_ids), max_new_tokens=12)
    assert message.output_ids == conversation.output_ids == ids.output_ids
    one = torch.tensor(message.request.prompt_ids)
    for given in (one, one[None], one.numpy(), list(one.numpy()), torch.tensor([one.tolist()]).numpy()):
        assert generate(target, drafter, given, max_new_tokens=12).output_ids == message.output_ids
    assert len(message.output_ids) == 12


@pytest.mark.parametrize("stop", [(), ("e",)])
def test_a_stream_adds_up_to_the_answer(target: Target, stop: tuple[str, ...]) -> None:
    """Guards ST-01 and ST-04 for streams: the pieces are the committed tokens and their text, no more."""
    drafter = NgramDrafter(target, min_ngram=1)
    whole = generate(target, drafter, "aaaa bbbb", max_new_tokens=40, stop=stop)
    events = list(generate(target, drafter, "aaaa bbbb", max_new_tokens=40, stop=stop, stream=True))
    assert tuple(token for event in events for token in event.new_tokens) == whole.output_ids
    assert "".join(event.text for event in events) == whole.text
    assert [event.generation is None for event in events] == [True] * (len(events) - 1) + [False]
    assert isinstance(events[-1].generation, Generation)


def test_logprobs_come_on_request(target: Target) -> None:
    drafter = NgramDrafter(target)
    answer = generate(target, drafter, "Hello", max_new_tokens=6, logprobs=True)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 6
    assert generate(target, drafter, "Hello", max_new_tokens=6).logprobs is None


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        (torch.empty(0, dtype=torch.long), {}, "prompt"),
        (torch.tensor([[1, 2], [3, 4]]), {}, "prompt"),
        (np.array([1.5]), {}, "prompt"),
        ([1, 10_000_000], {}, "prompt"),
        ("Hello", {"max_new_tokens": 0}, "max_new_tokens"),
        ("Hello", {"stop": [""]}, "stop"),
    ],
)
def test_what_cannot_be_used_is_named(target: Target, prompt: object, options: dict, field: str) -> None:
    with pytest.raises(InputError) as refused:
        generate(target, NgramDrafter(target), prompt, **options)  # type: ignore[call-overload]
    assert refused.value.field == field


def test_a_prompt_without_room_says_so(target: Target) -> None:
    with pytest.raises(SpecdecError, match="128 positions"):
        generate(target, NgramDrafter(target), list(range(3, 131)))
