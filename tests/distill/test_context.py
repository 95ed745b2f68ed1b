"""What a text holds beyond the draft vocabulary: where it can be drafted, and what is learnt of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from heads_at_hand import eagle3_head, eagle_head

from specdec_lab.distill.batch import Batch, Example, collate
from specdec_lab.distill.context import UNSAID_LOGIT, TextContext
from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.learners.recurrent import Eagle3Learner
from specdec_lab.distill.teacher import Teacher
from specdec_lab.errors import InputError
from specdec_lab.heads.formats import load_head, save_head
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

IDS = torch.tensor([[4, 9, 11, 9, 4, 9], [11, 4, 13, 13, 11, 4]])


def small(target: Target) -> DraftVocabulary:
    return DraftVocabulary(torch.tensor([2, 4]), target.vocab_size)


def test_an_id_can_be_drafted_once_its_own_text_has_said_it(tiny_target):
    """Neither the first time nor because another text of the batch has it: decoding could not draft it either."""
    target: Target = tiny_target()
    context = TextContext(IDS, small(target), SharedParts(target, small(target)))
    assert context.token_ids.tolist() == [9, 11, 13]
    assert context.draft_ids.tolist() == [[1, 2, 3, 2, 1, 2], [3, 1, 4, 4, 3, 1]]
    assert context.labels.tolist() == [[1, -1, -1, 2, 1, 2], [-1, 1, -1, 4, 3, 1]]
    assert context.said[0].int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 0]]
    assert context.said[1, 1].tolist() == [False, True, False]


def test_the_law_is_that_of_what_can_be_drafted(tiny_target):
    """The teacher's law and the head's have to be over the same ids at every place; what is unsaid has no chance."""
    target: Target = tiny_target()
    vocabulary = small(target)
    parts = SharedParts(target, vocabulary)
    example = Example("0/0/0", tuple(IDS[0].tolist()), (False, True, True, True, True, True))
    batch = OnlineFeatures(target, (-1,)).batch([example])
    context = TextContext(batch.ids, vocabulary, parts)
    rows = Teacher(batch, parts, vocabulary, context).at(2)  # at position t, token t + 2
    output = target.model.get_output_embeddings()
    assert output is not None
    whole = output(batch.features[-1])[0]
    for at, place in enumerate(range(4)):
        known = set(IDS[0, : place + 2].tolist())
        ids = [token for token in (2, 4, 9, 11) if token in (2, 4) or token in known]
        law = whole[place + 1][torch.tensor(ids)].softmax(dim=-1)
        found = rows.target_probs[at]
        assert torch.allclose(found[found > 0], law, atol=1e-5)
        assert rows.unsaid is not None
        assert (found == 0).tolist() == [False, False, *rows.unsaid[at].tolist()]
    assert rows.labels.tolist() == [-1, 2, 1, 2]


def test_what_is_unsaid_gets_no_gradient_and_breaks_nothing(tiny_target):
    """A logit of minus infinity times a probability of 0 would be NaN."""
    target: Target = tiny_target()
    learner = Eagle3Learner(
        target, torch.ones(target.vocab_size), draft_vocab=8, layers=[0, 1, 2], copying=1.0, context_vocab=True
    )
    examples = [Example("0/0/0", tuple(range(5, 65)), (True,) * 60), Example("1/0/0", (40, 41) * 20, (True,) * 40)]
    batch = OnlineFeatures(target, learner.feature_layers).batch(examples)
    outcome = learner(batch)
    outcome.loss.backward()
    assert outcome.loss.isfinite()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in learner.head.parameters())
    assert torch.finfo(torch.bfloat16).min < UNSAID_LOGIT
    assert learner.coverage(batch) == pytest.approx(
        (38 + 8 - len({*learner.vocabulary.token_ids.tolist()} - {*range(5, 65)})) / 100
    )


@pytest.mark.parametrize("make", [eagle_head, eagle3_head])
def test_a_checkpoint_says_so(make, tiny_target, tmp_path: Path):
    """Drafted from without its context, such a head would be the one that it was before."""
    target: Target = tiny_target()
    kind = "eagle" if make is eagle_head else "eagle3"
    head = make(target, small(target))
    for stated in (False, True):
        head.context_vocab = stated
        save_head(head, tmp_path / "head", {})
        loaded, _ = load_head(kind, str(tmp_path / "head"), target)
        assert loaded.context_vocab is stated
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["specdec_lab"]["context_vocab"] = "yes"
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"context_vocab='yes' in config[.]json is neither true nor false"):
        load_head(kind, str(tmp_path / "head"), target)


def test_texts_without_anything_beyond_are_as_before(tiny_target):
    target: Target = tiny_target()
    vocabulary = DraftVocabulary.whole(target.vocab_size)
    parts = SharedParts(target, vocabulary)
    batch: Batch = collate([Example("0/0/0", (4, 9, 11), (True,) * 3)])
    context = TextContext(batch.ids, vocabulary, parts)
    assert context.token_ids.tolist() == []
    assert context.labels.tolist() == batch.ids.tolist()
    logits = torch.zeros(3, target.vocab_size)
    assert torch.equal(context.widened(logits, eagle_head(target), torch.zeros(3, target.hidden_size)), logits)
