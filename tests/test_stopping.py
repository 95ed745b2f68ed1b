"""Where an answer ends: EOS, stop string or budget, wherever in a round it falls."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_tokenizers import byte_fallback, byte_level, letters
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_lab.decode import Generation, Request, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.errors import InputError
from specdec_lab.sampling import SamplingParams
from specdec_lab.stopping import StopRule, check_stop
from specdec_lab.streaming import TextStream
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, chain

EOS, NO_EOS = 9, frozenset[int]()
PROMPT = (3, 1, 4, 1, 5)
DEPTH = 4  # drafts per round
SAMPLED = SamplingParams(temperature=1.0, seed=1)  # varied tokens; one seed gives one text, whatever drafts


# --- the rule alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "count"),
    [([EOS, 5, 6, 7], 1), ([5, EOS, 6, 7], 2), ([5, 6, 7, EOS], 4), ([EOS], 1)],
    ids=["first", "middle", "last", "alone"],
)
def test_the_first_eos_of_a_block_ends_the_answer(block: list[int], count: int) -> None:
    """Guards ST-01: EOS is looked for at every token of a block, and nothing after it belongs to the answer."""
    rule = StopRule(20, frozenset({EOS, 8}))
    assert rule.take([1, 2]) == (2, None)
    assert rule.take(block) == (count, "eos")


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_budget_is_exact(budget: int, size: int) -> None:
    """Guards ST-02: exactly ``budget`` tokens, however they are cut into blocks."""
    rule, taken, reason = StopRule(budget, NO_EOS), 0, None
    while reason is None:
        count, reason = rule.take([1] * size)
        taken += count
    assert (taken, reason) == (budget, "length")


def test_whichever_comes_first_is_the_reason() -> None:
    """Guards ST-04: a stop before the limit within one block is a stop; one after it is never reached."""
    tokenizer = letters()
    ids = [0, 1, EOS, 2, 3, 4]
    assert StopRule(5, frozenset({EOS})).take(ids) == (3, "eos")
    assert StopRule(3, frozenset({EOS})).take(ids) == (3, "eos")
    assert StopRule(2, frozenset({EOS})).take(ids) == (2, "length")
    assert StopRule(5, NO_EOS, ("b",), tokenizer).take(ids) == (2, "stop")
    assert StopRule(2, NO_EOS, ("b",), tokenizer).take(ids) == (2, "stop")
    assert StopRule(1, NO_EOS, ("b",), tokenizer).take(ids) == (1, "length")
    assert StopRule(5, frozenset({1}), ("b",), tokenizer).take(ids) == (2, "eos")


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return {"bytes": byte_level, "fallback": byte_fallback, "letters": letters}[kind]()


STOPS = ("END", "\n\n", "😀", "EN", "日", " ", "é", "ENDEND", "abc", "cdef", "zz")


@pytest.mark.parametrize("kind", ["bytes", "fallback", "letters"])
@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3).map(tuple),
    size=st.integers(1, 7),
    budget=st.integers(1, 40),
)
def test_the_answer_ends_with_the_token_that_completes_a_stop_string(
    kind: str, data: st.DataObject, stop: tuple[str, ...], size: int, budget: int
) -> None:
    """Guards ST-04: the same end as decoding everything anew after every token, whatever the tokens and the rounds."""
    tokenizer = tokenizer_of(kind)
    token = st.one_of(st.sampled_from(list("END 😀日é".encode())), st.integers(0, len(tokenizer) + 1))
    ids = [one % (len(tokenizer) + 2) for one in data.draw(st.lists(token, max_size=40))]
    texts = [str(tokenizer.decode(ids[:count], skip_special_tokens=True)) for count in range(1, len(ids) + 1)]
    ends = [count for count, text in enumerate(texts, start=1) if any(string in text for string in stop)]
    expected = (min(*ends[:1], budget, len(ids)), "stop" if ends and ends[0] <= budget else "length")
    if not ends and len(ids) < budget:
        expected = (len(ids), None)

    rule, taken, reason = StopRule(budget, NO_EOS, stop, tokenizer), 0, None
    for start in range(0, len(ids), size):
        count, reason = rule.take(ids[start : start + size])
        taken += count
        if reason:
            break
    assert (taken, reason) == expected


def test_tokens_without_text_do_not_hide_a_stop_string() -> None:
    """A stop string is found across any number of special tokens: they leave no gap in the text."""
    tokenizer = byte_level()
    rule = StopRule(1000, NO_EOS, ("END",), tokenizer)
    ids = [*b"E", *[tokenizer.pad_token_id] * 100, *b"N", *[len(tokenizer) + 5] * 100, *b"D", *b"more"]
    assert rule.take(ids) == (203, "stop")
    assert rule.text(ids[:203]) == ""


def test_eos_has_no_text_even_where_the_tokenizer_does_not_call_it_special() -> None:
    rule = StopRule(10, frozenset({33}), (), byte_level())
    assert rule.text([*b"Hi", 33]) == "Hi"


@pytest.mark.parametrize("stop", ["END", [""], ["a", ""], ["\ufffd"], [3]])
def test_unusable_stop_strings_are_refused(stop: list[str]) -> None:
    """A bare string would be taken letter by letter, and an empty one would end every answer at once."""
    with pytest.raises(InputError, match=r"^stop="):
        check_stop(stop)


def test_a_rule_that_cannot_work_is_refused() -> None:
    with pytest.raises(InputError, match="max_new_tokens=0"):
        StopRule(0, NO_EOS)
    with pytest.raises(InputError, match="no tokenizer"):
        StopRule(5, NO_EOS, ["END"])
    assert StopRule(5, NO_EOS).text([1, 2]) == ""


# --- in the loop --------------------------------------------------------------------------------------------------


class Replay(Drafter):
    """Drafts the known answer, so that every draft is accepted and an end can fall anywhere in a round."""

    def __init__(self, target: Target, answer: tuple[int, ...]) -> None:
        super().__init__(target, max_nodes=DEPTH + 1)
        self.answer = answer

    def propose(self, context: DraftContext) -> DraftTree:
        done = len(context.tokens) - context.prompt_length
        return chain(context.tokens[-1], self.answer[done : done + min(DEPTH, context.max_depth)])


@cache
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=56,  # every letter of the tokenizer, none of its special tokens
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.2,
    )
    return Target(LlamaForCausalLM(config).eval(), letters())


@cache
def answer() -> tuple[int, ...]:
    """Forty tokens of plain decoding, none of them EOS."""
    (*_, last) = speculative_decode(target(), AutoregressiveDrafter(target()), [Request(PROMPT, 40)], sampling=SAMPLED)
    assert last.generation is not None
    assert last.generation.finish_reason == "length"
    return last.generation.output_ids


def run(budget: int, stop: tuple[str, ...] = ()) -> tuple[Generation, list[tuple[int, ...]]]:
    """Decode with every draft right; return the generation and the tokens that were reported round by round."""
    events = list(
        speculative_decode(target(), Replay(target(), answer()), [Request(PROMPT, budget, stop)], sampling=SAMPLED)
    )
    generation = events[-1].generation
    assert generation is not None
    assert generation.error is None
    return generation, [event.new_tokens for event in events]


def assert_one_count(generation: Generation, reported: list[tuple[int, ...]]) -> None:
    """Reported tokens, output, rounds and text tell one story."""
    assert tuple(token for part in reported for token in part) == generation.output_ids
    assert sum(one.accepted + one.bonus for one in generation.rounds) == len(generation.output_ids) - 1
    assert all(one.accepted <= one.proposed and one.bonus in (0, 1) for one in generation.rounds)
    stream = TextStream(target().tokenizer, generation.request.stop, target().eos_ids)
    assert "".join(stream.push(part) for part in reported) + stream.finish() == generation.text


@pytest.mark.parametrize("at", range(11))
def test_eos_anywhere_in_a_round_cuts_everything_after_it(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ST-01, BM-02: EOS as the prefill's token, first, middle or last draft, or bonus; all counts agree."""
    eos = answer()[at]
    assert eos not in answer()[:at]
    monkeypatch.setattr(target().model.generation_config, "eos_token_id", [57, eos])
    generation, reported = run(40)
    assert generation.output_ids == answer()[: at + 1]
    assert generation.finish_reason == "eos"
    assert_one_count(generation, reported)
    if at > 0:
        place = (at - 1) % (DEPTH + 1)  # of EOS in its round: a draft, or the bonus after them
        assert generation.rounds[-1].accepted == min(place + 1, DEPTH)
        assert generation.rounds[-1].bonus == (1 if place == DEPTH else 0)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 6, 7, 11, 12])
def test_the_loop_keeps_to_the_budget(budget: int) -> None:
    """Guards ST-02, ST-05: exactly the budget, the plain prefix, and never a draft that could not be committed."""
    generation, reported = run(budget)
    assert generation.output_ids == answer()[:budget]
    assert generation.finish_reason == "length"
    assert_one_count(generation, reported)
    done = 1
    for one in generation.rounds:
        assert one.proposed <= budget - done - 1
        done += one.accepted + one.bonus


@pytest.mark.parametrize("at", range(2, 14))
def test_a_stop_string_may_span_tokens_and_rounds(at: int) -> None:
    """Guards ST-01, ST-04: it ends the answer with the token that completes it; the text is cut before it."""
    tokenizer = target().tokenizer
    assert tokenizer is not None
    ends = [len(str(tokenizer.decode(list(answer()[:count])))) for count in range(41)]
    text = str(tokenizer.decode(list(answer())))
    stop = text[ends[at - 2] : ends[at + 1]]  # three tokens, up to answer()[at]
    first = text.find(stop) + len(stop)
    count = next(count for count, (before, after) in enumerate(pairwise(ends), start=1) if before < first <= after)
    generation, reported = run(40, (stop, "never there"))
    assert generation.output_ids == answer()[:count]
    assert generation.finish_reason == "stop"
    assert generation.text == text[: text.find(stop)]
    assert_one_count(generation, reported)


def test_a_stop_beyond_the_budget_is_not_reached() -> None:
    """Guards ST-04: the limit ends the answer, although the block went on to a stop string."""
    tokenizer = target().tokenizer
    assert tokenizer is not None
    stop = str(tokenizer.decode(list(answer()[3:6])))
    assert run(5, (stop,))[0].finish_reason == "length"
    assert run(6, (stop,))[0].finish_reason == "stop"
