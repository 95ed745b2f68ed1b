"""What a text holds beyond the draft vocabulary: where it can be drafted, and what is learnt of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_at_hand import eagle3_head, eagle_head

from specdec_lab.distill.batch import Batch, Example, collate
from specdec_lab.distill.context import UNSAID_LOGIT, TextContext
from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.learners.recurrent import Eagle3Learner, EagleLearner
from specdec_lab.distill.start import started
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
    ids = torch.cat((IDS, torch.full((2, 1), 21)), dim=1)  # the last column is padding
    context = TextContext(ids, torch.tensor([6, 6]), small(target), SharedParts(target, small(target)))
    assert context.token_ids.tolist() == [9, 11, 13]
    assert context.draft_ids[:, :6].tolist() == [[1, 2, 3, 2, 1, 2], [3, 1, 4, 4, 3, 1]]
    assert context.labels.tolist() == [[1, -1, -1, 2, 1, 2, -1], [-1, 1, -1, 4, 3, 1, -1]]
    marks = torch.zeros(2, 7, dtype=torch.bool)
    marks[0, :4], marks[1, 1] = True, True
    said = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 1, 0]]
    assert (~context.unsaid(marks)).int().tolist() == said
    assert (~context.foreign(marks)).int().tolist() == [[1, 1, 0]] * 4 + [[0, 1, 1]]


def test_the_law_is_that_of_what_can_be_drafted(tiny_target):
    """The teacher's law and the head's have to be over the same ids at every place; what is unsaid has no chance."""
    target: Target = tiny_target()
    vocabulary = small(target)
    parts = SharedParts(target, vocabulary)
    example = Example("0/0/0", tuple(IDS[0].tolist()), (False, True, True, True, True, True))
    batch = OnlineFeatures(target, (-1,)).batch([example])
    context = TextContext(batch.ids, batch.lengths, vocabulary, parts)
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


@pytest.mark.parametrize("learner_class", [EagleLearner, Eagle3Learner])
def test_a_text_learns_the_same_whatever_is_beside_it(learner_class, tiny_target):
    """TD: what is beside a text must not change its loss, or accumulation and processes would change the training."""
    target: Target = tiny_target()
    states: dict[str, Any] = {"layers": [0, 1, 2]} if learner_class is Eagle3Learner else {}
    learner = learner_class(
        target, torch.ones(target.vocab_size), draft_vocab=8, copying=1.0, context_vocab=True, **states
    )
    examples = [Example("0/0/0", tuple(range(9, 59)), (True,) * 50), Example("1/0/0", (80, 81, 82) * 9, (True,) * 27)]
    source = OnlineFeatures(target, learner.feature_layers)
    together, *apart = [learner(source.batch(some)) for some in (examples, examples[:1], examples[1:])]
    for name, loss in together.parts.items():
        assert float(loss) == pytest.approx(sum(float(one.parts[name]) for one in apart), rel=1e-4), name
    assert float(together.parts["copying/what"]) > 0  # nothing but ids beyond the vocabulary


def test_other_rows_of_the_output_layer_are_read_as_its_own(tiny_target):
    target: Target = tiny_target()
    head = eagle3_head(target)
    output = target.model.get_output_embeddings()
    assert output is not None
    head.lm_head.load_state_dict({"weight": output.weight})
    states = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.context_logits(states, output.weight), head.logits(states, torch.empty(0)))  # pyright: ignore[reportArgumentType]


def test_a_head_that_drafts_its_context_goes_on_doing_so(tiny_target, tmp_path: Path):
    """A training that begins at it without the setting would export a head that does not."""
    target: Target = tiny_target()
    head = eagle_head(target, small(target))
    head.context_vocab = True
    save_head(head, tmp_path / "head", {})

    def make(target: Target, counts: torch.Tensor, context: bool = False) -> EagleLearner:
        return EagleLearner(target, counts, draft_vocab=2, context_vocab=context)

    with pytest.raises(InputError, match=r"^start=.*give head[.]context_vocab=true"):
        started(make, "eagle", str(tmp_path / "head"), target)
    learner, _ = started(lambda target, counts: make(target, counts, True), "eagle", str(tmp_path / "head"), target)
    assert learner.context_vocab


@pytest.mark.parametrize(
    ("make", "layout"), [(eagle_head, "native"), (eagle3_head, "native"), (eagle3_head, "speculators")]
)
def test_a_checkpoint_says_so(make, layout: Any, tiny_target, tmp_path: Path):
    """Drafted from without its context, such a head would be the one that it was before."""
    target: Target = tiny_target()
    kind = "eagle" if make is eagle_head else "eagle3"
    head = make(target, small(target))
    for stated in (False, True):
        head.context_vocab = stated
        save_head(head, tmp_path / "head", {"target": "hub/target"}, layout)
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
    context = TextContext(batch.ids, batch.lengths, vocabulary, parts)
    assert context.token_ids.tolist() == []
    assert context.labels.tolist() == batch.ids.tolist()
    logits = torch.zeros(3, target.vocab_size)
    assert torch.equal(context.widened(logits, eagle_head(target), torch.zeros(3, target.hidden_size)), logits)
