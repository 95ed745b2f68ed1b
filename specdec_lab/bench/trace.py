"""Who produced each token of one answer: the prefill, an accepted draft, or the target after the accepted drafts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from transformers import PreTrainedTokenizerBase

from specdec_lab.decode import Generation, Round

Source = Literal["prefill", "draft", "bonus"]


@dataclass(frozen=True)
class TokenOrigin:
    """Where one output token came from.

    Attributes:
        token: its id.
        source: ``prefill`` (the answer's first token), ``draft`` (an accepted node) or ``bonus`` (the target's own).
        round: index into ``Generation.rounds``; ``None`` for the prefill, which is no round.
        node: the accepted node of that round's tree; ``None`` unless a draft.
        depth: that node's depth, from 1; ``None`` unless a draft.
    """

    token: int
    source: Source
    round: int | None = None
    node: int | None = None
    depth: int | None = None


def attribute_tokens(generation: Generation) -> list[TokenOrigin]:
    """Return the origin of every output token, in order; empty for a failed request.

    Raises:
        ValueError: the rounds do not spell the output, token by token.
    """
    if not generation.output_ids:
        return []
    output = generation.output_ids
    origins = [TokenOrigin(output[0], "prefill")]
    for index, played in enumerate(generation.rounds):
        for depth, node in enumerate(played.path, start=1):
            origins.append(TokenOrigin(played.tokens[node], "draft", index, node, depth))
        bonus = output[len(origins) : len(origins) + played.bonus]
        origins.extend(TokenOrigin(token, "bonus", index) for token in bonus)
    if tuple(origin.token for origin in origins) != output:
        raise ValueError(f"the rounds spell {[origin.token for origin in origins]}, the answer is {list(output)}")
    return origins


def tokens_of_round(origins: Sequence[TokenOrigin], index: int) -> list[TokenOrigin]:
    """Return what one round emitted, accepted drafts first."""
    return [origin for origin in origins if origin.round == index]


def target_tokens(played: Round, emitted: Sequence[TokenOrigin]) -> dict[int, int]:
    """Return the target's own token after each node that the walk visited, as far as the answer shows it.

    The walk visits the root and the accepted nodes; what the target would have said elsewhere, or after an answer was
    cut, was never emitted.
    """
    visited = (0, *played.path)
    return {node: origin.token for node, origin in zip(visited, emitted, strict=False)}


def most_accepted_round(rounds: Sequence[Round]) -> int | None:
    """Return the index of the first round with the most accepted drafts; ``None`` if there is no round."""
    return max(range(len(rounds)), key=lambda index: rounds[index].accepted, default=None)


# --- token texts -----------------------------------------------------------------------------------------------------


_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE_PIECE = "\u2581"


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Invert the byte-level BPE alphabet (GPT-2's): printable bytes stand for themselves, the rest from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


def token_text(tokenizer: PreTrainedTokenizerBase | None, token: int) -> str:
    """Return the text of one token alone, its leading space included.

    A token that is only part of a character gives its bytes in hexadecimal as ``<E282>``, or its name ``<0xE2>``; one
    that the tokenizer does not know, or any token where there is no tokenizer, gives ``<id>``.
    """
    piece = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
    if tokenizer is None or not isinstance(piece, str):
        return f"<{token}>"
    text = tokenizer.decode([token], skip_special_tokens=False)
    assert isinstance(text, str)
    if _BYTE_PIECE.fullmatch(piece):
        return piece
    if "\ufffd" in text:
        of = _byte_of_character()
        return f"<{''.join(f'{of[c]:02X}' for c in piece)}>" if all(c in of for c in piece) else piece
    words = piece.lstrip(_SPACE_PIECE)
    if len(words) < len(piece):  # such decoders drop the first token's space
        return " " * (len(piece) - len(words)) + text.lstrip(" ")
    return text


def readable(text: str) -> str:
    """Make a token readable on one line: ``·`` is a space, ``⏎`` a newline, ``⇥`` a tab, the rest is escaped."""
    return printable(text).replace(" ", "·")


def printable(text: str) -> str:
    """Keep spaces and letters; show newlines as ``⏎``, tabs as ``⇥`` and other control characters escaped."""
    marks = {"\n": "⏎", "\t": "⇥"}
    return "".join(marks.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
