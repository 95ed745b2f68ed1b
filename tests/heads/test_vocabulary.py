"""The reduced vocabulary: ids there and back, and probabilities on the target's own ids."""

from __future__ import annotations

import pytest
import torch

from specdec_lab.heads.vocabulary import DraftVocabulary


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_offsets_and_members_are_worked_out_by_hand():
    """Target id = draft id + d2t[draft id]; t2d marks what is in."""
    vocabulary = DraftVocabulary(ids(0, 2, 3, 7), 9)
    assert vocabulary.offsets().tolist() == [0, 1, 1, 4]
    assert vocabulary.members().tolist() == [True, False, True, True, False, False, False, True, False]
    again = DraftVocabulary.from_offsets(vocabulary.offsets().int(), 9)
    assert again.token_ids.tolist() == [0, 2, 3, 7]
    assert not vocabulary.is_whole
    assert len(vocabulary) == 4


def test_ids_there_and_back():
    """What is not in is -1, which is no draft id; 0 is an id like any other."""
    vocabulary = DraftVocabulary(ids(0, 2, 3, 7), 9)
    assert vocabulary.draft_ids(ids(7, 0, 1, 8)).tolist() == [3, 0, -1, -1]
    assert vocabulary.draft_ids(torch.tensor([[3], [2]])).tolist() == [[2], [1]]
    assert vocabulary.token_ids[vocabulary.draft_ids(vocabulary.token_ids)].tolist() == [0, 2, 3, 7]


def test_scatter_puts_each_value_at_its_target_id():
    """The law is over all of the target's ids; those left out get the fill, and the dtype stays."""
    vocabulary = DraftVocabulary(ids(1, 3), 5)
    wide = vocabulary.scatter(torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.bfloat16), 0.0)
    assert wide.dtype == torch.bfloat16
    assert wide.tolist() == [[0.0, 0.25, 0.0, 0.75, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]]
    assert vocabulary.scatter(torch.zeros(2), float("-inf")).exp().tolist() == [0, 1, 0, 1, 0]


def test_whole_is_the_targets_own():
    """Nothing moves where nothing is left out."""
    whole = DraftVocabulary.whole(6)
    assert whole.is_whole
    assert whole.offsets().tolist() == [0] * 6
    assert whole.scatter(torch.arange(6.0), -1.0).tolist() == list(range(6))


def test_most_frequent_breaks_ties_towards_small_ids_and_keeps_what_is_needed():
    """Counts decide; EOS is in although no label is; equal counts give the same ids each time."""
    counts = ids(5, 0, 9, 5, 5, 0)
    assert DraftVocabulary.most_frequent(counts, 3).token_ids.tolist() == [0, 2, 3]
    assert DraftVocabulary.most_frequent(counts, 3, frozenset({1})).token_ids.tolist() == [0, 1, 2]
    assert DraftVocabulary.most_frequent(counts, 6).is_whole
    assert counts.tolist() == [5, 0, 9, 5, 5, 0]


@pytest.mark.parametrize("wrong", [(3, 1), (2, 2), (-1, 4), (0, 5), ()])
def test_ids_that_cannot_be_are_refused(wrong: tuple[int, ...]):
    """Not ascending, doubled, negative, beyond the target, none at all."""
    with pytest.raises(ValueError, match="draft vocabulary"):
        DraftVocabulary(torch.tensor(wrong, dtype=torch.long), 5)
