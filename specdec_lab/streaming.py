"""From committed token ids to text, piece by piece, at a cost per token that does not grow with the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not, or not yet, a character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Detokenizer:
    """The text of a token sequence that grows.

    A token's text can depend on its neighbours: a character may be spread over several tokens, and some decoders drop
    the space before a text's first word. So new tokens are decoded behind a few earlier ones whose text is settled,
    and text that later tokens could still change is kept back.

    Args:
        tokenizer: of the target.
        eos_ids: ids without text besides the tokenizer's special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._silent = frozenset(eos_ids) | frozenset(tokenizer.all_special_ids)
        self._left: list[int] = []  # the last settled tokens, decoded again as neighbours of the pending ones
        self._left_text = ""
        self._pending: list[int] = []
        self.pending_text = ""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the whole text of ``tokens``, without special tokens, whatever was pushed."""
        return self._decode([token for token in tokens if self._name(token) is not None])

    def push(self, token: int) -> str:
        """Append a token and return the text that is settled by it; ``pending_text`` is what follows and may change."""
        name = self._name(token)
        if name is None:
            return ""
        self._pending.append(token)
        whole = self._decode(self._left + self._pending)
        self.pending_text = whole[len(self._left_text) :]
        if _BYTE_TOKEN.fullmatch(name):  # a byte that fits no character spoils the whole run of bytes before it
            return ""
        if not whole.endswith(REPLACEMENT):
            return self._settle(len(self._pending), whole)
        before = self._decode(self._left + self._pending[:-1])
        own = self._decode([token])
        if not own and before == whole:  # a special token that transformers does not know of
            self._pending.pop()
        elif own and before + own == whole:  # the token does not continue the character before it
            return self._settle(len(self._pending) - 1, before)
        return ""

    def _settle(self, count: int, text: str) -> str:
        piece = text[len(self._left_text) :]
        if piece or not self._left:
            self._left = self._pending[:count]
            self._left_text = self._decode(self._left)
        self._pending = self._pending[count:]
        self.pending_text = self.pending_text[len(piece) :]
        return piece

    def _decode(self, tokens: list[int]) -> str:
        # Cleaning up spaces would rewrite text that was already shown.
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _name(self, token: int) -> str | None:
        """Return the vocabulary's entry, ``None`` for a token without text: special, EOS, or a padded row of logits."""
        if token in self._silent:
            return None
        name = self._tokenizer.convert_ids_to_tokens(token)
        assert name is None or isinstance(name, str)
        return name


class TextStream:
    """Text pieces of one answer while its tokens are committed.

    The pieces joined are exactly ``StopRule.text`` of the same tokens: no piece ends within a character, and nothing
    of a stop string is shown, not even where it is spread over rounds.

    Args:
        tokenizer: of the target; without one every piece is empty.
        stop: the answer's stop strings.
        eos_ids: the target's.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = (), eos_ids: Iterable[int] = ()
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, eos_ids)
        self._stop = tuple(stop)
        self._held = ""  # settled, but perhaps the start of a stop string

    def push(self, token_ids: Iterable[int]) -> str:
        """Append committed tokens and return the text that can be shown now, perhaps none."""
        if self._detokenizer is None:
            return ""
        self._held += "".join([self._detokenizer.push(token) for token in token_ids])
        shown = min(len(before_stop(self._held, self._stop)), len(self._held) - _stop_started(self._held, self._stop))
        piece, self._held = self._held[:shown], self._held[shown:]
        return piece

    def finish(self) -> str:
        """Return what was held back; the answer has ended."""
        if self._detokenizer is None:
            return ""
        rest = before_stop(self._held + self._detokenizer.pending_text, self._stop)
        self._held, self._detokenizer = "", None
        return rest


def before_stop(text: str, stop: Iterable[str]) -> str:
    """Return the text before the first stop string, all of it where there is none."""
    return text[: min((at for at in (text.find(string) for string in stop) if at >= 0), default=len(text))]


def _stop_started(text: str, stop: Iterable[str]) -> int:
    """Return the length of the longest end of ``text`` with which a stop string begins, without being all of it."""
    return max(
        (size for string in stop for size in range(1, min(len(string), len(text) + 1)) if text.endswith(string[:size])),
        default=0,
    )
