"""The output law of an acceptance rule on small random trees and laws, exactly."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from specdec_lab.audit.enumeration import Law, as_law, outcomes, total_variation
from specdec_lab.choices import processed
from specdec_lab.noise import Chance
from specdec_lab.sampling import SamplingParams
from specdec_lab.tree import DraftTree
from specdec_lab.verify import Acceptance, TargetChoices, Walk, accept

Siblings = Literal["fixed", "with_replacement", "without_replacement"]

VOCAB = 3

SHAPES: Mapping[str, tuple[int, ...]] = {
    "root": (-1,),
    "chain of 1": (-1, 0),
    "chain of 2": (-1, 0, 1),
    "chain of 3": (-1, 0, 1, 2),
    "two children": (-1, 0, 0),
    "three children": (-1, 0, 0, 0),
    "two chains": (-1, 0, 0, 1, 2),
    "lopsided": (-1, 0, 0, 1, 1),
    "second child goes on": (-1, 0, 0, 2, 2),
}
"""Parents of the trees that are enumerated."""

WARPERS = (
    SamplingParams(0.7),
    SamplingParams(1.0, top_k=2),
    SamplingParams(1.0, top_p=0.8),
    SamplingParams(1.3, min_p=0.4),
    SamplingParams(0.6, top_k=2, top_p=0.9, min_p=0.05),
)


@dataclass(frozen=True)
class Case:
    """One tree shape with the laws of target and draft after every text, ``{text: [vocab]}``."""

    parents: tuple[int, ...]
    siblings: Siblings
    target_laws: Mapping[tuple[int, ...], Tensor]
    draft_laws: Mapping[tuple[int, ...], Tensor]

    @cached_property
    def length(self) -> int:
        """Tokens of the texts whose law is compared: one more than the tree is deep."""
        return 1 + DraftTree(tuple(range(len(self.parents))), self.parents).depth

    @cached_property
    def target_law(self) -> Law:
        """The law of plain decoding."""
        law = {(): 1.0}
        for _ in range(self.length):
            law = {
                (*text, token): mass * float(self.target_laws[text][token])
                for text, mass in law.items()
                for token in range(VOCAB)
            }
        return law


def random_law(rng: random.Random) -> Tensor:
    """Return a law of 3 tokens: spread out, with zeros, on one token, or as the target's warpers leave it."""
    kind = rng.randrange(8)
    if kind == 0:
        chosen = rng.randrange(VOCAB)
        return as_law([float(token == chosen) for token in range(VOCAB)])
    if kind == 1:
        weights = [rng.random(), rng.random(), 0.0]
        rng.shuffle(weights)
        return as_law(weights)
    if kind in (2, 3):
        logits = torch.tensor([[rng.gauss(0, 1.5) for _ in range(VOCAB)]])
        warped = processed(logits, torch.zeros(1, 0, dtype=torch.long), rng.choice(WARPERS).warpers())
        return warped[0].double().softmax(dim=-1)
    return as_law([rng.expovariate(1) for _ in range(VOCAB)])


def random_case(rng: random.Random, parents: tuple[int, ...], siblings: Siblings) -> Case:
    """Return laws after every text that a tree can hold; now and then both laws are equal."""
    case = Case(parents, siblings, {}, {})
    texts = [text for length in range(case.length + 1) for text in product(range(VOCAB), repeat=length)]
    target_laws = {text: random_law(rng) for text in texts}
    draft_laws = {text: law if rng.random() < 0.15 else random_law(rng) for text, law in target_laws.items()}
    return Case(parents, siblings, target_laws, draft_laws)


def draw_tree(case: Case, chance: Chance) -> DraftTree:
    """Draw the tokens of a case's tree; fixed siblings are the most likely ones, as a top-k drafter takes them.

    A node whose law has no token left is not drawn, nor what would hang from it.
    """
    tokens, parents, place = [0], [-1], {0: 0}
    texts: list[tuple[int, ...]] = [()]
    drawn: dict[int, list[int]] = defaultdict(list)
    for node, old_parent in enumerate(case.parents[1:], start=1):
        if old_parent not in place:
            continue
        parent = place[old_parent]
        law = case.draft_laws[texts[parent]].clone()
        if case.siblings != "with_replacement":
            law[drawn[parent]] = 0
        if not float(law.sum()) > 0:
            continue
        token = int(law.argmax()) if case.siblings == "fixed" else chance.draw(law)
        drawn[parent].append(token)
        place[node] = len(tokens)
        tokens.append(token)
        parents.append(parent)
        texts.append((*texts[parent], token))
    probs = None
    if case.siblings != "fixed":
        probs = torch.stack([case.draft_laws[text] for text in texts])
    return DraftTree(tuple(tokens), tuple(parents), probs, case.siblings == "without_replacement")


class LawChoices:
    """A target whose laws are written down."""

    def __init__(self, tree: DraftTree, laws: Mapping[tuple[int, ...], Tensor], chance: Chance) -> None:
        self._tree, self._laws, self._chance = tree, laws, chance
        self._tokens: dict[int, int] = {}

    def law(self, node: int) -> Tensor:
        """Return the law after the node's path."""
        return self._laws[self._tree.drafts_to(node)]

    def token(self, node: int) -> int:
        """Draw the target's own token after a node, once."""
        if node not in self._tokens:
            self._tokens[node] = self._chance.draw(self.law(node))
        return self._tokens[node]


Rule = Callable[[DraftTree, TargetChoices, Chance], Walk]


def rule_of(acceptance: Acceptance) -> Rule:
    """Return the rule that decoding applies."""
    return lambda tree, choices, chance: accept(tree, choices, chance, acceptance, greedy=False)


def output_law(case: Case, rule: Rule) -> tuple[Law, float]:
    """Return the law of the next tokens under a rule, and the expected number of accepted drafts.

    Tokens that a round does not reach come from later rounds, whose law is the target's.
    """
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    accepted = 0.0

    def run(chance: Chance) -> tuple[int, ...]:
        tree = draw_tree(case, chance)
        path, token = rule(tree, LawChoices(tree, case.target_laws, chance), chance)
        return (*(tree.tokens[node] for node in path[1:]), token)

    for text, probability in outcomes(run):
        texts[text] += probability
        accepted += probability * (len(text) - 1)
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for text, mass in texts.items():
        rest = {text: mass}
        while len(next(iter(rest))) < case.length:
            rest = {
                (*begun, token): share * float(case.target_laws[begun][token])
                for begun, share in rest.items()
                for token in range(VOCAB)
            }
        for whole, share in rest.items():
            law[whole] += share
    return law, accepted


def largest_error(rule: Rule, siblings: Siblings, rng: random.Random, cases_per_shape: int) -> tuple[int, float]:
    """Enumerate a rule on random cases of every shape.

    Returns:
        How many laws were compared, and the largest total variation from the target's.
    """
    cases = [random_case(rng, parents, siblings) for parents in SHAPES.values() for _ in range(cases_per_shape)]
    return len(cases), max(total_variation(output_law(case, rule)[0], case.target_law) for case in cases)
