"""Conversation files: two shapes, read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_lab.distill.conversation_files import ROLES, is_conversations, parse_conversations
from specdec_lab.distill.prompt_files import read_prompt_files, refuse_equal_ids
from specdec_lab.errors import InputError


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def sharegpt(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {**more, "conversations": [{"from": role, "value": text} for role, text in turns]}


def openai(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {**more, "messages": [{"role": role, "content": text} for role, text in turns]}


TALK = (("human", "Hi"), ("gpt", "Hello"), ("human", "Bye"), ("gpt", "Bye"))


def roles(data: bytes) -> list[list[str]]:
    found = parse_conversations(data, "talk.jsonl").conversations
    return [[message["role"] for message in one.messages] for one in found]


def test_both_shapes_give_the_same_messages():
    first = parse_conversations(lines(sharegpt(*TALK, id="x")), "a.jsonl").conversations[0]
    second = parse_conversations(lines(openai(*((ROLES[role], text) for role, text in TALK))), "b.jsonl").conversations[
        0
    ]
    assert first.messages == second.messages
    assert [message["content"] for message in first.messages] == ["Hi", "Hello", "Bye", "Bye"]
    assert first.prompt().turns == ("Hi", "Bye")
    assert (first.number, first.where) == (1, "a.jsonl, line 1")


@pytest.mark.parametrize("name", ROLES)
def test_roles_by_other_names(name: str):
    """Guards TD-14: a role is known by its usual names, in any case."""
    turns = {"system": (name, "human", "gpt"), "user": (name, "gpt"), "assistant": ("human", name)}[ROLES[name]]
    found = roles(lines(sharegpt(*((role.upper(), "a") for role in turns))))
    assert found == [[ROLES[role] for role in turns]]


def test_a_json_list_is_read_too():
    data = json.dumps([sharegpt(*TALK), sharegpt(*TALK)], indent=1).encode()
    assert is_conversations(data)
    assert [one.number for one in parse_conversations(data, "list.json").conversations] == [1, 2]


def test_the_order_of_rows_does_not_matter():
    """Guards TD-11: other fields may be null, missing or of any type, in any row."""
    rows = [sharegpt(*TALK, system=None, score=[]), sharegpt(*TALK, system="Be short."), sharegpt(*TALK, score=3)]
    assert roles(lines(*rows)) == roles(lines(*reversed(rows)))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"text": "User: Hi"}], r"talk.jsonl, line 1, conversations and messages=None: .*this row has text"),
        ([sharegpt(*TALK), {"text": "a"}], r"talk.jsonl, line 2, "),
        ([{**sharegpt(*TALK), **openai()}], r"line 1, .*=\['conversations', 'messages'\]: "),
        (
            [sharegpt(*TALK), openai(("user", "a"), ("assistant", "b"))],
            r"line 2, messages='conversations': .*per shape",
        ),
        ([{"conversations": "Hi"}], r"line 1, conversations='Hi': give a list"),
        ([{"conversations": ["Hi"]}], r"line 1, conversations\[0\]='Hi': give an object"),
        ([{"conversations": [{"from": "human"}]}], r"conversations\[0\].value=None: give a text; this turn has from"),
        ([{"messages": [{"role": "user", "content": ["a"]}]}], r"messages\[0\].content=\['a'\]: give a text"),
        ([sharegpt(("human", "a"), ("wizard", "b"))], r"conversations\[1\].from='wizard': give one of system, human"),
        ([["Hi"]], r"talk.jsonl, line 1="),
    ],
)
def test_an_unknown_shape_names_file_line_and_field(rows: list[Any], sentence: str):
    """Guards TD-11, TD-14: nothing is guessed, and no row becomes empty without a word."""
    with pytest.raises(InputError, match=sentence):
        parse_conversations(lines(*rows), "talk.jsonl")


def test_broken_text_is_refused_by_line():
    with pytest.raises(InputError, match=r"talk.jsonl, line 2=.*not JSON"):
        parse_conversations(lines(sharegpt(*TALK)) + b'{"conversations": [', "talk.jsonl")
    with pytest.raises(InputError, match="not UTF-8"):
        parse_conversations(lines(sharegpt(*TALK)) + b"\xff", "talk.jsonl")


def test_what_cannot_be_used_is_counted():
    """Guards TD-14: a row is used whole, cut behind its last answer, or counted by reason."""
    data = lines(
        sharegpt(*TALK, ("human", "unanswered")),
        sharegpt(("gpt", "Hello"), ("human", "Hi"), ("gpt", "again")),
        sharegpt(("human", "a"), ("human", "b"), ("gpt", "c")),
        sharegpt(("human", "a"), ("gpt", " ")),
        sharegpt(("human", "a")),
        sharegpt(),
    )
    found = parse_conversations(data, "talk.jsonl")
    assert [len(one.messages) for one in found.conversations] == [4]
    assert found.skipped == {"order": 2, "blank": 1, "unanswered": 2}
    with pytest.raises(InputError, match=r"no conversation that can be used \(1 unanswered\)"):
        parse_conversations(lines(sharegpt()), "talk.jsonl")


def test_prompt_files_of_every_shape_and_their_hashes(tmp_path: Path):
    """Conversations count by their user turns, with their line as id."""
    (tmp_path / "talk.jsonl").write_bytes(lines(sharegpt(("system", "Be short."), *TALK)))
    (tmp_path / "ask.jsonl").write_bytes(lines({"question_id": 1, "category": "qa", "turns": ["Why?"]}))
    talk, ask = read_prompt_files([str(tmp_path / "talk.jsonl"), str(tmp_path / "ask.jsonl")], "prompts.paths")
    assert talk.prompts[0].turns == ("Hi", "Bye")
    assert ask.prompts[0].turns == ("Why?",)
    assert (talk.name, len(talk.sha256)) == ("talk.jsonl", 64)
    with pytest.raises(InputError, match=r"prompts.paths=1: talk.jsonl and ask.jsonl both have this question_id"):
        refuse_equal_ids([talk, ask], "prompts.paths")
    with pytest.raises(InputError, match="same content"):
        read_prompt_files([str(tmp_path / "ask.jsonl")] * 2, "prompts.paths")
    with pytest.raises(InputError, match=r"prompts.paths='none.jsonl': it cannot be read"):
        read_prompt_files(["none.jsonl"], "prompts.paths")
