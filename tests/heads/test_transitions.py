"""Which tokens follow which: the factors, what a head and they say together, and the file that holds them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from heads_at_hand import every_other, medusa_heads
from safetensors.torch import load_file, save_file

from specdec_lab.errors import InputError
from specdec_lab.heads.formats import load_head, save_head
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.transitions import Transitions, likeliest
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

VOCABULARY = DraftVocabulary(torch.tensor([1, 2, 4]), 6)
TEXT = ([5, 1, 2, 1, 2, 3, 1, 4], [False, True, True, True, True, True, True, True])


def counted(weight: float = 1.0) -> Transitions:
    return Transitions.counted([TEXT], VOCABULARY, weight)


def test_pairs_are_counted_where_the_second_is_a_label_that_can_be_drafted():
    """3 is no draft id, so nothing is known to precede it; that it precedes 1 is known."""
    found = counted()
    pairs = list(zip(found.previous.tolist(), found.following.tolist(), found.counts.tolist(), strict=True))
    assert pairs == [(1, 1, 2), (1, 2, 1), (2, 0, 1), (3, 0, 1), (5, 0, 1)]
    unmarked = Transitions.counted([(TEXT[0], [False] * 8)], VOCABULARY, 1.0)
    assert len(unmarked) == 0
    assert unmarked.log_factors(torch.tensor([1, 5])).eq(0).all()


def test_factors_are_the_smoothed_ratio_of_the_two_laws():
    """Six pairs: 1 three times, 2 twice, 4 once, each and half a one more; after 1 came 2 twice and 4 once."""
    share = torch.tensor([3.5, 2.5, 1.5]) / 7.5
    after = torch.tensor([0.0, 2.0, 1.0])
    ratio = (after + share) / 4 / share
    factors = counted().log_factors(torch.tensor([1]))[0]
    assert torch.allclose(factors.softmax(-1), ratio.log().softmax(-1))
    assert torch.allclose((factors + np.log(0.25)).exp(), ratio, atol=1e-6)
    half = counted(0.5).log_factors(torch.tensor([1]))[0]
    assert torch.allclose(half, 0.5 * factors, atol=1e-6)
    assert counted().log_factors(torch.tensor([0, 4])).eq(0).all()  # never seen before anything


def test_a_label_is_left_out_of_its_own_count():
    """Counted among what it is compared with, a pair that was seen once looks like one that always is so."""
    whole = counted()
    tokens, marks = TEXT
    for place in range(2, len(tokens)):
        (label,) = VOCABULARY.draft_ids(torch.tensor(tokens[place : place + 1]))
        if label < 0:
            continue
        without = [mark and at != place for at, mark in enumerate(marks)]
        rest = Transitions.counted([(tokens, without)], VOCABULARY, 1.0)
        previous = torch.tensor(tokens[place - 1 : place])
        found = whole.log_factors(previous, label[None])[0]
        seen = torch.bincount(
            rest.following[rest.previous == previous].long(), rest.counts[rest.previous == previous], 3
        )
        share = torch.tensor([3.5, 2.5, 1.5]) / 7.5  # of all, the label too: its own share is not changed
        wanted = ((seen + share) / share).log()
        assert torch.allclose(found.softmax(-1), wanted.float().softmax(-1), atol=1e-5)
    assert torch.equal(whole.log_factors(torch.tensor([1]), torch.tensor([-1])), whole.log_factors(torch.tensor([1])))


@pytest.mark.parametrize("seed", range(5))
def test_a_round_uses_the_law_that_training_uses(seed: int):
    """TD-16: sparse in the drafter, dense in the loss."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = DraftVocabulary(torch.arange(0, 60, 2), 60)
    ids = torch.randint(0, 60, (900,), generator=generator).tolist()
    pairs = Transitions.counted([(ids, [True] * 900)], vocabulary, 0.6)
    logits = 3 * torch.randn(30, generator=generator)
    law = logits.softmax(-1).numpy()
    for token in (3, 8, 59):
        together = (logits + pairs.log_factors(torch.tensor([token]))[0]).softmax(-1)
        found = likeliest(law, np.argsort(-law), pairs.after(token), 7)
        best = together.topk(7)
        assert [draft_id for draft_id, _ in found] == best.indices.tolist()
        assert [chance for _, chance in found] == pytest.approx(best.values.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("previous", "following", "counts"),
    [
        ([1, 0], [0, 0], [1, 1]),
        ([1, 1], [0, 0], [1, 1]),
        ([6], [0], [1]),
        ([0], [3], [1]),
        ([0], [0], [0]),
        ([0], [], [1]),
        ([0, 1, 2], [0, 0], [1, 1]),
    ],
)
def test_pairs_that_cannot_be_are_refused(previous: list[int], following: list[int], counts: list[int]):
    with pytest.raises(ValueError, match="pairs"):
        Transitions(torch.tensor(previous), torch.tensor(following), torch.tensor(counts), VOCABULARY, 1.0)


def paired(target: Target) -> MedusaHeads:
    heads = medusa_heads(target, vocabulary=every_other(target))
    ids = torch.randint(0, target.vocab_size, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    heads.transitions = Transitions.counted([(ids, [True] * 500)], heads.vocabulary, 0.5)
    return heads


def test_heads_come_back_with_their_pairs(tiny_target, tmp_path: Path):
    """CF-01: heads that were trained beside pairs draft badly without them, and nothing says so."""
    target: Target = tiny_target()
    heads = paired(target)
    save_head(heads, tmp_path / "head", {"target": "hub/target"})
    loaded, _ = load_head("medusa", str(tmp_path / "head"), target)
    assert isinstance(loaded, MedusaHeads)
    assert loaded.transitions is not None
    assert heads.transitions is not None
    previous = torch.arange(target.vocab_size)
    assert torch.equal(loaded.transitions.log_factors(previous), heads.transitions.log_factors(previous))


@pytest.mark.parametrize(
    ("lost", "weight", "sentence"),
    [
        ("transitions.counts", 0.5, "the pairs of tokens need transitions.previous, "),
        (None, None, "transitions=None in config.json is no number above 0"),
        (None, "much", "transitions='much' in config.json is no number above 0"),
        (None, True, "transitions=True in config.json is no number above 0"),
        (None, 3, "transitions=3 in config.json is no number above 0"),
    ],
)
def test_half_a_table_is_refused(lost: str | None, weight: object, sentence: str, tiny_target, tmp_path: Path):
    target: Target = tiny_target()
    folder = tmp_path / "head"
    save_head(paired(target), folder, {"target": "hub/target"})
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, folder / "medusa_lm_head.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["specdec_lab"]["transitions"] = weight
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as refused:
        load_head("medusa", str(folder), target)
    assert sentence in str(refused.value)
