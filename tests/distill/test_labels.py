"""Which position learns which token: the alignment that silently spoils a head when it is off by one."""

import pytest
import torch
from heads_at_hand import every_other

from specdec_lab.distill.batch import Batch, Example, ahead, collate
from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.hits import HitCounter
from specdec_lab.distill.teacher import Teacher
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

REPLY = range(5, 9)


def counting(tokens: int = 10) -> Example:
    """Ids 0, 1, 2, ...; the reply is at positions 5 to 8."""
    return Example("0/0/0", tuple(range(tokens)), tuple(at in REPLY for at in range(tokens)))


def test_marks_move_with_the_labels():
    """TD-01: the first reply token was never learnt and one past the end was."""
    batch = collate([counting()])
    labels, marked = batch.labels_at(1)
    assert marked[0].nonzero().flatten().tolist() == [4, 5, 6, 7]
    assert labels[0, marked[0]].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 20])
def test_every_offset_counts_from_the_original_labels(offset: int):
    """TD-02: labels that were shifted again in a loop over heads."""
    labels, marked = collate([counting()]).labels_at(offset)
    expected = [at for at in range(10) if at + offset in REPLY]
    assert marked[0].nonzero().flatten().tolist() == expected
    assert labels[0, marked[0]].tolist() == [at + offset for at in expected]


def test_padding_is_never_a_label():
    batch = collate([counting(), counting(6)])
    assert batch.lengths.tolist() == [10, 6]
    assert batch.labels == 5  # four of the first, one of the second
    for offset in (1, 2, 3):
        labels, marked = batch.labels_at(offset)
        assert not marked[1, 6 - offset :].any()
        assert labels[1, marked[1]].tolist() == [5] * int(marked[1].sum())


def test_ahead_moves_states_too():
    states = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(ahead(states, 1)[0, :3], states[0, 1:])
    assert not ahead(states, 1)[0, 3].any()
    assert torch.equal(ahead(states, 0), states)


def features_of(target: Target, batch: Batch) -> Batch:
    hidden = target.model(input_ids=batch.ids, output_hidden_states=True).hidden_states[-1].detach()
    return Batch(batch.ids, batch.supervised, batch.lengths, {-1: hidden}, batch.keys)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("reduced", [False, True])
def test_teacher_is_the_targets_own_law_before_the_label(tiny_target, offset: int, reduced: bool):
    """TD-01: features, logits and labels that are not of the same place."""
    target: Target = tiny_target()
    vocabulary = every_other(target) if reduced else DraftVocabulary.whole(target.vocab_size)
    batch = features_of(target, collate([counting(), counting(8)]))
    rows = Teacher(batch, SharedParts(target, vocabulary), vocabulary).at(offset)
    plain = target.model(input_ids=batch.ids).logits.detach()
    at = 0
    for row in range(2):
        for position in range(batch.ids.shape[1]):
            label_at = position + offset
            is_label = label_at < int(batch.lengths[row]) and bool(batch.supervised[row, label_at])
            assert bool(rows.marked[row, position]) == is_label
            if not is_label:
                continue
            expected = plain[row, label_at - 1, vocabulary.token_ids].softmax(dim=-1)
            assert torch.allclose(rows.target_probs[at], expected, atol=1e-5)
            assert torch.equal(rows.states[at], batch.features[-1][row, label_at - 1])
            token = int(batch.ids[row, label_at])
            inside = token in vocabulary.token_ids.tolist()
            assert int(rows.labels[at]) == (vocabulary.token_ids.tolist().index(token) if inside else -1)
            at += 1
    assert at == len(rows.labels)


def test_likeliest_tokens_are_those_of_the_whole_output_layer(tiny_target):
    """A reduced vocabulary's own first choice is not what greedy decoding takes."""
    target: Target = tiny_target()
    ids = torch.randint(5, target.vocab_size, (8,), generator=torch.Generator().manual_seed(3)).tolist()
    for _ in range(12):
        ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    example = Example("half", tuple(ids), (False, *([True] * (len(ids) - 1))))
    batch = OnlineFeatures(target, (-1,)).batch([example])
    vocabulary = DraftVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    teacher = Teacher(batch, SharedParts(target, vocabulary), vocabulary)
    for offset in (1, 2, 3):
        marks = teacher.takes_likeliest(offset)
        assert len(marks) == int(teacher.at(offset).marked.sum())
        assert marks[-12:].all()
        assert not marks[:-12].all()


def test_a_chain_is_right_only_as_far_as_it_was_right_before():
    counter = HitCounter(torch.zeros(1, 3, dtype=torch.bool))
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    right, wrong = [9.0, 0.0], [0.0, 9.0]
    labels = torch.zeros(3, dtype=torch.long)
    counter.count(1, everywhere, torch.tensor([right, right, wrong]), labels)
    counter.count(2, everywhere, torch.tensor([right, wrong, right]), labels)
    assert int(counter.hits["depth1/top1"]) == 2
    assert int(counter.hits["depth2/top1"]) == 2
    assert int(counter.hits["chain1/right"]) == 2
    assert int(counter.hits["chain2/right"]) == 1
    assert int(counter.hits["depth2/top2"]) == 3


def test_a_label_beyond_the_draft_vocabulary_is_never_right():
    """TV-01: the id -1 must not be taken for the last draft id."""
    counter = HitCounter(torch.zeros(1, 1, dtype=torch.bool))
    counter.count(1, torch.ones(1, 1, dtype=torch.bool), torch.tensor([[0.0, 9.0]]), torch.tensor([-1]))
    assert int(counter.hits["depth1/top2"]) == 0


def test_a_perfect_chain_is_perfect_however_short_the_reply():
    """Positions before the reply, where the first depth has no label, counted against deeper ones."""
    counter = HitCounter(torch.zeros(1, 6, dtype=torch.bool))
    reply = torch.tensor([[False, False, False, True, True, True]])
    for depth in (1, 2, 3):
        marked = ahead(reply, depth + 1)
        right = torch.tensor([[9.0, 0.0]]).expand(int(marked.sum()), 2)
        counter.count(depth, marked, right, torch.zeros(int(marked.sum()), dtype=torch.long))
    for depth in (1, 2, 3):
        assert counter.hits[f"chain{depth}/right"] == counter.seen[f"chain{depth}"] > 0
