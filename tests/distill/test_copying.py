"""Heads are told where to look for what can be copied: the places are right, and heads learn to look there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_lab.distill.batch import Batch, Example, collate
from specdec_lab.distill.copying import (
    CopyWatch,
    carried,
    carried_states,
    copy_loss,
    copy_sources,
    label_sources,
    previous_sources,
    recurrent_sources,
)
from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.learner import Learner
from specdec_lab.distill.learners.draft_model import DraftModelLearner
from specdec_lab.distill.learners.recurrent import Eagle3Learner, EagleLearner
from specdec_lab.distill.unrolled import UnrolledAttention
from specdec_lab.errors import InputError
from specdec_lab.heads.draft_lm import DraftLM
from specdec_lab.target import Target


def test_sources_are_where_the_label_follows_the_same_token():
    """By hand, position by position: an index that is off by one teaches a head to copy the wrong token."""
    ids = torch.randint(0, 4, (3, 12), generator=torch.Generator().manual_seed(0))
    supervised = torch.rand(3, 12, generator=torch.Generator().manual_seed(1)) < 0.7
    found, model = copy_sources(ids, supervised), label_sources(ids, supervised)
    for row in range(3):
        text, marks = ids[row].tolist(), supervised[row].tolist()
        for t in range(12):
            for j in range(12):
                head = j <= t < 10 and text[t + 1 : t + 3] == text[j : j + 2] and marks[t + 2]
                assert bool(found[row, t, j]) == head
                before = 1 <= j <= t < 11 and text[t : t + 2] == text[j - 1 : j + 1] and marks[t + 1]
                assert bool(model[row, t, j]) == before


def test_the_token_before_is_the_source_of_the_first_layer():
    supervised = torch.tensor([[True, True, True, False, True]])
    assert previous_sources(supervised).nonzero().tolist() == [[0, 1, 0], [0, 3, 2]]


def test_layers_of_a_recurrent_head_share_the_work():
    """Alone, a layer copies; with another before it, that one brings along the token before, which it is matched by."""
    ids, supervised = torch.tensor([[7, 5, 6, 5, 6]]), torch.ones(1, 5, dtype=torch.bool)
    alone, two = recurrent_sources(ids, supervised, 1), recurrent_sources(ids, supervised, 2)
    assert set(alone) == {0}
    assert set(two) == {0, 1}
    assert torch.equal(alone[0], two[1])
    assert two[1].nonzero().tolist() == [[0, 2, 1]]  # 5 comes next, and after it 6: as it stands at 1 and 2
    assert torch.equal(two[0], previous_sources(supervised))


def test_the_loss_is_the_attention_that_misses_the_sources():
    """Even attention over 1, 2, 3 and 4 visible tokens; positions without a source count nothing."""
    sources = torch.zeros(1, 4, 4, dtype=torch.bool)
    sources[0, 1, 0] = sources[0, 3, 0] = sources[0, 3, 2] = True
    query = torch.zeros(1, 2, 4, 8)
    loss = copy_loss(query, torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)), sources)
    assert loss.item() == pytest.approx(math.log(2) + math.log(4 / 2))
    assert copy_loss(query, query, torch.zeros_like(sources)).item() == 0


def test_the_last_group_is_taught_and_no_other():
    """Four query heads in two groups: what the first group does costs nothing, what the last one does costs."""
    generator = torch.Generator().manual_seed(0)
    ids, supervised = torch.tensor([[5, 6, 7, 5, 6, 7, 5]]), torch.ones(1, 7, dtype=torch.bool)
    query, key = torch.randn(1, 4, 7, 8, generator=generator), torch.randn(1, 2, 7, 8, generator=generator)
    value = torch.randn(1, 2, 7, 8, generator=generator)

    def losses(query: torch.Tensor, key: torch.Tensor) -> tuple[float, float]:
        attend, watch = UnrolledAttention({0: copy_sources(ids, supervised)}), CopyWatch(ids, supervised, layers=2)
        attend(0, query, key, value)
        watch(1, query, key, value)
        return float(attend.copy_loss), float(watch.loss)

    first, last = torch.zeros(1, 4, 1, 1), torch.zeros(1, 4, 1, 1)
    first[:, :2], last[:, 2:] = 1, 1
    plain = losses(query, key)
    assert min(plain) > 0
    assert losses(query + first, key + first[:, 1:3]) == pytest.approx(plain)
    changed = losses(query + 3 * last * query, key)
    assert changed[0] != pytest.approx(plain[0])
    assert changed[1] != pytest.approx(plain[1])


def test_what_is_carried_is_what_the_last_group_alone_would_add():
    generator = torch.Generator().manual_seed(0)
    value, output = torch.randn(2, 2, 5, 8, generator=generator), torch.randn(12, 4 * 8, generator=generator)
    heads = torch.zeros(2, 5, 4, 8)
    heads[:, :, 2:] = value[:, 1, :, None]  # both query heads of the last group bring back its value
    torch.testing.assert_close(carried_states(value, output), heads.flatten(2) @ output.T)
    tokens, supervised = torch.tensor([[3, 1, 1, 1, -1, 1, 1, 1, 2, 1, 1, 1, 4]]), torch.ones(1, 13, dtype=torch.bool)
    supervised[0, 8] = False
    assert carried(tokens, supervised)[0].nonzero().flatten().tolist() == [0, 12]


def repeating(target: Target, seed: int) -> Batch:
    """Texts that say the same ten random tokens twice."""
    said = torch.randint(5, target.vocab_size - 1, (4, 10), generator=torch.Generator().manual_seed(seed))
    examples = [Example(f"{seed}/{at}", tuple(ids + ids), (True,) * 20) for at, ids in enumerate(said.tolist())]
    return OnlineFeatures(target, (0, 1, 2, -1)).batch(examples)


LEARNERS: dict[str, Callable[..., Learner]] = {
    "eagle": lambda target, counts: EagleLearner(target, counts, steps=2, draft_vocab=None, copying=1.0),
    "eagle of two layers": lambda target, counts: EagleLearner(
        target, counts, steps=2, draft_vocab=None, copying=1.0, layers=2
    ),
    "eagle3": lambda target, counts: Eagle3Learner(
        target, counts, steps=2, draft_vocab=None, layers=[0, 1, 2], copying=1.0
    ),
    "draft_model": lambda target, counts: DraftModelLearner(
        target, counts, layers=[0, 1], draft_vocab=None, copying=1.0
    ),
}


CARRIED = {"eagle": 1.0, "eagle of two layers": 1.0, "eagle3": 0.75, "draft_model": 0.95}
"""Part of the loss that may be left; an output layer that is the tiny target's own is all but flat."""


@pytest.mark.parametrize("kind", LEARNERS)
def test_heads_learn_where_to_look_in_texts_they_have_not_seen(kind: str, tiny_target: Callable[..., Target]):
    """The heads of before did by chance: where copying was right, they were no better than elsewhere."""
    target = tiny_target()
    learner = LEARNERS[kind](target, torch.ones(target.vocab_size))
    unseen = repeating(target, seed=1000)
    optimizer = torch.optim.AdamW([p for p in learner.head.parameters() if p.requires_grad], lr=3e-3)
    before = missed(learner, unseen)
    for seed in range(120):
        optimizer.zero_grad(set_to_none=True)
        (learner(repeating(target, seed)).loss / 80).backward()
        optimizer.step()
    after = missed(learner, unseen)
    assert set(after) == {"copying/where", "copying/what"}
    assert after["copying/where"] < 0.75 * before["copying/where"]
    assert after["copying/what"] < CARRIED[kind] * before["copying/what"]


def missed(learner: Learner, batch: Batch) -> dict[str, float]:
    with torch.no_grad():
        return {name: float(value) for name, value in learner(batch).parts.items() if "copying" in name}


def test_without_its_weight_nothing_is_watched(tiny_target: Callable[..., Target]):
    """A recipe of a paper stays that recipe."""
    target = tiny_target()
    learner = EagleLearner(target, torch.ones(target.vocab_size), draft_vocab=None)
    assert not any("copying" in name for name in learner(repeating(target, 0)).parts)


def test_one_layer_cannot_copy(tiny_target: Callable[..., Target]):
    target = tiny_target()
    with pytest.raises(InputError, match="one layer cannot"):
        DraftModelLearner(target, torch.ones(target.vocab_size), layers=[0], copying=0.1)


def test_layers_that_hide_their_attention_are_refused(
    tiny_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
):
    """A decoder that keeps keyword arguments from its attention has nothing to be taught by; it failed in a matmul."""
    target = tiny_target()
    learner = LEARNERS["draft_model"](target, torch.ones(target.vocab_size))
    assert isinstance(learner, DraftModelLearner)
    shown = DraftLM.states
    monkeypatch.setattr(DraftLM, "states", lambda self, ids, watch=None: shown(self, ids))
    example = Example("one", tuple(range(5, 17)), (True,) * 12)
    with pytest.raises(InputError, match=r"head.copying=1.0: .* give head.copying=0"):
        learner(OnlineFeatures(target, learner.feature_layers).batch([example]))


@pytest.mark.parametrize("kind", LEARNERS)
def test_padding_and_texts_without_labels_teach_nothing(kind: str, tiny_target: Callable[..., Target]):
    """Padding was to be brought back as token 0, and a process's filler text was learnt."""
    target = tiny_target()
    learner = LEARNERS[kind](target, torch.ones(target.vocab_size))
    features = OnlineFeatures(target, (0, 1, 2, -1))
    short, long = Example("short", (5, 6, 7) * 3, (True,) * 9), Example("long", (5, 6, 7, 8) * 6, (False,) * 24)
    apart, together = missed(learner, features.batch([short])), missed(learner, features.batch([short, long]))
    assert together == pytest.approx(apart, rel=1e-4)
    assert all(value > 0 for value in apart.values())


def test_a_watch_of_padding_sees_nothing():
    """Padding has the id 0 over and over: all of it would look like copies."""
    batch = collate([Example("long", tuple(range(5, 25)), (True,) * 20), Example("short", (5, 6), (True, True))])
    assert not copy_sources(batch.ids, batch.supervised)[1].any()
    watch = CopyWatch(batch.ids, batch.supervised, layers=2)
    keys: Any = torch.zeros(2, 1, 20, 4)
    watch(1, keys, keys, keys)
    assert watch.loss.item() == 0


def test_attention_is_as_before(tiny_target: Callable[..., Target]):
    """Looking at queries and keys changes no number that a draft computes."""
    target = tiny_target()
    learner = LEARNERS["draft_model"](target, torch.ones(target.vocab_size))
    batch = repeating(target, 3)
    seen: list[int] = []
    states: Any = learner.head
    watched = states.states(batch.ids, lambda layer, *parts: seen.append(layer))
    assert torch.equal(watched, states.states(batch.ids))
    assert seen == [0, 1]
    states._decoder[0].set_attn_implementation("sdpa")
    assert torch.equal(watched, states.states(batch.ids))
