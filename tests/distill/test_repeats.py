"""Texts that are said twice: what is said again is what was said, it alone is learnt, and any token may occur in it."""

from __future__ import annotations

from collections import Counter

import pytest

from specdec_lab.distill.batch import collate
from specdec_lab.distill.copying import copy_sources
from specdec_lab.distill.repeats import PASSAGES, repeated_texts, spelt_alone
from specdec_lab.errors import InputError
from specdec_lab.targets.tiny import SPECIALS, build_tokenizer

TOKENIZER = build_tokenizer()
IDS = range(len(TOKENIZER))


def test_the_assistant_says_the_users_passages_again():
    """Each in the same tokens, in some order; nothing but them and the end of the turn is a label."""
    for example in repeated_texts(TOKENIZER, IDS, 20, seed=3, max_tokens=4096):
        said = [token for token, mark in zip(example.ids, example.supervised, strict=True) if mark]
        first = example.supervised.index(True)
        assert all(example.supervised[first:])
        user, assistant = TOKENIZER.decode(example.ids[:first]), TOKENIZER.decode(said[:-1])
        assert said[-1] == SPECIALS.index("</s>")
        passages = assistant.split("\n")
        assert all(passage and passage in user for passage in passages)
        assert Counter("".join(passages)) <= Counter(user)


def test_almost_every_label_can_be_copied():
    """With real spellings a label follows, within a passage, the token that it followed before."""
    examples = repeated_texts(TOKENIZER, IDS, 20, seed=0, max_tokens=4096)
    batch = collate(examples, {})
    found = copy_sources(batch.ids, batch.supervised).any(dim=-1).sum()
    assert int(found) > batch.labels - len(examples) * (2 * PASSAGES[1] + 2)


def test_texts_depend_on_the_seed_and_fewer_are_the_first_of_more():
    """A training that goes on, or one with more of them, sees the same texts; their keys are their own."""
    some = repeated_texts(TOKENIZER, IDS, 5, seed=0, max_tokens=4096)
    more = repeated_texts(TOKENIZER, IDS, 9, seed=0, max_tokens=4096)
    assert more[: len(some)] == some
    assert len({example.key for example in more}) == len(more) == 9
    assert [one.ids for one in repeated_texts(TOKENIZER, IDS, 5, seed=1, max_tokens=4096)] != [one.ids for one in some]
    assert repeated_texts(TOKENIZER, IDS, 0, seed=0, max_tokens=4096) == []
    assert all(len(one.ids) <= 40 for one in repeated_texts(TOKENIZER, IDS, 9, seed=0, max_tokens=40))


def test_only_ids_that_stand_for_themselves_occur():
    """Special tokens would end the turn, and the bytes of half a character would come back as others."""
    spelt = spelt_alone(TOKENIZER, IDS)
    special = {TOKENIZER.decode([index]) for index in TOKENIZER.all_special_ids}
    assert spelt
    assert not special & {*spelt}
    assert "\ufffd" not in "".join(spelt)
    with pytest.raises(InputError, match=r"data.repeats=3"):
        repeated_texts(TOKENIZER, TOKENIZER.all_special_ids, 3, seed=0, max_tokens=64)
