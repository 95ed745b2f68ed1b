"""The acceptance rules: which drafts are kept, and the token that the target adds after them.

Each rule is a function of a tree, the target's choices at its nodes and a source of chance, so that the law of its
output can be enumerated exactly (``specdec_lab.audit``). ``follow`` is the walk of every deterministic tree; the others
are for drafts that were drawn at random, and ``typical`` is lossy. Names: ``target_probs`` is the target's law after
all processors, ``draft_probs`` the law that a draft was really drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from specdec_lab.errors import DrafterError, InputError
from specdec_lab.noise import Chance
from specdec_lab.tree import DraftTree

RuleName = Literal["rejection", "block", "coupled", "typical"]

Walk = tuple[tuple[int, ...], int]
"""Accepted nodes from the root downwards, root included, and the token that the target adds after the last of them."""

LAW_RULES: tuple[RuleName, ...] = ("rejection", "block")
"""Rules that accept drawn drafts by their law: they need ``draft_probs``, and share no more than the law with plain
decoding."""

NORMALISED_WITHIN = 1e-3
"""How far the sum of a draft law may be from 1: softmax in bfloat16 over 150 k tokens is off by less."""


class TargetChoices(Protocol):
    """What a rule asks the target; see ``specdec_lab.choices.Choices``."""

    def token(self, node: int) -> int:
        """Return the target's own token after a node."""
        ...

    def law(self, node: int) -> Tensor:
        """Return the target's probabilities after a node, ``[vocab]`` float64."""
        ...


@dataclass(frozen=True)
class Acceptance:
    """How drafts are accepted.

    Attributes:
        rule: for drafts drawn at random ``rejection`` (token by token), ``block`` (whole paths, never accepts fewer) or
            ``coupled`` (drafts drawn with the target's own noise). Deterministic trees are walked by the target's own
            tokens under each of the three. ``typical`` is for any tree, and lossy.
        epsilon: of ``typical``: a draft at least this probable is accepted.
        delta: of ``typical``: one is accepted too whose probability exceeds delta * exp(-entropy).

    Raises:
        InputError: a parameter outside its range.
    """

    rule: RuleName = "rejection"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if self.rule not in get_args(RuleName):
            raise InputError("acceptance", self.rule, f"choose from {', '.join(get_args(RuleName))}")
        if not 0 < self.epsilon <= 1:
            raise InputError("typical.epsilon", self.epsilon, "give a number above 0 and at most 1")
        if not 0 < self.delta < float("inf"):
            raise InputError("typical.delta", self.delta, "give a finite number above 0")

    @property
    def lossless(self) -> bool:
        """Whether the output law stays that of the target."""
        return self.rule != "typical"


REJECTION = Acceptance()


def accept(tree: DraftTree, choices: TargetChoices, chance: Chance, acceptance: Acceptance, greedy: bool) -> Walk:
    """Apply the rule that fits a tree.

    Greedy decoding needs no chance: a one-hot law accepts exactly the child that carries the maximum, whatever law the
    child was drawn from, so that ``follow`` equals every rule there, the lossy one included.
    """
    if acceptance.rule == "typical" and not greedy:
        return typical(tree, choices, acceptance)
    if tree.draft_probs is None or greedy:
        return follow(tree, choices.token)
    if acceptance.rule == "block":
        return traverse(tree, choices.law, chance)
    return reject(tree, choices.law, chance)


def follow(tree: DraftTree, token_at: Callable[[int], int]) -> Walk:
    """Walk from the root to the child that carries the target's own token, until no child does.

    Lossless for any tree, greedy or sampled: the tokens along the walk are the target's own (SpecInfer,
    arXiv 2305.09781, naive sampling; with drafts from the same noise, arXiv 2408.07978). For deterministic children no
    lossless rule accepts more. The token after the path comes from its last node, the deepest that was accepted.

    Args:
        token_at: the target's token after a node; asked once per visited node, in order.
    """
    path = [0]
    while True:
        token = token_at(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return tuple(path), token
        path.append(child)


def reject(tree: DraftTree, law_at: Callable[[int], Tensor], chance: Chance) -> Walk:
    """Try siblings in the order in which they were drawn, each with ratio target_probs / draft_probs.

    A chain is speculative sampling (arXiv 2211.17192, algorithm 1; arXiv 2302.01318). Siblings drawn with replacement
    are the multi-step sampling of SpecInfer (arXiv 2305.09781, algorithm 2). Without replacement the draft law loses
    each tried token and is renormalised (arXiv 2402.12374, algorithm 2, and EAGLE-1). Lossless in each case.
    """
    assert tree.draft_probs is not None
    path = [0]
    while True:
        node = path[-1]
        target_probs = law_at(node)
        draft_probs = tree.draft_probs[node]
        for child in tree.children[node]:
            token = tree.tokens[child]
            if chance.happens(float(target_probs[token] / draft_probs[token])):
                path.append(child)
                break
            target_probs = residual(target_probs, draft_probs)
            draft_probs = next_draft_probs(tree, draft_probs, token)
        else:
            return tuple(path), chance.draw(target_probs)


def traverse(tree: DraftTree, law_at: Callable[[int], Tensor], chance: Chance) -> Walk:
    """Try whole paths, from the leaves upwards, the first child's subtree first.

    On a chain this is block verification (arXiv 2403.10444, algorithm 2), which no lossless rule beats there; on a tree
    traversal verification (arXiv 2505.12398, algorithm 1). ``reach`` is the probability with which the path down to a
    node is still to be accepted; a rejected subtree changes it to S / (S + 1 - reach), where S is the mass of the
    residual max(reach * target_probs - draft_probs, 0). Deviation: the paper draws siblings without replacement; with
    replacement the draft law simply stays as it is, and the enumeration shows that rule lossless too.
    """
    draft_laws = tree.draft_probs
    assert draft_laws is not None

    def visit(path: tuple[int, ...], reach: float) -> Walk | None:
        node = path[-1]
        target_probs, draft_probs = law_at(node), draft_laws[node]
        for child in tree.children[node]:
            token = tree.tokens[child]
            walk = visit((*path, child), min(1.0, reach * float(target_probs[token] / draft_probs[token])))
            if walk is not None:
                return walk
            rest = (reach * target_probs - draft_probs).clamp_min(0)
            mass = float(rest.sum())
            if mass > 0:
                target_probs = rest / mass
            if mass + 1 - reach > 0:  # 0 only where both laws are equal and the path was certain
                reach = mass / (mass + 1 - reach)
            draft_probs = next_draft_probs(tree, draft_probs, token)
        if node == 0 or chance.happens(reach):
            return path, chance.draw(target_probs)
        return None

    walk = visit((0,), 1.0)
    assert walk is not None
    return walk


def typical(tree: DraftTree, choices: TargetChoices, acceptance: Acceptance) -> Walk:
    """Accept every draft that is probable enough; the longest path wins, of equally long ones the most probable.

    LOSSY. Medusa (arXiv 2401.10774, section 2.3.1): accepted if p > min(epsilon, delta * exp(-H(p))) under the target's
    law there. Deviations: the law is the processed one, and the token after the path is the target's own, drawn with
    the noise of its position, where Medusa's released loop takes the most likely.
    """
    accepted, log_probability = {0: 0}, {0: 0.0}  # {node: length of the path}
    for node in range(len(tree)):
        if node not in accepted or not tree.children[node]:
            continue
        target_probs = choices.law(node)
        entropy = float(torch.special.entr(target_probs).sum())  # in nats
        bar = min(acceptance.epsilon, acceptance.delta * float(torch.tensor(-entropy).exp()))
        for child in tree.children[node]:
            probability = float(target_probs[tree.tokens[child]])
            if probability > bar:
                accepted[child] = accepted[node] + 1
                log_probability[child] = log_probability[node] + float(torch.tensor(probability).log())
    best = max(accepted, key=lambda node: (accepted[node], log_probability[node], -node))
    return tree.path_to(best), choices.token(best)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return norm(max(target_probs - draft_probs, 0)), ``[vocab]``; target_probs where nothing is left of it.

    Nothing is left where both laws are equal up to rounding; then the draft was rejected with probability 0.
    """
    rest = (target_probs - draft_probs).clamp_min(0)
    mass = float(rest.sum())
    return rest / mass if mass > 0 else target_probs


def next_draft_probs(tree: DraftTree, draft_probs: Tensor, drawn: int) -> Tensor:
    """Return the law of the next sibling after one was drawn: the same with replacement, else without that token."""
    if not tree.without_replacement:
        return draft_probs
    rest = draft_probs.clone()
    rest[drawn] = 0
    mass = rest.sum()
    return rest / mass if mass > 0 else rest


def checked_draft_probs(tree: DraftTree, vocab_size: int) -> Tensor:
    """Return a tree's draft laws as float64 on the CPU, normalised.

    Raises:
        DrafterError: a law is missing, is none, or could not have drawn its children.
    """
    assert tree.draft_probs is not None
    if tuple(tree.draft_probs.shape) != (len(tree), vocab_size):
        shape = tuple(tree.draft_probs.shape)
        raise DrafterError(f"draft_probs has shape {shape}; give one law per node, {(len(tree), vocab_size)}")
    laws = tree.draft_probs.to("cpu", torch.float64, copy=True)  # the drafter's own tensor stays as it is
    for node, children in enumerate(tree.children):
        if not children:
            continue
        mass = float(laws[node].sum())
        if not abs(mass - 1) <= NORMALISED_WITHIN or not bool((laws[node] >= 0).all()):  # NaN fails the first
            raise DrafterError(f"draft_probs of node {node} is no law: it sums to {mass:g}, or has negative entries")
        laws[node] /= mass
        tokens = [tree.tokens[child] for child in children]
        for token in tokens:
            if not laws[node, token] > 0:
                raise DrafterError(
                    f"token {token} under node {node} has draft probability 0; it cannot have been drawn"
                )
        if tree.without_replacement and len(set(tokens)) < len(tokens):
            raise DrafterError(f"node {node} drew a token twice without replacement: {tokens}")
    return laws
