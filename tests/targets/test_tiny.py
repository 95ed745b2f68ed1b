"""The random target that is built in code."""

from __future__ import annotations

import pytest
import torch
from oracles import naive_answer

from specdec_lab.chat import render_chat
from specdec_lab.errors import InputError
from specdec_lab.targets.tiny import SPECIALS, VOCAB_SIZE, build_model, build_tokenizer, load_tiny

PROMPTS = ("What is the capital of France?", "def add(a, b):\n    return", "Once upon a time")


def test_same_seed_same_weights_and_nothing_else_moves():
    """Two runs compare the same target, and building it does not shift anybody's random numbers."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (load_tiny(device="cpu", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    weights = [dict(target.model.named_parameters())["lm_head.weight"] for target in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_greedy_answers_differ_and_do_not_stand_still():
    """A target that answers one token for ever would hide every error of position."""
    target = load_tiny(device="cpu")
    tokenizer = target.tokenizer
    assert tokenizer is not None
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        answers.append(naive_answer(target.model, ids, 40, frozenset())[len(ids) :])
        assert len(set(answers[-1])) >= 10
    assert answers[0] != answers[1] != answers[2]


def test_output_is_never_a_padding_row():
    """Guards TV-01: the output layer is wider than the tokenizer, and no answer holds an id without a token."""
    tokenizer = build_tokenizer()
    assert len(tokenizer) < VOCAB_SIZE
    model = build_model(len(tokenizer))
    logits = model(input_ids=torch.arange(len(tokenizer))[None]).logits[0]
    assert int(logits.argmax(-1).max()) < len(tokenizer)


def test_text_round_trips_and_specials_are_one_token_each():
    """The tokenizer covers every byte; words of several bytes are shorter than their bytes."""
    tokenizer = build_tokenizer()
    for text in (*PROMPTS, "naïve — 日本語 😀\n\ttab", ""):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert ids.count(tokenizer.bos_token_id) == 1
    assert len(tokenizer("the other")["input_ids"]) < len("the other")
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIALS] == list(range(len(SPECIALS)))


def test_conversation_has_one_bos_though_template_and_tokenizer_both_write_it():
    """Guards TV-05."""
    tokenizer = build_tokenizer()
    turns = [("user", "hi"), ("assistant", "ho"), ("user", "and?")]
    ids = render_chat(tokenizer, [{"role": role, "content": content} for role, content in turns])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(list(ids)) == "<s><user>hi<assistant>ho</s><user>and?<assistant>"


def test_settings_are_applied():
    """dtype, attention, position limit and padding mode reach the target."""
    target = load_tiny(dtype="bfloat16", device="cpu", attention="eager", max_positions=64, exact="fixed_shape")
    assert target.dtype == torch.bfloat16
    assert target.max_length == 64
    assert target.exact == "fixed_shape"
    assert target.model.config._attn_implementation == "eager"
    assert target.eos_ids == {2}
    assert target.name == "tiny"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "gpt2"}, "target.model='gpt2'.*target=hf"),
        ({"revision": "main"}, "target.revision='main'"),
        (
            {"attention": "flash_attention_2"},
            "target.attention='flash_attention_2': flash attention takes no tree mask",
        ),
        ({"dtype": "int8"}, "target.dtype='int8'.*bfloat16"),
    ],
)
def test_what_it_cannot_be_is_refused(settings: dict[str, str], sentence: str):
    """Each setting that this target has not is named with its value and a remedy."""
    with pytest.raises(InputError, match=sentence):
        load_tiny(**settings)  # pyright: ignore[reportArgumentType]
