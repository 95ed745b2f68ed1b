"""Drafters whose trees are known beforehand, so that a test can say what must come of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from specdec_lab.drafters.base import DraftContext, Drafter, Verification
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, chain, from_paths

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""Full token lists (prompt and greedy answer) by prompt."""


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
