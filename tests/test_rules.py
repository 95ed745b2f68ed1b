"""The acceptance rules by exact enumeration: their output law, their acceptance, and what a wrong rule looks like."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_lab.audit.enumeration import as_law, outcomes, total_variation
from specdec_lab.audit.rules import (
    SHAPES,
    VOCAB,
    Case,
    LawChoices,
    Rule,
    Siblings,
    draw_tree,
    output_law,
    random_case,
    rule_of,
)
from specdec_lab.errors import DrafterError, InputError
from specdec_lab.noise import Chance, HashedNoise
from specdec_lab.tree import DraftTree, chain
from specdec_lab.verify import (
    Acceptance,
    Walk,
    checked_draft_probs,
    follow,
    next_draft_probs,
    reject,
    residual,
    traverse,
)

EQUAL_WITHIN = 1e-12
REJECTION, BLOCK, COUPLED, TYPICAL = map(rule_of, map(Acceptance, ("rejection", "block", "coupled", "typical")))
SAMPLED: tuple[Siblings, ...] = ("with_replacement", "without_replacement")

shapes = pytest.mark.parametrize("shape", SHAPES)


def error(case: Case, rule: Rule) -> float:
    return total_variation(output_law(case, rule)[0], case.target_law)


def cases(shape: str, siblings: Siblings, count: int, seed: int = 0) -> list[Case]:
    rng = random.Random(f"{shape} {siblings} {seed}")
    return [random_case(rng, SHAPES[shape], siblings) for _ in range(count)]


def one_step(target_probs: Sequence[float], draft_probs: Sequence[float], children: int = 1) -> Case:
    """A case of one level: the law of the first token is ``target_probs``, later tokens are uniform."""
    parents = (-1, *[0] * children)
    uniform = as_law([1.0] * VOCAB)
    texts: list[tuple[int, ...]] = [(), *((token,) for token in range(VOCAB))]
    target_laws = dict.fromkeys(texts, uniform) | {(): as_law(list(target_probs))}
    return Case(parents, "with_replacement", target_laws, {text: as_law(list(draft_probs)) for text in texts})


def first_token(case: Case, rule: Rule) -> list[float]:
    law, _ = output_law(case, rule)
    return [sum(mass for text, mass in law.items() if text[0] == token) for token in range(VOCAB)]


# --- losslessness ---------------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("siblings", SAMPLED)
@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=["rejection", "block"])
def test_sampled_drafts_keep_the_targets_law(shape: str, siblings: Siblings, rule: Rule):
    """Guards LC-01, LC-08, LC-11: summed over every draft and decision, with zero probabilities and equal laws."""
    for case in cases(shape, siblings, 3):
        assert error(case, rule) < EQUAL_WITHIN


@shapes
@pytest.mark.parametrize("rule", [REJECTION, BLOCK, COUPLED], ids=["rejection", "block", "coupled"])
def test_picked_drafts_keep_the_targets_law(shape: str, rule: Rule):
    """Guards LC-03 and LC-07: children that were picked, not drawn."""
    for case in cases(shape, "fixed", 4):
        assert error(case, rule) < EQUAL_WITHIN


@pytest.mark.parametrize(
    ("target_probs", "draft_probs"),
    [
        ([0.5, 0.3, 0.2], [0.7, 0.2, 0.1]),
        ([0.6, 0.4, 0.0], [0.5714, 0.4286, 0.0]),
        ([0.2, 0.5, 0.3], [1.0, 0.0, 0.0]),
        ([0.0, 0.5, 0.5], [1.0, 0.0, 0.0]),
        ([1.0, 0.0, 0.0], [0.1, 0.1, 0.8]),
        ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("children", [1, 2])
@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=["rejection", "block"])
def test_laws_worked_by_hand(target_probs: list[float], draft_probs: list[float], children: int, rule: Rule):
    """Guards LC-01, LC-02, LC-08: the published small cases, disjoint and equal laws among them."""
    found = first_token(one_step(target_probs, draft_probs, children), rule)
    assert found == pytest.approx(target_probs, abs=1e-12)


# --- acceptance -----------------------------------------------------------------------------------------------------


def overlap(one: Tensor, other: Tensor) -> float:
    return float(torch.minimum(one, other).sum())


def test_a_chain_accepts_the_overlap_of_both_laws():
    """Guards LC-11: sum of min(p, q), which is 1 - TV: measured on both sides of the identity, level by level."""
    for case in cases("chain of 2", "with_replacement", 8):
        _, accepted = output_law(case, REJECTION)
        first = overlap(case.target_laws[()], case.draft_laws[()])
        tv = 0.5 * float((case.target_laws[()] - case.draft_laws[()]).abs().sum())
        assert first == pytest.approx(1 - tv, abs=1e-12)
        second = sum(
            float(torch.minimum(case.target_laws[()], case.draft_laws[()])[token])
            * overlap(case.target_laws[token,], case.draft_laws[token,])
            for token in range(VOCAB)
        )
        assert accepted == pytest.approx(first + second, abs=1e-12)


def test_the_published_case_of_acceptance():
    """Guards LC-11: .80 with the true law, .43 if the draft is taken for a picked one; the output law cannot tell."""
    case = one_step([0.5, 0.3, 0.2], [0.7, 0.2, 0.1])
    assert output_law(case, REJECTION)[1] == pytest.approx(0.8)
    as_picked: Rule = lambda tree, choices, chance: follow(tree, choices.token)  # noqa: E731
    law, accepted = output_law(case, as_picked)
    assert accepted == pytest.approx(0.43)
    assert total_variation(law, case.target_law) < EQUAL_WITHIN


@pytest.mark.parametrize("shape", ["chain of 1", "chain of 2", "chain of 3"])
def test_block_verification_never_accepts_fewer_than_rejection(shape: str):
    """Equal for one draft, and better on the whole for more (arXiv 2403.10444, theorem 2)."""
    gains = []
    for case in cases(shape, "with_replacement", 12):
        gains.append(output_law(case, BLOCK)[1] - output_law(case, REJECTION)[1])
        assert gains[-1] > -EQUAL_WITHIN
    assert max(gains) < EQUAL_WITHIN if shape == "chain of 1" else max(gains) > 1e-3


def block_probabilities(case: Case, tokens: Sequence[int]) -> list[float]:
    """Return h_1 .. h_K of block verification for drawn tokens, as the paper writes them (2.6 of its algorithm 2)."""
    reach, found = 1.0, []
    for at, token in enumerate(tokens):
        text = tuple(tokens[:at])
        reach = min(1.0, reach * float(case.target_laws[text][token] / case.draft_laws[text][token]))
        after = tuple(tokens[: at + 1])
        if at == len(tokens) - 1:
            found.append(reach)
            continue
        rest = float((reach * case.target_laws[after] - case.draft_laws[after]).clamp_min(0).sum())
        found.append(rest / (rest + 1 - reach) if rest + 1 - reach > 0 else 1.0)
    return found


def test_traversal_of_a_chain_is_block_verification():
    """The number of accepted drafts has the law of the paper's formula, for every drawn chain."""
    for case in cases("chain of 3", "with_replacement", 3):
        for tree, drawn in outcomes(lambda chance, case=case: draw_tree(case, chance)):
            expected, rest = [], 1.0
            for probability in reversed(block_probabilities(case, tree.tokens[1:])):
                expected.append(rest * probability)  # of accepting exactly this many: none deeper was
                rest *= 1 - probability
            expected = [rest, *reversed(expected)]
            found = [0.0] * 4
            walks = outcomes(
                lambda chance, case=case, tree=tree: traverse(
                    tree, LawChoices(tree, case.target_laws, chance).law, chance
                )
            )
            for (path, _), probability in walks:
                found[len(path) - 1] += probability
            assert found == pytest.approx(expected, abs=1e-9)
            assert drawn > 0


def test_without_replacement_accepts_more_than_with():
    """A sibling that can repeat an elder one is a wasted try."""
    gains = []
    for case in cases("three children", "with_replacement", 10):
        other = Case(case.parents, "without_replacement", case.target_laws, case.draft_laws)
        gains.append(output_law(other, REJECTION)[1] - output_law(case, REJECTION)[1])
        assert gains[-1] > -EQUAL_WITHIN
    assert max(gains) > 0.1


# --- typical acceptance ---------------------------------------------------------------------------------------------


def test_typical_acceptance_is_lossy_and_by_how_much():
    """The total variation on a toy law, worked by hand: a picked token of p=.5 is always emitted."""
    case = one_step([0.5, 0.3, 0.2], [1.0, 0.0, 0.0])
    assert not Acceptance("typical").lossless
    assert first_token(case, TYPICAL) == pytest.approx([1.0, 0.0, 0.0])
    assert error(case, TYPICAL) == pytest.approx(0.5)
    strict = rule_of(Acceptance("typical", epsilon=0.6, delta=10.0))
    assert first_token(case, strict) == pytest.approx([0.5, 0.3, 0.2])


def test_typical_acceptance_by_its_formula():
    """Accepted if p > min(epsilon, delta * exp(-H)): the flatter the law, the lower the bar."""
    for law, delta, wanted in (
        ([0.5, 0.3, 0.2], 0.3, True),
        ([0.4, 0.35, 0.25], 1.19, False),  # exp(-H) = 0.339, the bar is 0.404
        ([0.4, 0.35, 0.25], 1.17, True),  # the bar is 0.397
    ):
        entropy = -sum(share * math.log(share) for share in law)
        assert (law[0] > min(0.9, delta * math.exp(-entropy))) is wanted
        case = one_step(law, [1.0, 0.0, 0.0])
        accepted = output_law(case, rule_of(Acceptance("typical", epsilon=0.9, delta=delta)))[1]
        assert accepted == pytest.approx(float(wanted))


def test_typical_acceptance_takes_the_longest_path_then_the_likeliest():
    laws = {(): [0.3, 0.3, 0.4], (0,): [0.5, 0.5, 0.0], (1,): [0.2, 0.8, 0.0], (2,): [0.05, 0.95, 0.0]}
    laws |= {(0, 0): [1.0, 0.0, 0.0], (1, 1): [1.0, 0.0, 0.0]}
    tree = DraftTree((9, 2, 0, 1, 0, 1), (-1, 0, 0, 0, 2, 3))
    chance = HashedNoise(0).chance(())
    choices = LawChoices(tree, {text: as_law(law) for text, law in laws.items()}, chance)
    assert TYPICAL(tree, choices, chance) == ((0, 3, 5), 0)


@pytest.mark.parametrize(("field", "value"), [("epsilon", 0.0), ("epsilon", 1.5), ("delta", 0.0), ("delta", math.inf)])
def test_parameters_out_of_range_are_refused(field: str, value: float):
    with pytest.raises(InputError, match=rf"typical\.{field}="):
        Acceptance("typical", **{field: value})


# --- mistakes that others made, made on purpose -----------------------------------------------------------------------


def soft_ratio_for_picked_drafts(tree: DraftTree, choices: Any, chance: Chance, case: Case) -> Walk:
    """Top-k candidates tested with p / q as if they had been drawn (LC-03)."""
    texts = [tuple(tree.tokens[at] for at in tree.path_to(node)[1:]) for node in range(len(tree))]
    laws = torch.stack([case.draft_laws[text] for text in texts])
    return reject(DraftTree(tree.tokens, tree.parents, laws, tree.without_replacement), choices.law, chance)


def _reject(
    tree: DraftTree,
    law_at: Callable[[int], Tensor],
    chance: Chance,
    *,
    next_law: Callable[[Tensor, int], Tensor] = lambda law, drawn: law,
    final: Callable[[Tensor, Tensor], Tensor] = lambda residual, target: residual,
    draft_probs: Callable[[Tensor], Tensor] = lambda law: law,
    rest: Callable[[Tensor, Tensor], Tensor] = residual,
    strict: bool = True,
) -> Walk:
    """Rejection sampling with one of its steps exchanged."""
    assert tree.draft_probs is not None
    path = [0]
    while True:
        node = path[-1]
        raw = target_probs = law_at(node)
        law = draft_probs(tree.draft_probs[node])
        for child in tree.children[node]:
            token = tree.tokens[child]
            ratio = float(target_probs[token] / law[token]) if law[token] > 0 else math.inf
            if chance.happens(ratio) or (not strict and ratio == 0 and chance.happens(0.01)):
                path.append(child)
                break
            target_probs = rest(target_probs, law)
            law = next_law(law, token)
        else:
            return tuple(path), chance.draw(final(target_probs, raw))


def zeroed(law: Tensor, drawn: int) -> Tensor:
    law = law.clone()
    law[drawn] = 0
    return law / law.sum() if law.sum() > 0 else law


def only_zeroed(law: Tensor, drawn: int) -> Tensor:
    law = law.clone()
    law[drawn] = 0
    return law


def sharpened(law: Tensor) -> Tensor:
    return law**2 / (law**2).sum()


MISTAKES: dict[str, tuple[Siblings, str, Callable[..., Walk]]] = {
    "without replacement, law not renormalised": (
        "without_replacement", "three children",
        lambda tree, choices, chance: _reject(tree, choices.law, chance, next_law=only_zeroed),
    ),
    "without replacement, law unchanged": (
        "without_replacement", "two children",
        lambda tree, choices, chance: _reject(tree, choices.law, chance),
    ),
    "with replacement, law zeroed": (
        "with_replacement", "two children",
        lambda tree, choices, chance: _reject(tree, choices.law, chance, next_law=zeroed),
    ),
    "final token from the whole target law": (
        "with_replacement", "chain of 1",
        lambda tree, choices, chance: _reject(tree, choices.law, chance, final=lambda residual, target: target),
    ),
    "draft law is another than the one drawn from": (
        "with_replacement", "chain of 1",
        lambda tree, choices, chance: _reject(tree, choices.law, chance, draft_probs=sharpened),
    ),
    "residual of the squared difference": (
        "with_replacement", "chain of 1",
        lambda tree, choices, chance: _reject(
            tree, choices.law, chance, rest=lambda p, q: residual(p, q) ** 2 / (residual(p, q) ** 2).sum()
        ),
    ),
    "u <= ratio": (
        "with_replacement", "chain of 1",
        lambda tree, choices, chance: _reject(tree, choices.law, chance, strict=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_enumeration_sees_each_published_mistake(name: str):
    """Guards LC-01, LC-02, LC-12: each wrong rule bends the law of some case."""
    siblings, shape, rule = MISTAKES[name]
    errors = [error(case, rule) for case in cases(shape, siblings, 12)]
    assert max(errors) > 1e-3, f"{name}: {errors}"


def test_the_enumeration_sees_soft_ratios_for_picked_drafts():
    """Guards LC-03 and LC-12: the commonest confusion of all."""
    found = cases("two children", "fixed", 8)
    errors = [error(case, partial(soft_ratio_for_picked_drafts, case=case)) for case in found]
    assert max(errors) > 0.05


def test_the_enumeration_sees_a_dropped_draw():
    """Guards LC-12: a drawn chain that is cut where the draft was not sure of what it drew."""

    def cut(tree: DraftTree, choices: Any, chance: Chance) -> Walk:
        assert tree.draft_probs is not None
        unsure = len(tree) > 1 and float(tree.draft_probs[0, tree.tokens[1]]) < 0.3
        kept = DraftTree(tree.tokens[:1], tree.parents[:1], tree.draft_probs[:1]) if unsure else tree
        return reject(kept, choices.law, chance)

    assert max(error(case, cut) for case in cases("chain of 1", "with_replacement", 12)) > 1e-2


def test_the_enumeration_sees_a_wrong_denominator_in_block_verification(monkeypatch: pytest.MonkeyPatch):
    """Guards LC-12: a released implementation divides by the mass of the draft law in place of S + 1 - reach."""

    def wrong(tree: DraftTree, choices: Any, chance: Chance) -> Walk:
        assert tree.draft_probs is not None
        laws = tree.draft_probs

        def visit(path: tuple[int, ...], reach: float) -> Walk | None:
            node = path[-1]
            target_probs, draft_probs = choices.law(node), laws[node]
            for child in tree.children[node]:
                token = tree.tokens[child]
                walk = visit((*path, child), min(1.0, reach * float(target_probs[token] / draft_probs[token])))
                if walk is not None:
                    return walk
                rest = (reach * target_probs - draft_probs).clamp_min(0)
                reach, target_probs = float(rest.sum() / draft_probs.sum()), residual(reach * target_probs, draft_probs)
                target_probs = target_probs / target_probs.sum()
                draft_probs = next_draft_probs(tree, draft_probs, token)
            return (path, chance.draw(target_probs)) if node == 0 or chance.happens(reach) else None

        walk = visit((0,), 1.0)
        assert walk is not None
        return walk

    assert max(error(case, wrong) for case in cases("chain of 2", "without_replacement", 12)) > 1e-3


class FixedUniform:
    """Decisions with one number for u (LC-12)."""

    def __init__(self, chance: Chance, uniform: float) -> None:
        self._chance, self._uniform = chance, uniform

    def happens(self, probability: float) -> bool:
        return self._uniform < probability

    def draw(self, law: Tensor) -> int:
        return self._chance.draw(law)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_enumeration_sees_a_fixed_uniform(uniform: float):
    """Guards LC-12: all drafts accepted, or none but the certain ones."""
    rule: Rule = lambda tree, choices, chance: reject(tree, choices.law, FixedUniform(chance, uniform))  # noqa: E731
    assert max(error(case, rule) for case in cases("chain of 1", "with_replacement", 8)) > 0.05


# --- edges ----------------------------------------------------------------------------------------------------------


def test_a_residual_of_nothing_is_the_target_law():
    """Guards LC-08: equal laws leave no mass, and rounding never turns into NaN."""
    law = as_law([0.2, 0.3, 0.5])
    assert torch.equal(residual(law, law), law)
    tree = chain(0, [1], law.repeat(2, 1))

    class Unlucky:
        def happens(self, probability: float) -> bool:
            return False

        def draw(self, law: Tensor) -> int:
            assert law.isfinite().all()
            assert float(law.sum()) == pytest.approx(1)
            return int(law.argmax())

    for rule in (reject, traverse):
        assert rule(tree, lambda node: law, Unlucky()) == ((0,), 2)


def laws(**changed: Sequence[float]) -> Tensor:
    rows = [[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]
    for at, row in changed.items():
        rows[int(at[-1])] = list(row)
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (DraftTree((0, 2), (-1, 0), laws()), "token 2 under node 0 has draft probability 0"),
        (DraftTree((0, 1), (-1, 0), laws(row0=[0.5, math.nan, 0.5])), "node 0 is no law"),
        (DraftTree((0, 1), (-1, 0), laws(row0=[1.5, 0.5, -1.0])), "node 0 is no law"),
        (DraftTree((0, 1), (-1, 0), laws(row0=[0.5, 0.4, 0.0])), "sums to 0.9"),
        (DraftTree((0, 1), (-1, 0), laws()[:1]), r"shape \(1, 3\); give one law per node, \(2, 3\)"),
    ],
    ids=["impossible draft", "nan", "negative", "not normalised", "missing row"],
)
def test_draft_laws_that_cannot_be_true_are_refused(tree: DraftTree, said: str):
    """Guards LC-08 and LC-11: a draft of probability 0, NaN, or no law at all never reaches a division."""
    with pytest.raises(DrafterError, match=said):
        checked_draft_probs(tree, 3)


def test_draft_laws_are_normalised_in_double_precision_and_the_drafters_stay_as_they_are():
    given = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [math.nan] * 3], dtype=torch.float32)  # a leaf's row is never read
    checked = checked_draft_probs(DraftTree((0, 1), (-1, 0), given), 3)
    assert checked.dtype == torch.float64
    assert float(checked[0].sum()) == pytest.approx(1, abs=1e-15)
    doubled = given.double()
    checked_draft_probs(DraftTree((0, 1), (-1, 0), doubled), 3)
    assert torch.equal(doubled[0], given.double()[0])


def test_equal_siblings_need_independent_draws():
    """Guards TR-07: only draws with replacement can repeat themselves."""
    probs: Mapping[bool, Tensor] = {False: laws(), True: laws()}
    rows = torch.cat([probs[False], probs[False][:1]])
    DraftTree((0, 1, 1), (-1, 0, 0), rows)
    with pytest.raises(ValueError, match="same token"):
        DraftTree((0, 1, 1), (-1, 0, 0), rows, without_replacement=True)
