"""Where an answer ends: EOS, a stop string or the budget, whichever comes first, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

FinishReason = Literal["eos", "stop", "length"]


class StopRule:
    """Decides after each token of one answer whether it is the last.

    A token that is EOS ends the answer with ``eos``; one that completes a stop string with ``stop``; the last of the
    budget with ``length``. All see committed tokens only, so what a round drafted beyond the end is never counted.
    """

    def __init__(
        self,
        budget: int,
        eos_ids: frozenset[int],
        stop: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        self.budget, self.eos_ids, self.stop = budget, eos_ids, tuple(stop)
        self._tokenizer = tokenizer
        # A token of a stop string holds at least one of its bytes, and a character has at most four.
        self._window = 4 * max((len(text) for text in self.stop), default=0) + 8

    def first_end(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Return how many of ``new`` tokens, emitted after ``output``, belong to the answer, and why it ends there."""
        grown = list(output)
        for count, token in enumerate(new, start=1):
            grown.append(token)
            if token in self.eos_ids:
                return count, "eos"
            if self.stop and self._completes_stop(grown):
                return count, "stop"
            if len(grown) >= self.budget:
                return count, "length"
        return len(new), None

    def text(self, output: Sequence[int]) -> str:
        """Return the answer's text, without special tokens and cut before the first stop string."""
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(list(output), skip_special_tokens=True)
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        return text[: min(found)] if found else text

    def _completes_stop(self, output: Sequence[int]) -> bool:
        assert self._tokenizer is not None
        tail = self._tokenizer.decode(output[-self._window :], skip_special_tokens=True)
        return any(stop in tail for stop in self.stop)
