"""Where an answer ends: EOS, a stop string or the budget, whichever comes first, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from specdec_lab.errors import InputError
from specdec_lab.streaming import REPLACEMENT, Detokenizer, before_stop

FinishReason = Literal["eos", "stop", "length"]


def until_eos(tokens: Sequence[int], eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens up to the first EOS, which is kept: nothing is drafted behind it."""
    end = next((at for at, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return tuple(tokens[: end + 1])


class StopRule:
    """Decides after each token of one answer whether it is the last.

    A token that is EOS ends the answer with ``eos``; one after which the text so far holds a stop string with
    ``stop``; the last of the budget with ``length``; asked in this order. All see committed tokens only, so what a
    round drafted beyond the end is never counted.

    Args:
        budget: most tokens of the answer, EOS included.
        eos_ids: ids that end an answer.
        stop: strings that end an answer; their tokens count, the text is cut before them.
        tokenizer: of the target; without one the answer has no text.

    Raises:
        InputError: a budget below 1, an unusable stop string, or stop strings without a tokenizer.
    """

    def __init__(
        self,
        budget: int,
        eos_ids: frozenset[int],
        stop: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if budget < 1:
            raise InputError("max_new_tokens", budget, "give a whole number of at least 1")
        self.budget, self.eos_ids, self.stop = budget, eos_ids, check_stop(stop)
        if self.stop and tokenizer is None:
            raise InputError("stop", list(self.stop), "this target has no tokenizer; leave the stop strings out")
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, eos_ids)
        self._longest = max((len(text) for text in self.stop), default=0)
        self._length = 0
        self._tail = ""  # settled text that a stop string could still begin in

    def take(self, new: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Take the next tokens; return how many of them belong to the answer, and why it ends there if it does."""
        for count, token in enumerate(new, start=1):
            self._length += 1
            if token in self.eos_ids:
                return count, "eos"
            if self.stop and self._completes_stop(token):
                return count, "stop"
            if self._length >= self.budget:
                return count, "length"
        return len(new), None

    def text(self, output: Sequence[int]) -> str:
        """Return the answer's text, without special tokens and EOS and cut before the first stop string."""
        return "" if self._detokenizer is None else before_stop(self._detokenizer.decode(output), self.stop)

    def _completes_stop(self, token: int) -> bool:
        assert self._detokenizer is not None
        settled = self._tail + self._detokenizer.push(token)
        self._tail = settled[max(0, len(settled) - self._longest + 1) :]
        text = settled + self._detokenizer.pending_text
        return any(string in text for string in self.stop)


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings as a tuple.

    Raises:
        InputError: one string in place of a list of them, an empty one, or one that no finished text can hold.
    """
    if isinstance(stop, str):
        raise InputError("stop", stop, "give a list of strings")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InputError("stop", text, "give strings of at least one character")
        if REPLACEMENT in text:
            raise InputError("stop", text, "U+FFFD stands for a character that is not complete yet; leave it out")
    return tuple(stop)
