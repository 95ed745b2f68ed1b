"""Conversation files: ShareGPT's and OpenAI's shapes, checked strictly, one conversation per line.

A row is ``{"conversations": [{"from": ..., "value": ...}]}`` or ``{"messages": [{"role": ..., "content": ...}]}``; its
other fields are ignored. A file has one of the two shapes throughout. It is read as JSON lines, or as one JSON list.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_lab.bench.prompts import Prompt
from specdec_lab.errors import InputError, listed

SHAPES = {"conversations": ("from", "value"), "messages": ("role", "content")}
"""Per field that holds the turns: a turn's fields of role and text."""

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
"""Names of roles in such files, and what they mean."""

Message = dict[str, str]


@dataclass(frozen=True)
class Conversation:
    """One conversation: perhaps a system message, then user and assistant in turn, the last from the assistant.

    Attributes:
        number: of its line, from 1; of its place in a JSON list.
        where: file and line, for messages.
        messages: ``{"role", "content"}`` as ``render_chat`` takes them.
    """

    number: int
    where: str
    messages: tuple[Message, ...]

    def prompt(self) -> Prompt:
        """Return its user turns as a prompt; a system message is left out."""
        turns = tuple(message["content"] for message in self.messages if message["role"] == "user")
        return Prompt(self.number, "conversation", turns)


@dataclass(frozen=True)
class ConversationFile:
    """The usable conversations of a file.

    Attributes:
        name: of the file, without its folder.
        skipped: how many were left out, by reason: ``order`` (user and assistant do not take turns), ``blank`` (an
            empty message), ``unanswered`` (the assistant never speaks).
    """

    name: str
    conversations: tuple[Conversation, ...]
    skipped: Mapping[str, int]


def is_conversations(data: bytes) -> bool:
    """Return whether a file's first row has one of the shapes here."""
    try:
        first = next(_rows(data, ""), None)
    except InputError:
        return False
    return first is not None and isinstance(first[1], dict) and bool(first[1].keys() & SHAPES.keys())


def parse_conversations(data: bytes, path: str) -> ConversationFile:
    """Parse the content of a conversation file.

    Raises:
        InputError: names file, line and field of what has an unknown shape; or no conversation can be used.
    """
    kept: list[Conversation] = []
    skipped: Counter[str] = Counter()
    shape: str | None = None
    for number, row in _rows(data, path):
        where = f"{path}, line {number}"
        found = _shape(row, where)
        if shape not in (None, found):
            raise InputError(f"{where}, {found}", shape, "earlier lines have the other shape; give one file per shape")
        shape = found
        messages = _answered(_messages(row[found], f"{where}, {found}", *SHAPES[found]))
        reason = _unusable(messages)
        if reason is None:
            kept.append(Conversation(number, where, tuple(messages)))
        else:
            skipped[reason] += 1
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no lines"
        raise InputError("conversations", path, f"the file holds no conversation that can be used ({why})")
    return ConversationFile(Path(path).name, tuple(kept), dict(skipped))


def _rows(data: bytes, path: str) -> Iterator[tuple[int, Any]]:
    """Yield number and content of each row."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(path, f"byte {error.start}", "this is not UTF-8; save the file as UTF-8") from None
    if text.lstrip().startswith("["):
        rows = _json(text, path)
        if not isinstance(rows, list):
            raise InputError(path, None, "give a JSON list of conversations, or one conversation per line")
        yield from enumerate(rows, start=1)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _json(line, f"{path}, line {number}")


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(where, text[:60], f"this is not JSON ({error}); give one JSON object per line") from None


def _shape(row: Any, where: str) -> str:
    if not isinstance(row, dict):
        raise InputError(where, str(row)[:60], "give a JSON object in braces")
    found = sorted(row.keys() & SHAPES.keys())
    if len(found) != 1:
        names = listed(sorted(row), most=6) or "no fields"
        remedy = f"a conversation has either conversations or messages; this row has {names}"
        raise InputError(f"{where}, {' and '.join(SHAPES)}", found or None, remedy)
    return found[0]


def _messages(turns: Any, where: str, role_field: str, text_field: str) -> list[Message]:
    if not isinstance(turns, list):
        raise InputError(where, str(turns)[:60], f"give a list of turns with {role_field} and {text_field}")
    messages: list[Message] = []
    for at, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise InputError(f"{where}[{at}]", str(turn)[:60], f"give an object with {role_field} and {text_field}")
        for name in (role_field, text_field):
            if not isinstance(turn.get(name), str):
                remedy = f"give a text; this turn has {listed(sorted(turn), most=6) or 'no fields'}"
                raise InputError(f"{where}[{at}].{name}", turn.get(name), remedy)
        role = ROLES.get(turn[role_field].lower())
        if role is None:
            raise InputError(f"{where}[{at}].{role_field}", turn[role_field], f"give one of {', '.join(ROLES)}")
        messages.append({"role": role, "content": turn[text_field]})
    return messages


def _answered(messages: list[Message]) -> list[Message]:
    """Drop what no assistant has answered from the end."""
    last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return messages[: last + 1]


def _unusable(messages: list[Message]) -> str | None:
    """Return why a conversation is left out, ``None`` if it is used."""
    if not messages:
        return "unanswered"
    start = 1 if messages[0]["role"] == "system" else 0
    turns = messages[start:]
    expected = ["user", "assistant"] * (len(turns) // 2 + 1)
    if not turns or any(message["role"] != role for message, role in zip(turns, expected, strict=False)):
        return "order"
    return "blank" if any(not message["content"].strip() for message in messages) else None
