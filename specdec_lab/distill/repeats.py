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
    ones of more. Passages are spelt and read again, so that some tokens merge into others.

    Args:
        ids: that are drawn, each as often as any other; special and added tokens, and bytes of a character, are not.
        count: of the texts.
        max_tokens: longer texts lose their end.

    Raises:
        InputError: the tokenizer's chat template does not suit them, nothing can be drawn, or no text has a label.
    """
    if not count:
        return []
    known = spelt(tokenizer, ids)
    if not known:
        raise InputError(FIELD, count, f"none of the {len(ids)} tokens can be spelt; {REMEDY}")
    try:
        check_template(tokenizer)
        found = [_example(tokenizer, known, number, seed, max_tokens) for number in range(count)]
    except InputError as error:
        raise InputError(FIELD, count, f"{error.remedy}; {REMEDY}") from error
    examples = [example for example in found if example is not None and example.labels]
    if not examples:
        remedy = f"no text keeps a label within data.max_tokens={max_tokens}, or the chat template glues them; {REMEDY}"
        raise InputError(FIELD, count, remedy)
    return examples


REMEDY = f"give {FIELD}=0"


def spelt(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Return those ids that stand for characters of their own: no added token, no blank, no byte of a character."""
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    kept = [index for index in ids if index not in added]
    if not kept:
        return []  # transformers 5.17 decodes no list at all as one empty text
    texts = tokenizer.batch_decode([[index] for index in kept], clean_up_tokenization_spaces=False)
    return [index for index, text in zip(kept, texts, strict=True) if text.strip() and "\ufffd" not in text]


def _example(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], number: int, seed: int, max_tokens: int
) -> Example | None:
    random = np.random.default_rng((seed, number))
    passages = [_passage(tokenizer, ids, random) for _ in range(random.integers(*PASSAGES, endpoint=True))]
    again = [passages[at] for at in random.permutation(len(passages))]
    said = ({"role": "user", "content": "\n".join(passages)}, {"role": "assistant", "content": "\n".join(again)})
    example = example_from_conversation(Conversation(number, f"{FIELD}, text {number}", said), tokenizer, max_tokens)
    return None if example is None else replace(example, key=f"repeat:{number}")


def _passage(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], random: np.random.Generator) -> str:
    chosen = random.integers(0, len(ids), size=random.integers(*TOKENS, endpoint=True))
    text = tokenizer.decode([ids[at] for at in chosen], clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text.strip()
