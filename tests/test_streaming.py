"""Streamed text: pieces that join to the answer's text, whole characters only, nothing of a stop string."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sample_tokenizers import byte_fallback, byte_level
from transformers import PreTrainedTokenizerFast

from specdec_lab.stopping import StopRule
from specdec_lab.streaming import Detokenizer, TextStream, before_stop

STOPS = ("END", "\n\n", "😀", "EN", "日本", " ", "é", "D EN", "ENDEND", "stop")


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    return byte_level() if kind == "bytes" else byte_fallback()


@st.composite
def rounds(draw: st.DrawFn, kind: str) -> list[list[int]]:
    """Random token ids in rounds, rich in broken characters and in pieces of stop strings."""
    spelled = list(draw(st.sampled_from(["ENDEND", "aEN D END", "日本語", "é\n\n", "x😀😀END", "stop sto"])).encode())
    token = st.one_of(
        st.sampled_from(list("END 😀日é".encode())),  # ids below 256 are the bytes in both tokenizers
        st.integers(0, 255),
        st.integers(256, len(tokenizer(kind)) + 3),  # the last few are unknown to the tokenizer
    )
    return draw(st.lists(st.one_of(st.lists(token, max_size=6), st.just(spelled)), max_size=8))


def plain_text(kind: str, ids: list[int], stop: tuple[str, ...], eos_ids: frozenset[int]) -> str:
    """The oracle: one decode of everything by the tokenizer itself, then the cut."""
    kept = [token for token in ids if token not in eos_ids]
    text = tokenizer(kind).decode(kept, skip_special_tokens=True)
    assert isinstance(text, str)
    return before_stop(text, stop)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@settings(max_examples=400, deadline=None)
@given(data=st.data(), stop=st.lists(st.sampled_from(STOPS), max_size=3).map(tuple))
def test_pieces_join_to_the_text_of_the_stop_rule(kind: str, data: st.DataObject, stop: tuple[str, ...]) -> None:
    """Guards ST-01: streamed text and final text are one text, whatever the tokens and however rounds cut them."""
    parts = data.draw(rounds(kind))
    ids = [token for part in parts for token in part]
    eos_ids = frozenset({65, 258})  # ordinary tokens, as some generation configs name them
    stream = TextStream(tokenizer(kind), stop, eos_ids)
    pieces = [stream.push(part) for part in parts]
    shown = "".join(pieces)
    whole = shown + stream.finish()
    assert whole == StopRule(10**6, eos_ids, stop, tokenizer(kind)).text(ids) == plain_text(kind, ids, stop, eos_ids)
    assert not any(string in whole for string in stop)
    assert stream.finish() == ""


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30).map(lambda text: text.replace("\ufffd", "")), st.lists(st.integers(1, 5), min_size=1))
@example("日本語 😀😀 é", [1])
def test_no_piece_ends_within_a_character(text: str, sizes: list[int]) -> None:
    """A text that is valid is streamed in whole characters, wherever a round ends."""
    ids, stream = list(text.encode()), TextStream(tokenizer("bytes"))
    pieces: list[str] = []
    while ids:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream.push(ids[:size]))
        ids = ids[size:]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_text_is_shown_as_soon_as_it_is_settled() -> None:
    """Only what may still change is held back: the start of a stop string, or of a character."""
    stream = TextStream(tokenizer("bytes"), ("END",))
    assert stream.push(list(b"Hello E")) == "Hello "
    assert stream.push(list(b"N")) == ""
    assert stream.push(list(b"T, ")) == "ENT, "
    assert stream.push([0xF0, 0x9F, 0x98]) == ""
    assert stream.push([0x80]) == "😀"
    assert stream.push(list(b"go EN")) == "go "
    assert stream.push(list(b"D")) == ""
    assert stream.finish() == ""


def test_a_stop_string_that_never_comes_is_shown_at_the_end() -> None:
    stream = TextStream(tokenizer("bytes"), ("END",))
    assert stream.push(list(b"the EN")) + stream.finish() == "the EN"


def test_the_first_words_space_is_dropped_once() -> None:
    """A window into the text must not be taken for its start, where such tokenizers drop the space."""
    llama = byte_fallback()
    llama.backend_tokenizer.add_special_tokens(["<quiet>"])  # special, though transformers knows nothing of it
    words = [llama.get_vocab()[name] for name in ("▁Hello", "▁world", "</s>", "<quiet>", "▁", "▁world")]
    stream = TextStream(llama)
    assert [stream.push([token]) for token in words] == ["Hello", " world", "", "", " ", " world"]


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert stream.push([1, 2, 3]) + stream.finish() == ""


UNKNOWN, QUIET = 5000, 5001


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("bytes", [69, 78, 257] * 500),
        ("bytes", [0xF0, 0x80, 0xE2, 0x82] * 500),
        ("bytes", [0xE2] * 1000),
        ("bytes", [0xE2, *[UNKNOWN] * 1000]),
        ("bytes", [0xE2, *[QUIET] * 1000]),
        ("fallback", [69, 78, 257] * 500),
        ("fallback", [257, *[UNKNOWN] * 1000]),
        ("fallback", [257, *[QUIET] * 1000]),
    ],
    ids=["words", "broken", "one byte", "unknown", "quiet", "fallback", "fallback unknown", "fallback quiet"],
)
def test_a_push_decodes_a_few_tokens_however_long_the_text_is(
    kind: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a cost per token that grows with the text, also for a model stuck in bytes that make no sense."""
    fresh = byte_level() if kind == "bytes" else byte_fallback()
    fresh.backend_tokenizer.add_special_tokens(["<quiet>"])
    quiet = fresh.get_vocab()["<quiet>"]
    sizes: list[int] = []
    plain = PreTrainedTokenizerFast.decode

    def counted(self: PreTrainedTokenizerFast, tokens: list[int], **options: bool) -> str | list[str]:
        sizes.append(len(tokens))
        return plain(self, tokens, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", counted)
    detokenizer = Detokenizer(fresh)
    for token in ids:
        detokenizer.push(quiet if token == QUIET else token)
    assert max(sizes) <= 12


def test_before_stop_takes_the_earliest() -> None:
    assert before_stop("one two three", ("three", "two")) == "one "
    assert before_stop("one", ()) == "one"
