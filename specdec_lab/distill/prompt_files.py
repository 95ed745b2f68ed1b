"""Prompts to train on: several files, each known by name and hash; conversations count by their user turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec_lab.bench.prompts import Prompt, parse_prompts
from specdec_lab.distill.conversation_files import is_conversations, parse_conversations
from specdec_lab.distill.fingerprints import bytes_sha256
from specdec_lab.errors import InputError


@dataclass(frozen=True)
class PromptFile:
    """The prompts of one file.

    Attributes:
        name: of the file, without its folder.
        sha256: of its bytes.
    """

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]


def read_prompt_files(paths: Sequence[str], where: str) -> tuple[PromptFile, ...]:
    """Read files of any shape that ``parse_prompts`` or ``parse_conversations`` knows.

    Args:
        where: the setting that names the files, for messages.

    Raises:
        InputError: a file cannot be read, or is there twice.
    """
    files: list[PromptFile] = []
    for path in paths:
        data = read_bytes(path, where)
        if is_conversations(data):
            prompts = tuple(one.prompt() for one in parse_conversations(data, path).conversations)
        else:
            prompts = parse_prompts(data, path, where)
        sha256 = bytes_sha256(data)
        if any(file.sha256 == sha256 for file in files):
            raise InputError(where, path, "a file of the same content is there already; name it once")
        files.append(PromptFile(Path(path).name, sha256, prompts))
    return tuple(files)


def refuse_equal_ids(files: Sequence[PromptFile], where: str) -> None:
    """Refuse prompts that their ids do not tell apart.

    Raises:
        InputError: names the first id that two files have.
    """
    owner: dict[int | str, str] = {}
    for file in files:
        for prompt in file.prompts:
            if prompt.question_id in owner:
                remedy = f"{owner[prompt.question_id]} and {file.name} both have this question_id; "
                raise InputError(where, prompt.question_id, f"{remedy}give each file a run folder of its own")
            owner[prompt.question_id] = file.name


def read_bytes(path: str, where: str) -> bytes:
    """Return the content of a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return Path(path).expanduser().read_bytes()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # ValueError: a NUL in the name; RuntimeError: the home of nobody
        reason = getattr(error, "strerror", None) or error
        remedy = f"it cannot be read ({reason}); relative paths start at the folder of the launch"
        raise InputError(where, path, remedy) from None
