"""Prompt files: one JSON object per line, checked strictly, in any of three known shapes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specdec_lab.errors import InputError

BUILTIN = "builtin"
_BUILTIN_FILE = "prompts.jsonl"
_MISSING = "???"  # how a Hydra configuration says that a value must be given

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
"""Categories that Spec-Bench reports as one sub-task, ``mt_bench``."""


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        question_id: unique within its file.
        category: kind of task; results are also given per category.
        turns: what the user says, in order, ``[turns]``; at least one, none of them blank.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run.

    Attributes:
        source: the path as it was given, or ``builtin``.
        sha256: of the chosen prompts, as ``prompts_sha256`` computes it.
        prompts: in the order of the file.
    """

    source: str
    sha256: str
    prompts: tuple[Prompt, ...]

    @property
    def count(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    @property
    def turns(self) -> int:
        """Number of turns of all prompts."""
        return sum(len(prompt.turns) for prompt in self.prompts)


def load_prompts(
    path: str | None = None,
    limit: int | None = None,
    categories: str | Sequence[str] | None = None,
    per_task: int | None = None,
    turns: int | None = None,
    dataset: str | None = None,
    subset: str | None = None,
    split: str = "test",
    revision: str | None = None,
    column: str | None = None,
    category: str | None = None,
) -> PromptSet:
    """Read prompts from a file or a data set and choose from them.

    Each line is read by itself and must have one of these shapes, whose other fields are ignored:
    ``question_id`` (number or text), ``category``, ``turns`` (list of text); HumanEval's ``task_id`` and ``prompt``,
    which become one turn of category ``code``; GSM8K's ``question`` and ``answer``, of which the question becomes one
    turn of category ``math_reasoning`` with the line number as its id. Blank lines are skipped.

    Args:
        path: the file, relative to the current folder (under Hydra, let the caller go to the folder of the launch or
            use ``to_absolute_path``); ``None`` takes the package's own prompts.
        limit: at most this many, from the start of what the other choices leave; ``None`` takes all.
        categories: only these, or only this one; ``None`` takes all.
        per_task: at most this many of each sub-task, as ``of_each_task`` takes them; ``None`` takes all.
        turns: at most this many turns of each prompt, from its first; ``None`` takes all.
        dataset: hub id or folder that is read in place of a file; see ``specdec_lab.bench.hub_prompts`` for this and
            for ``subset``, ``split``, ``revision``, ``column`` and ``category``.

    Raises:
        InputError: names the file, and where it applies the line and the field.
    """
    if dataset == _MISSING:
        raise InputError("prompts.dataset", None, "give a hub id or a folder, as prompts.dataset=OWNER/NAME")
    if dataset is not None and path is not None:
        raise InputError("prompts.path", path, f"prompts.dataset={dataset} is given too; give one of the two")
    if path == _MISSING:
        raise InputError(
            "prompts.path", None, "these prompts do not come with the package; give their file, as prompts.path=FILE"
        )
    for name, most in (("limit", limit), ("per_task", per_task), ("turns", turns)):
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise InputError(f"prompts.{name}", most, "give a whole number of at least 1, or null for all")
    if dataset is not None:
        from specdec_lab.bench.hub_prompts import read_hub_prompts  # which reads rows with this module's parser

        found = read_hub_prompts(dataset, subset, split, revision, column, category)
        source = "/".join(part for part in (dataset, subset, split) if part) + (f"@{revision}" if revision else "")
    elif path is None:
        source = BUILTIN
        found = parse_prompts((resources.files("specdec_lab.data") / _BUILTIN_FILE).read_bytes(), source)
    else:
        source, found = path, parse_prompts(_read(path), path)
    chosen = _of_categories(found, categories, source)
    if per_task is not None:
        chosen = of_each_task(chosen, per_task)
    chosen = tuple(replace(prompt, turns=prompt.turns[:turns]) for prompt in chosen[:limit])
    return PromptSet(source, prompts_sha256(chosen), chosen)


def sub_task(category: str) -> str:
    """Return the name under which Spec-Bench reports a category."""
    return "mt_bench" if category in MT_BENCH else category


def of_each_task(prompts: Sequence[Prompt], most: int) -> tuple[Prompt, ...]:
    """Return at most so many prompts of each of Spec-Bench's sub-tasks; other categories are tasks by themselves.

    Where a task has several categories, they take turns, and then the tasks do, each in the order of the file: so
    every start of the result is as even as it can be, and a smaller number takes a part of what a larger one takes.
    """
    tasks: dict[str, dict[str, list[Prompt]]] = {}
    for prompt in prompts:
        tasks.setdefault(sub_task(prompt.category), {}).setdefault(prompt.category, []).append(prompt)
    return _in_turn([_in_turn(list(categories.values()))[:most] for categories in tasks.values()])


def _in_turn(groups: Sequence[Sequence[Prompt]]) -> tuple[Prompt, ...]:
    return tuple(prompt for rank in zip_longest(*groups) for prompt in rank if prompt is not None)


def parse_prompts(data: bytes, source: str, field: str = "prompts.path") -> tuple[Prompt, ...]:
    """Parse the content of a prompt file; ``source`` is what errors call it.

    Raises:
        InputError: a line that is not UTF-8, not JSON or of no known shape, an id given twice, or no prompt at all.
    """
    prompts: dict[int | str, Prompt] = {}
    first_line: dict[int | str, int] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        prompt = _prompt(_json_object(line, where), where, number)
        if prompt.question_id in prompts:
            remedy = f"line {first_line[prompt.question_id]} has this id already; give each prompt its own"
            raise InputError(f"{where}, question_id", prompt.question_id, remedy)
        prompts[prompt.question_id], first_line[prompt.question_id] = prompt, number
    if not prompts:
        raise InputError(field, source, "the file holds no prompt; give one JSON object per line")
    return tuple(prompts.values())


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Return the fingerprint of prompts: equal exactly if ids, categories, turns and their order are.

    SHA-256 of the UTF-8 JSON list of ``{"category", "question_id", "turns"}`` with keys in this order, no spaces and
    no escapes for non-ASCII characters. It is taken of what was chosen, so every choice changes it.
    """
    rows = [
        {"category": prompt.category, "question_id": prompt.question_id, "turns": prompt.turns} for prompt in prompts
    ]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def _read(path: str) -> bytes:
    if not path:
        raise InputError("prompts.path", path, "give the path of a file")
    try:
        return Path(path).expanduser().read_bytes()
    except FileNotFoundError:
        remedy = "there is no such file; relative paths start at the folder of the launch"
        raise InputError("prompts.path", path, remedy) from None
    except IsADirectoryError:
        raise InputError("prompts.path", path, "this is a folder; name the file in it") from None
    except (OSError, ValueError, RuntimeError) as error:  # no permission; a NUL in the name; no home folder for ~
        reason = getattr(error, "strerror", None) or error
        raise InputError("prompts.path", path, f"it cannot be read ({reason}); give another file") from None


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(
            where, _short(line.decode("utf-8", "backslashreplace")), "this is not UTF-8; save the file as UTF-8"
        ) from None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg.removesuffix(' at')} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else error
        )
        raise InputError(where, _short(text), f"this is not JSON ({reason}); give one JSON object per line") from None
    if not isinstance(row, dict):
        raise InputError(where, _short(text), "give a JSON object in braces on each line")
    return row


def _prompt(row: dict[str, Any], where: str, number: int) -> Prompt:
    """Take the shape that a row's field names say; a row that names none is held to the native one."""
    if row.keys() & {"question_id", "category", "turns"} or not row.keys() & {"task_id", "question"}:
        return Prompt(_question_id(row, where), _text(row, "category", where), _turns(row, where))
    if "task_id" in row:
        return Prompt(_text(row, "task_id", where), "code", (_text(row, "prompt", where),))
    _text(row, "answer", where)
    return Prompt(number, "math_reasoning", (_text(row, "question", where),))


def _question_id(row: dict[str, Any], where: str) -> int | str:
    value = _field(row, "question_id", where)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return _checked_text(value, f"{where}, question_id", "a whole number or text")


def _turns(row: dict[str, Any], where: str) -> tuple[str, ...]:
    value = _field(row, "turns", where)
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}, turns", _short(value), "give a list of at least one text")
    return tuple(_checked_text(turn, f"{where}, turns[{at}]", "text") for at, turn in enumerate(value))


def _text(row: dict[str, Any], field: str, where: str) -> str:
    return _checked_text(_field(row, field, where), f"{where}, {field}", "text")


def _field(row: dict[str, Any], field: str, where: str) -> Any:
    if field not in row:
        raise InputError(f"{where}, {field}", None, f"this field is missing; the line has {', '.join(row) or 'none'}")
    return row[field]


def _checked_text(value: Any, field: str, kind: str) -> str:
    if not isinstance(value, str):
        raise InputError(field, _short(value), f"give {kind}")
    if not value.strip():
        raise InputError(field, _short(value), f"give {kind}; it must not be blank")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(
            field, _short(value), r"this holds half of a \ud83d\ude00 pair; give whole characters"
        ) from None
    return value


def _of_categories(
    prompts: tuple[Prompt, ...], categories: str | Sequence[str] | None, source: str
) -> tuple[Prompt, ...]:
    if categories is None:
        return prompts
    categories = [categories] if isinstance(categories, str) else categories
    if not categories:
        raise InputError("prompts.categories", list(categories), "give at least one, as [qa,rag], or null for all")
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories:
        if category not in known:
            remedy = f"{source} has no such category; it has {', '.join(known)}"
            raise InputError("prompts.categories", category, remedy)
    return tuple(prompt for prompt in prompts if prompt.category in categories)


def _short(value: Any) -> Any:
    """Return a value that fits into a sentence."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= 60 else f"{text[:60]}..."
