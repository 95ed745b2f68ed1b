"""Errors that a user can act on: each is one sentence that names the field, the value and the remedy."""


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
