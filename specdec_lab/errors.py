"""Errors that a user can act on: each is one sentence that names the field, the value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence


class SpecdecError(Exception):
    """Base of every error that is the user's to mend; command lines print its text without a traceback."""


class InputError(SpecdecError):
    """A setting, file or prompt that cannot be used.

    Args:
        field: what was wrong, as the user wrote it (``drafter.ngram.k``, ``prompts.path``, ``line 3``).
        value: the value found there.
        remedy: what to do instead, as the end of a sentence.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}={value!r}: {remedy}")


class UnsupportedModelError(SpecdecError):
    """A model whose attention or cache the tree verifier cannot drive; raised at set-up, by name."""


class NoRoomError(SpecdecError):
    """A prompt that leaves no room for one new token below the target's position limit or cache capacity."""


class NonFiniteLogitsError(SpecdecError):
    """The target returned NaN or infinity where a token had to be chosen."""


class DrafterError(SpecdecError):
    """A drafter broke its promise: a tree that is too deep, too large, or rooted at the wrong token."""


# --- words of a sentence ----------------------------------------------------------------------------------------------


def one_line(error: BaseException, limit: int = 240) -> str:
    """Return the first line of an error's text, shortened, without the full stop; its type if it has no text."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[: limit - 1] + "…" if len(text) > limit else text.rstrip(".")


def described(error: BaseException) -> str:
    """Return what an error says in one line, with its type unless it was written for the user."""
    if isinstance(error, SpecdecError) or not str(error).strip():
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)}"


def listed(names: Sequence[str], most: int) -> str:
    """Return names joined by commas, at most so many, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
