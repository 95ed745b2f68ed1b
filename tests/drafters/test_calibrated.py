"""Strategies whose heads state what their probabilities are worth: used where tokens are not drawn, there alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from heads_at_hand import eagle3_head, eagle_head, medusa_heads
from oracles import decode

from specdec_lab.cost import EVERY_NODE_PAYS
from specdec_lab.decode import Request
from specdec_lab.drafters.base import DraftContext
from specdec_lab.drafters.draft_model import DraftModelDrafter
from specdec_lab.drafters.eagle import EagleDrafter
from specdec_lab.drafters.hybrid import path_texts
from specdec_lab.drafters.medusa import MedusaDrafter
from specdec_lab.heads.calibration import AT_ITS_WORD, Calibration
from specdec_lab.heads.draft_lm import DraftLM
from specdec_lab.heads.draft_lm_files import save_draft_model
from specdec_lab.heads.formats import save_head
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target

LINES = Calibration(((1.0, 0.7), (0.8, 0.4)))

Make = Callable[[Target], Any]


def draft_model(target: Target) -> DraftModelDrafter:
    draft = DraftLM(target, [0, 1], DraftVocabulary.whole(target.vocab_size))
    return DraftModelDrafter(
        target, model=draft, verify_ms=EVERY_NODE_PAYS, k=2, width=4, min_probability=0.0, nodes=64
    )


def eagle(target: Target, make: Callable[[Target], Any]) -> EagleDrafter:
    settings = {"depth": 2, "width": 6, "min_probability": 0.0, "nodes": 64}
    return EagleDrafter(target, head=make(target), verify_ms=EVERY_NODE_PAYS, **settings)


STRATEGIES: Mapping[str, Make] = {
    "medusa": lambda target: MedusaDrafter(
        target, head=medusa_heads(target, 2), verify_ms=EVERY_NODE_PAYS, nodes=64, branches=6
    ),
    "eagle": lambda target: eagle(target, eagle_head),
    "eagle3": lambda target: eagle(target, eagle3_head),
    "draft_model": draft_model,
}


def first_values(drafter: Any, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return the confidence of each path of the first tree for one prompt."""
    seen: list[dict[tuple[int, ...], float]] = []
    propose = drafter.propose_batch

    def watched(contexts: list[DraftContext]) -> Any:
        trees = propose(contexts)
        for tree in trees:
            sure = tree.confidence or [1.0] * len(tree)  # a drawn tree of a draft model states none
            seen.append(dict(zip(path_texts(tree), sure, strict=True)))
        return trees

    drafter.propose_batch = watched
    decode(drafter.target, drafter, [Request(tuple(range(20, 31)), 6)], sampling=sampling)
    del drafter.propose_batch
    return seen[0]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_values_are_products_of_calibrated_chances(kind: str, tiny_target: Callable[..., Target]):
    """Trees that were cut by the law of a head were too small for a target that takes its likeliest token."""
    drafter = STRATEGIES[kind](tiny_target())
    assert drafter.calibration is AT_ITS_WORD
    bare = first_values(drafter, SamplingParams())
    drafter.calibration = LINES
    found = first_values(drafter, SamplingParams())
    both = found.keys() & bare.keys()
    assert {len(path) for path in both} == {0, 1, 2}
    for path in both - {()}:
        chance = LINES.chance(bare[path] / bare[path[:-1]], len(path))
        assert found[path] == pytest.approx(found[path[:-1]] * chance, rel=1e-4)
        assert found[path] > bare[path]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_where_tokens_are_drawn_probabilities_are_taken_at_their_word(kind: str, tiny_target: Callable[..., Target]):
    """What the target draws follows its law, which is what the head has learnt."""
    drafter = STRATEGIES[kind](tiny_target())
    drawn = SamplingParams(temperature=1.0, seed=3)
    bare = first_values(drafter, drawn)
    drafter.calibration = LINES
    assert first_values(drafter, drawn) == bare
    assert len(bare) > 3


HEADS: Mapping[str, Make] = {"medusa": medusa_heads, "eagle": eagle_head, "eagle3": eagle3_head}


@pytest.mark.parametrize("kind", HEADS)
def test_a_strategy_reads_what_its_head_states(kind: str, tiny_target: Callable[..., Target], tmp_path: Path):
    target = tiny_target()
    save_head(HEADS[kind](target), tmp_path / "head", {"target": "some/where", "calibration": [[1.5, 0.25]]})
    settings = {"kind": kind} if kind.startswith("eagle") else {}
    strategy: Any = EagleDrafter if settings else MedusaDrafter
    assert strategy(target, head=str(tmp_path / "head"), **settings).calibration.lines == ((1.5, 0.25),)


def test_a_draft_model_reads_what_it_states(tiny_target: Callable[..., Target], tmp_path: Path):
    target = tiny_target()
    draft = DraftLM(target, [0, 1], DraftVocabulary.whole(target.vocab_size))
    save_draft_model(draft, tmp_path / "draft", {"calibration": [[1.5, 0.25]]})
    assert DraftModelDrafter(target, model=str(tmp_path / "draft")).calibration.lines == ((1.5, 0.25),)


@pytest.mark.parametrize("make", [eagle_head, eagle3_head])
def test_candidates_below_the_limit_are_offered_and_not_expanded(
    make: Callable[[Target], Any], tiny_target: Callable[..., Target]
):
    """The limit is on what a candidate is worth, which without it would be the least of what is drafted below."""
    drafter = eagle(tiny_target(), make)
    drafter.calibration = LINES
    values = first_values(drafter, SamplingParams())
    first = {path: value for path, value in values.items() if len(path) == 1}
    ranked = sorted(first.values())
    assert len(ranked) > 3
    drafter.min_probability = (ranked[1] + ranked[2]) / 2
    found = first_values(drafter, SamplingParams())
    assert {path for path in found if len(path) == 1} == set(first)
    wanted = {path for path, value in first.items() if value >= drafter.min_probability}
    assert {path[:1] for path in found if len(path) == 2} == wanted
    assert len(wanted) == len(first) - 2
