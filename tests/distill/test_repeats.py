"""Texts that are said twice: what is said again is what was said, it alone is learnt, and any token may occur in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from sample_tokenizers import byte_level
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec_lab.distill.batch import collate
from specdec_lab.distill.copying import copy_sources
from specdec_lab.distill.repeats import PASSAGES, repeated_texts, spelt
from specdec_lab.errors import InputError
from specdec_lab.targets.tiny import CHAT_TEMPLATE, SPECIALS, build_tokenizer

TOKENIZER = build_tokenizer()
IDS = range(len(TOKENIZER))


def read(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids))
    assert isinstance(text, str)
    return text


def test_the_assistant_says_the_users_passages_again():
    """Each of them once, in some order; nothing but them and the end of the turn is a label."""
    for example in repeated_texts(TOKENIZER, IDS, 20, seed=3, max_tokens=4096):
        said = [token for token, mark in zip(example.ids, example.supervised, strict=True) if mark]
        first = example.supervised.index(True)
        assert all(example.supervised[first:])
        assert said[-1] == SPECIALS.index("</s>")
        asked, again = read(TOKENIZER, example.ids).partition("<user>")[2].split("<assistant>")
        assert sorted(asked.split("\n")) == sorted(again.removesuffix("</s>").split("\n"))


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's, in which three words are tokens with a leading space."""
    letters = {*"▁Helloworldnewspaper<>/usiastn", *CHAT_TEMPLATE}
    pieces = [("<unk>", 0.0), ("▁Hello", -1.0), ("▁world", -1.0), ("▁news", -1.0), ("\n", -1.0)]
    pieces += [(letter, -9.0) for letter in sorted(letters)]
    model = Tokenizer(models.Unigram(pieces, unk_id=0))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_words_of_a_tokenizer_that_drops_leading_spaces_stay_words():
    """Spelt one by one, its word beginnings lost their spaces, and other tokens than the drawn ones came back."""
    tokenizer = words()
    drawn = [tokenizer.get_vocab()[word] for word in ("▁Hello", "▁world", "▁news")]
    examples = repeated_texts(tokenizer, drawn, 5, seed=0, max_tokens=4096)
    said = Counter(token for one in examples for token, mark in zip(one.ids, one.supervised, strict=True) if mark)
    assert sum(said[token] for token in drawn) > 0.8 * said.total()


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
    assert all(len(one.ids) <= 100 for one in repeated_texts(TOKENIZER, IDS, 9, seed=0, max_tokens=100))


def test_only_ids_with_characters_of_their_own_are_drawn():
    """Special tokens would end the turn, and the bytes of half a character would come back as others."""
    tokenizer = byte_level(template=CHAT_TEMPLATE)
    drawn = spelt(tokenizer, range(len(tokenizer)))
    assert drawn
    assert not {*drawn} & {*tokenizer.all_special_ids}
    assert all(read(tokenizer, [index]).strip() for index in drawn)
    assert "\ufffd" not in tokenizer.decode(drawn, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "max_tokens", "words"),
    [
        (TOKENIZER, TOKENIZER.all_special_ids, 64, "can be spelt"),
        (TOKENIZER, IDS, 3, "max_tokens=3"),
        (byte_level(), range(97, 123), 64, "template"),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_the_setting(tokenizer: Any, ids: Any, max_tokens: int, words: str):
    """A head would state that it had learnt from repeats, of which there were none."""
    with pytest.raises(InputError, match=rf"data.repeats=3: .*{words}.*give data.repeats=0"):
        repeated_texts(tokenizer, ids, 3, seed=0, max_tokens=max_tokens)
