"""Several strategies in one tree: their drafts under one budget of nodes, the most promising ones by measured yield."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from specdec_lab.drafters.base import DraftContext, Drafter, Verification
from specdec_lab.errors import InputError
from specdec_lab.strategies import StrategyPlan, named_strategy
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, from_paths

PRIOR_ACCEPTED, PRIOR_ROUNDS = 0.5, 4.0
"""Before anything is measured, each depth is believed to be accepted half as often as the one above, as if four rounds
had shown it."""


MEMBERS: Mapping[str, Mapping[str, Any]] = {"ngram": {}, "lookahead": {}}
"""Members by default."""


class HybridDrafter(Drafter):
    """The union of several strategies' trees, pruned to the nodes that are worth their place.

    A node's value is how often its strategy's drafts were accepted at that depth in this sequence so far, shared among
    the strategy's nodes of that depth; a node that several strategies propose has their values added. The best nodes
    are taken. Values fall along every path, so that the choice is closed under ancestors.

    Args:
        members: strategies by the names of their files in ``conf/drafter/``, each with the parameters that differ.
        nodes: draft tokens of a tree.
        min_value: a node below this is left out even if there is room: it would cost more than it brings.
    """

    def __init__(
        self,
        target: Target,
        *,
        members: Mapping[str, Mapping[str, Any]] = MEMBERS,
        nodes: Annotated[int, Field(ge=1, le=512)] = 12,
        min_value: Annotated[float, Field(ge=0, lt=1)] = 0.06,
    ) -> None:
        plans = self._plans(members)
        super().__init__(target, max_nodes=nodes + 1)
        self.members = [plan.make(target) for plan in plans]
        self.nodes, self.min_value = nodes, min_value
        self.feature_layers = tuple(sorted({layer for member in self.members for layer in member.feature_layers}))
        self.lossless = all(member.lossless for member in self.members)

    @classmethod
    def check_parameters(cls, *, members: Mapping[str, Mapping[str, Any]], **others: Any) -> None:
        """Refuse unknown members and their wrong parameters."""
        cls._plans(members)

    @staticmethod
    def _plans(members: Mapping[str, Mapping[str, Any]]) -> list[StrategyPlan]:
        if not members:
            raise InputError("members", members, "name at least one strategy, as {ngram: {}, lookahead: {}}")
        if "hybrid" in members:
            raise InputError("members", "hybrid", "a hybrid cannot hold itself; name other strategies")
        plans = [named_strategy(name, changes or {}, f"members.{name}") for name, changes in members.items()]
        for plan in plans:
            if plan.drafter_class.draws:  # what was drawn must not be pruned by what was measured
                raise InputError("members", plan.name, "this strategy can draw its drafts at random; give others")
        return plans

    def allocate(self, rows: int, tokens: int) -> None:
        """Make room for every member."""
        for member in self.members:
            member.allocate(rows, tokens)

    def memory_bytes(self) -> dict[str, int]:
        """Return the members' bytes, added up."""
        held = [member.memory_bytes() for member in self.members]
        return {name: sum(one[name] for one in held) for name in held[0]}

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the best nodes of all members' trees."""
        return self.propose_batch([context])[0]

    def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """Ask each member for all rows at once, so that one that runs a network runs it once."""
        memories: list[_Memory] = []
        for context in contexts:
            if context.state is None:
                context.state = _Memory([_Yield() for _ in self.members], [None] * len(self.members))
            context.state.learn(context.verification)
            memories.append(context.state)
        offered: list[list[DraftTree]] = [[] for _ in contexts]
        for at, member in enumerate(self.members):
            own = [
                replace(context, state=memory.states[at]) for context, memory in zip(contexts, memories, strict=True)
            ]
            trees = member.propose_batch(own)
            for row, (tree, view) in enumerate(zip(trees, own, strict=True)):
                memories[row].states[at] = view.state
                offered[row].append(tree)
        return [self._union(memory, trees) for memory, trees in zip(memories, offered, strict=True)]

    def _union(self, memory: _Memory, trees: Sequence[DraftTree]) -> DraftTree:
        memory.trees = list(trees)
        values: dict[tuple[int, ...], float] = {}
        for record, tree in zip(memory.yields, trees, strict=True):
            texts = path_texts(tree)
            widths = [tree.depths.count(depth) for depth in range(tree.depth + 1)]
            for node in range(1, len(tree)):
                depth = tree.depths[node]
                value = record.joint(depth) / widths[depth]
                values[texts[node]] = values.get(texts[node], 0.0) + value
        for text in sorted(values, key=len):  # two members can agree on a child and not on its parent's other children
            if len(text) > 1:
                values[text] = min(values[text], values[text[:-1]])
        ranked = sorted((text for text in values if values[text] >= self.min_value), key=lambda t: (-values[t], len(t)))
        return from_paths(trees[0].tokens[0], ranked[: self.nodes])  # the best first, parents before children


def path_texts(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the tokens from below the root to each node, ``[nodes]``."""
    texts: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        texts.append((*texts[tree.parents[node]], tree.tokens[node]))
    return texts


@dataclass
class _Yield:
    """How deep a strategy's drafts of one sequence were right."""

    offered: dict[int, float] = field(default_factory=dict)
    right: dict[int, float] = field(default_factory=dict)

    def joint(self, depth: int) -> float:
        """Return the estimated share of rounds in which a draft at this depth is right, given that one is offered."""
        prior = PRIOR_ACCEPTED**depth
        return (self.right.get(depth, 0.0) + PRIOR_ROUNDS * prior) / (self.offered.get(depth, 0.0) + PRIOR_ROUNDS)

    def learn(self, tree: DraftTree, text: Sequence[int]) -> None:
        """Compare a tree with the tokens that came."""
        node, reached = 0, 0
        for token in text:
            node = next((child for child in tree.children[node] if tree.tokens[child] == token), -1)
            if node < 0:
                break
            reached += 1
        for depth in range(1, min(tree.depth, len(text)) + 1):  # deeper, nobody knows what would have come
            self.offered[depth] = self.offered.get(depth, 0.0) + 1
            self.right[depth] = self.right.get(depth, 0.0) + (reached >= depth)


@dataclass
class _Memory:
    """What is known of one sequence: each member's yield, state and last tree."""

    yields: list[_Yield]
    states: list[Any]
    trees: list[DraftTree] = field(default_factory=list)

    def learn(self, message: Verification) -> None:
        """Credit each member with what its last tree had right, offered by the union or not."""
        for record, tree in zip(self.yields, self.trees, strict=False):
            record.learn(tree, message.new_tokens)
