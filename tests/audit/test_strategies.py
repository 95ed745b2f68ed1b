"""The whole loop by enumeration: every strategy, processor and rule gives the law of plain decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from scripted import CoupledDrafter, DrawingDrafter, PathsDrafter
from strategies_at_hand import maker

from specdec_lab.audit.draws import draw_test
from specdec_lab.audit.enumeration import TooManyOutcomesError
from specdec_lab.audit.strategies import (
    TOY_PROMPT,
    TOY_SAMPLING,
    compare_texts,
    decoded_law,
    law_error,
    plain_law,
    toy_target,
)
from specdec_lab.audit.toy import bigram_model, law_table
from specdec_lab.config import available_strategies
from specdec_lab.decode import Request
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.sampling import Processing, SamplingParams
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree
from specdec_lab.verify import Acceptance

EQUAL_WITHIN = 1e-12
LAWS = {0: (0.4, 0.35, 0.25), 1: (0.25, 0.3, 0.45), 2: (0.5, 0.0, 0.5)}
DRAFT_LAWS = {0: (0.2, 0.5, 0.3), 1: (0.6, 0.0, 0.4), 2: (0.1, 0.8, 0.1)}

samplings = pytest.mark.parametrize("sampling", TOY_SAMPLING, ids=lambda one: str(TOY_SAMPLING.index(one)))


@samplings
@pytest.mark.parametrize("name", available_strategies())
def test_every_strategy_has_the_law_of_plain_decoding(name: str, sampling: SamplingParams, tmp_path: Path):
    """Guards LC-03, SP-01, SP-02 and SP-05: all outcomes, with processors that look at the history, and an EOS."""
    make = maker(name, tmp_path)
    new_tokens = 3 if make(toy_target(random.Random(0))).draws else 4
    assert law_error(make, random.Random(name), sampling, new_tokens=new_tokens) < EQUAL_WITHIN


@samplings
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    ("parents", "without_replacement"), [((-1, 0, 1), False), ((-1, 0, 0), False), ((-1, 0, 0), True)]
)
def test_drawn_drafts_have_the_law_of_plain_decoding(
    sampling: SamplingParams, rule: str, parents: tuple[int, ...], without_replacement: bool
):
    """Guards LC-01, LC-08, SP-01, SP-02: prefill, rounds, budget and EOS around the rule, with every processor."""

    def make(target: Target) -> Drafter:
        return DrawingDrafter(target, DRAFT_LAWS, parents, without_replacement=without_replacement)

    assert law_error(make, random.Random(5), sampling, Acceptance(rule), new_tokens=3) < EQUAL_WITHIN  # type: ignore[arg-type]


def test_the_enumeration_of_the_loop_sees_a_lossy_rule():
    """Guards LC-12: typical acceptance of the same drafts is far from the law."""
    make = lambda target: PathsDrafter(target, [[0, 1]])  # noqa: E731
    assert law_error(make, random.Random(5), SamplingParams(1.0), Acceptance("typical"), new_tokens=3) > 0.05


def test_the_reference_law_is_the_product_of_the_tables_rows():
    target = Target(bigram_model(law_table(LAWS), eos=2))
    law = plain_law(target.model, Processing(SamplingParams(1.0), target), (0,), 2, target.eos_ids)
    wanted = {(2,): 0.25} | {(a, b): LAWS[0][a] * LAWS[a][b] for a in (0, 1) for b in range(3)}
    assert law == pytest.approx(wanted, abs=1e-6)


def test_more_outcomes_than_the_limit_are_said():
    target = toy_target(random.Random(1))
    with pytest.raises(TooManyOutcomesError):
        decoded_law(target, NgramDrafter(target), TOY_PROMPT, 4, SamplingParams(1.0), limit=3)


def test_coupled_drafts_emit_the_text_of_plain_decoding():
    """Guards SP-04: a draft drawn with the target's own noise, from another law; most drafts are accepted."""
    target = Target(bigram_model(law_table(LAWS)))
    requests = [Request((0,), 30, noise_key=(number,)) for number in range(12)]
    settings = [(SamplingParams(1.0, seed=seed), size) for seed in (0, 1) for size in (1, 5)]
    for check in compare_texts(
        target, CoupledDrafter(target, DRAFT_LAWS, 3), requests, settings, Acceptance("coupled")
    ):
        assert (check.compared, check.identical, check.first_difference) == (12, 12, None)


def test_a_text_that_parts_is_shown():
    """Guards LC-12: the comparison can fail."""
    target = Target(bigram_model(law_table(LAWS)))
    requests = [Request((0,), 20, noise_key=(f"question {number}",)) for number in range(4)]
    sampling = SamplingParams(1.0)
    (check,) = compare_texts(target, PathsDrafter(target, [[0, 0]]), requests, [(sampling, 1)], Acceptance("typical"))
    assert check.identical < check.compared == 4
    assert check.first_difference is not None
    assert str(check.first_difference["question"]).startswith("question")
    assert check.first_difference["token"] != check.first_difference["baseline_token"]


@pytest.mark.parametrize("without_replacement", [False, True])
def test_drawn_drafts_have_their_stated_law(without_replacement: bool):
    """Guards LC-01 and LC-02: a true law passes, one that is a little off does not, with siblings of either kind."""
    target = Target(bigram_model(law_table(LAWS)))
    requests = [Request((0,), 40, noise_key=(number,)) for number in range(30)]

    class Sharpened(DrawingDrafter):
        def propose(self, context: DraftContext) -> DraftTree:
            tree = super().propose(context)
            assert tree.draft_probs is not None
            law = tree.draft_probs**2
            return DraftTree(tree.tokens, tree.parents, law / law.sum(-1, keepdim=True), without_replacement)

    for kind, honest in ((DrawingDrafter, True), (Sharpened, False)):
        drafter = kind(target, DRAFT_LAWS, (-1, 0, 0, 1), without_replacement=without_replacement)
        found = draw_test(target, drafter, requests, SamplingParams(1.0), Acceptance("rejection"))
        assert found["drafts"] > 400
        assert (found["p_value"] > 1e-3) is honest
