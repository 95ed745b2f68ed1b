"""Texts of random tokens that are said again: a draft head learns from them to copy whatever token stands there.

In texts that models write, what can be copied is mostly what could be guessed as well, and rare tokens are hardly ever
among it. Attention then finds the right place also where a name or a foreign word is repeated, but what it brings back
does not win. In random tokens nothing but the copy is right, and every token is as frequent as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec_lab.distill.batch import Example
from specdec_lab.distill.conversation_files import Conversation
from specdec_lab.distill.rendering import check_template, example_from_conversation
from specdec_lab.errors import InputError

PASSAGES = (1, 4)
"""How many passages a user says."""

TOKENS = (8, 48)
"""Random tokens of a passage."""

FIELD = "data.repeats"


def repeated_texts(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], count: int, seed: int, max_tokens: int
) -> list[Example]:
    """Return conversations in which a user says passages of random tokens, and the assistant the same in another order.

    The assistant's words alone are labels. The texts depend on the arguments alone, and fewer of them are the first
    ones of more.

    Args:
        ids: that may occur, each as often as any other; those that do not stand for themselves in a text are left out.
        count: of the texts.
        max_tokens: longer texts lose their end.

    Raises:
        InputError: no id stands for itself, or the tokenizer's chat template does not suit conversations.
    """
    if not count:
        return []
    check_template(tokenizer)
    pieces = spelt_alone(tokenizer, ids)
    if not pieces:
        raise InputError(FIELD, count, "no label of the training texts can be spelt by itself; give data.repeats=0")
    found = (_conversation(pieces, number, seed) for number in range(count))
    examples = (example_from_conversation(one, tokenizer, max_tokens) for one in found)
    return [replace(example, key=f"repeat:{example.key}") for example in examples if example is not None]


def spelt_alone(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the spellings of the ids that a text of them alone gives back; special tokens are left out."""
    special = {*tokenizer.all_special_ids}
    special |= {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    kept = [index for index in ids if index not in special]
    spelt: list[str] = tokenizer.batch_decode([[index] for index in kept], clean_up_tokenization_spaces=False)
    again = tokenizer(spelt, add_special_tokens=False)["input_ids"] if spelt else []
    return [text for index, text, read in zip(kept, spelt, again, strict=True) if list(read) == [index]]


def _conversation(pieces: Sequence[str], number: int, seed: int) -> Conversation:
    random = np.random.default_rng((seed, number))
    passages = [_passage(pieces, random) for _ in range(random.integers(*PASSAGES, endpoint=True))]
    again = [passages[at] for at in random.permutation(len(passages))]
    said = ({"role": "user", "content": "\n".join(passages)}, {"role": "assistant", "content": "\n".join(again)})
    return Conversation(number, f"{FIELD}, text {number}", said)


def _passage(pieces: Sequence[str], random: np.random.Generator) -> str:
    chosen = random.integers(0, len(pieces), size=random.integers(*TOKENS, endpoint=True))
    return "".join(pieces[at] for at in chosen).strip() or pieces[chosen[0]]
