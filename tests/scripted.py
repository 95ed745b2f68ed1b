"""Drafters whose trees are known beforehand, so that a test can say what must come of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch

from specdec_lab.drafters.base import DraftContext, Drafter, Randomness, Verification
from specdec_lab.noise import HashedNoise
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, chain, from_paths, root_only

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""Full token lists (prompt and greedy answer) by prompt."""


def context_of(tokens: Sequence[int], max_depth: int = 99) -> DraftContext:
    """Return the context of a sequence that has just been prefilled; greedy."""
    message = Verification(0, True, root_only(tokens[0]), (0,), tokens[-1], torch.zeros(1, 128), {})
    randomness = Randomness(SamplingParams(), "rejection", HashedNoise(0), ())
    return DraftContext(0, 0, list(tokens), max(1, len(tokens) - 1), message, max_depth, randomness)


def told(context: DraftContext, tree: DraftTree, path: Sequence[int], next_token: int, logits: torch.Tensor) -> None:
    """Let the target have accepted a path of a tree, and added a token."""
    context.tokens += [*(tree.tokens[node] for node in path[1:]), next_token]
    context.verification = Verification(0, False, tree, tuple(path), next_token, logits, {})


class ScriptedDrafter(Drafter):
    """Proposes whatever a function of the context returns, and remembers every message it was given."""

    def __init__(
        self,
        target: Target,
        script: Callable[[DraftContext], DraftTree],
        *,
        max_nodes: int = 64,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        super().__init__(target, max_nodes=max_nodes)
        self.feature_layers = feature_layers
        self.script = script
        self.messages: list[Verification] = []
        self.depths: list[int] = []

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the script's tree."""
        self.messages.append(context.verification)
        self.depths.append(context.max_depth)
        return self.script(context)


class PathsDrafter(Drafter):
    """Proposes the same continuations each round, cut to the depth that is left."""

    def __init__(self, target: Target, paths: Sequence[Sequence[int]]) -> None:
        super().__init__(target, max_nodes=64)
        self.paths = paths

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the paths as one tree."""
        return from_paths(context.tokens[-1], [path[: context.max_depth] for path in self.paths])


class FutureDrafter(Drafter):
    """Drafts the target's own greedy continuation: each draft must be accepted."""

    def __init__(self, target: Target, answers: Answers, k: int) -> None:
        super().__init__(target, max_nodes=k + 1)
        self.answers, self.k = answers, k

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the next tokens of the known answer as a chain."""
        text = self.answers[tuple(context.tokens[: context.prompt_length])]
        at = len(context.tokens)
        return chain(context.tokens[-1], text[at : at + min(self.k, context.max_depth)])


class DrawingDrafter(Drafter):
    """Draws the tokens of a fixed tree shape from laws that depend on the last token alone."""

    draws = True

    def __init__(
        self,
        target: Target,
        laws: Mapping[int, Sequence[float]],
        parents: Sequence[int],
        *,
        without_replacement: bool = False,
    ) -> None:
        super().__init__(target, max_nodes=len(parents))
        self.parents, self.without_replacement = parents, without_replacement
        self.laws = torch.zeros(target.vocab_size, target.vocab_size, dtype=torch.float64)
        self.laws[:, 0] = 1
        for token, law in laws.items():
            self.laws[token, 0] = 0
            self.laws[token, : len(law)] = torch.tensor(law, dtype=torch.float64)

    def propose(self, context: DraftContext) -> DraftTree:
        """Return a tree cut to the depth that is left; a node that nothing is left for is not drawn."""
        chance = context.chance()
        tokens, parents, depths, place = [context.tokens[-1]], [-1], [0], {0: 0}
        rest = {0: self.laws[tokens[0]].clone()}
        for node, old_parent in enumerate(self.parents[1:], start=1):
            parent = place.get(old_parent, -1)
            if parent < 0 or depths[parent] == context.max_depth or not float(rest[parent].sum()) > 0:
                continue
            token = chance.draw(rest[parent])
            if self.without_replacement:
                rest[parent][token] = 0
            place[node] = len(tokens)
            rest[len(tokens)] = self.laws[token].clone()
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return DraftTree(tuple(tokens), tuple(parents), self.laws[tokens], self.without_replacement)


class CoupledDrafter(Drafter):
    """Draws a chain from laws that depend on the last token alone, with the noise that the target will use."""

    draws = True

    def __init__(self, target: Target, laws: Mapping[int, Sequence[float]], k: int) -> None:
        super().__init__(target, max_nodes=k + 1)
        self.laws, self.k = laws, k

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the maxima of log-probabilities plus shared noise."""
        drafts: list[int] = []
        for depth in range(1, min(self.k, context.max_depth) + 1):
            law = torch.zeros(self.target.vocab_size)
            known = self.laws[drafts[-1] if drafts else context.tokens[-1]]
            law[: len(known)] = torch.tensor(known)
            drafts.append(int((law.log() + context.shared_noise(depth, self.target.vocab_size)).argmax()))
        return chain(context.tokens[-1], drafts)


class RandomTreeDrafter(Drafter):
    """Grows random trees in which about two nodes in three carry the right token, so that paths are scattered."""

    def __init__(self, target: Target, answers: Answers, *, max_nodes: int = 12, seed: int = 0) -> None:
        super().__init__(target, max_nodes=max_nodes)
        self.answers, self.rng = answers, random.Random(seed)

    def propose(self, context: DraftContext) -> DraftTree:
        """Return a tree of 1 to ``max_nodes`` nodes."""
        text = self.answers.get(tuple(context.tokens[: context.prompt_length]), ())
        at = len(context.tokens)

        def token(depth: int) -> int:
            known = at + depth < len(text) and self.rng.random() < 0.67
            return text[at + depth] if known else self.rng.randrange(self.target.vocab_size)

        return random_tree(self.rng, context.tokens[-1], self.rng.randint(1, self.max_nodes), token, context.max_depth)


def random_tree(
    rng: random.Random, root: int, nodes: int, token: Callable[[int], int], max_depth: int = 64
) -> DraftTree:
    """Return a tree of at most ``nodes`` nodes; ``token(depth)`` draws a child's token from its parent's depth."""
    tokens, parents, depths = [root], [-1], [0]
    for _ in range(1, nodes):
        parent = rng.randrange(len(tokens))
        child = token(depths[parent])
        if depths[parent] < max_depth and (parent, child) not in zip(parents, tokens, strict=True):
            tokens.append(child)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents))
