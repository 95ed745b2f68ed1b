"""Several strategies in one tree: their drafts under one budget of nodes, the most promising ones by measured yield."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from specdec_lab.cost import VerifyCost
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import DraftContext, Drafter, Verification
from specdec_lab.drafters.sized import SizedDrafter
from specdec_lab.errors import InputError
from specdec_lab.strategies import StrategyPlan, named_strategy
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, from_paths

Key = TypeVar("Key")

PRIOR_ACCEPTED, PRIOR_ROUNDS = 0.5, 4.0
"""Before anything is measured, each depth is believed to be accepted half as often as the one above, as if four rounds
had shown it."""


MEMBERS = ["ngram", "lookahead"]
"""Members by default."""


class HybridDrafter(SizedDrafter):
    """The union of several strategies' trees, pruned to the nodes that are worth their place.

    A node's value is the confidence that its strategy states, corrected by how right the strategy was in this sequence;
    where it states none, how often its drafts were right at that depth and that place in its tree. A node that
    several strategies propose has their values added. The best nodes are taken, as many as the time of a verify forward
    makes worth while: the number with the most expected tokens per time. Values fall along every path, so that the
    choice is closed under ancestors.

    Args:
        members: strategies, by the names of their files in ``conf/drafter/``.
        settings: parameters of members that differ from their files, ``{ngram: {k: 4}}``.
        nodes: most draft tokens of a tree.
        verify_ms: milliseconds of a verify forward by its nodes, ``{1: 35, 8: 40, 16: 50}``; ``None`` measures them on
            the target once, when the first cache is there.
    """

    def __init__(
        self,
        target: Target,
        *,
        members: list[str] = MEMBERS,
        settings: dict[str, dict[str, Any]] | None = None,
        nodes: Annotated[int, Field(ge=1, le=512)] = 16,
        verify_ms: Mapping[int, float] | None = None,
    ) -> None:
        plans = self._plans(members, settings)
        super().__init__(target, max_nodes=nodes + 1, verify_ms=verify_ms)
        self.members = [plan.make(target) for plan in plans]
        self._size_members()
        self.draft_share = drafting_share(self.members)
        self.nodes = nodes
        self.feature_layers = tuple(sorted({layer for member in self.members for layer in member.feature_layers}))
        self.lossless = all(member.lossless for member in self.members)
        self.training_tokens = trained_on(self.members)

    @classmethod
    def check_parameters(
        cls,
        *,
        members: Sequence[str],
        settings: Mapping[str, Mapping[str, Any]] | None,
        verify_ms: Mapping[int, float] | None,
        **others: Any,
    ) -> None:
        """Refuse unknown members, their wrong parameters, and times that cannot be."""
        cls._plans(members, settings)
        super().check_parameters(verify_ms=verify_ms)

    @staticmethod
    def _plans(members: Sequence[str], settings: Mapping[str, Mapping[str, Any]] | None) -> list[StrategyPlan]:
        if not members:
            raise InputError("members", list(members), "name at least one strategy, as [ngram,lookahead]")
        if "hybrid" in members:
            raise InputError("members", "hybrid", "a hybrid cannot hold itself; name other strategies")
        for name in members:
            if list(members).count(name) > 1:
                raise InputError("members", name, "this strategy is in the list twice; name it once")
        for name in settings or {}:
            if name not in members:
                raise InputError("settings", name, f"this is none of the members, which are {', '.join(members)}")
        changes = settings or {}
        plans = [named_strategy(name, changes.get(name, {}), f"settings.{name}", "members") for name in members]
        for plan in plans:
            if issubclass(plan.drafter_class, HybridDrafter):
                raise InputError("members", plan.name, "a hybrid cannot hold another; name its members")
            if plan.drafter_class is AutoregressiveDrafter:
                raise InputError("members", plan.name, "the baseline drafts nothing; leave it out")
            if plan.drafter_class.draws:  # what was drawn must not be pruned by what was measured
                raise InputError("members", plan.name, "this strategy can draw its drafts at random; give others")
        return plans

    def allocate(self, rows: int, tokens: int) -> None:
        """Make room for every member; what is measured on the target serves them too."""
        super().allocate(rows, tokens)
        for member in self.members:
            member.allocate(rows, tokens)

    def size_by(self, cost: VerifyCost | None) -> None:
        """Take measured times, for the members too."""
        super().size_by(cost)
        self._size_members()

    def _size_members(self) -> None:
        for member in self.members:
            if isinstance(member, SizedDrafter):
                member.size_by(self.verify_cost)

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
            for text, value in zip(path_texts(tree)[1:], record.values(tree)[1:], strict=True):
                values[text] = values.get(text, 0.0) + value
        for text in sorted(values, key=len):  # two members can agree on a child and not on its parent's other children
            values[text] = min(values[text], values[text[:-1]] if len(text) > 1 else 1.0)
        ranked = sorted(values, key=lambda text: (-values[text], len(text)))[: self.nodes]
        cost = self.verify_cost
        worth = len(ranked) if cost is None else cost.worth([values[text] for text in ranked], self.draft_share)
        return from_paths(trees[0].tokens[0], ranked[:worth], confidences=_along(ranked[:worth], values))


def drafting_share(members: Sequence[Drafter]) -> float:
    """Return the time of all members' drafting over that of a forward of one node; lookups take none."""
    return sum(member.draft_share for member in members if isinstance(member, SizedDrafter))


def trained_on(members: Sequence[Drafter]) -> int | None:
    """Return the labels that all members with weights were trained on; ``None`` without any, or where one is silent."""
    stated = [member.training_tokens for member in members if member.memory_bytes()["draft_weights"]]
    known = [labels for labels in stated if labels is not None]
    return sum(known) if known and len(known) == len(stated) else None


def _along(paths: Sequence[tuple[int, ...]], values: Mapping[tuple[int, ...], float]) -> list[list[float]]:
    return [[values[path[: end + 1]] for end in range(len(path))] for path in paths]


def path_texts(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the tokens from below the root to each node, ``[nodes]``."""
    texts: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        texts.append((*texts[tree.parents[node]], tree.tokens[node]))
    return texts


Place = tuple[int, int, int]
"""A node's depth, how many nodes of that depth stand before it, and how many there are."""


@dataclass
class _Shares(Generic[Key]):
    """How often something was right, of how often it was offered."""

    offered: Counter[Key] = field(default_factory=Counter)
    right: Counter[Key] = field(default_factory=Counter)

    def count(self, key: Key, right: bool) -> None:
        """Count one offer."""
        self.offered[key] += 1
        self.right[key] += right

    def share(self, key: Key, prior: float) -> float:
        """Return the estimated share, which is ``prior`` where nothing is known."""
        return (self.right[key] + PRIOR_ROUNDS * prior) / (self.offered[key] + PRIOR_ROUNDS)


@dataclass
class _Yield:
    """How often a strategy's drafts of one sequence were right, by depth and by place there, and what it believed."""

    depths: _Shares[int] = field(default_factory=_Shares[int])
    places: _Shares[Place] = field(default_factory=_Shares[Place])
    believed: float = 0.0
    surely: float = 0.0

    def joint(self, depth: int, place: int, width: int) -> float:
        """Return the estimated share of rounds in which the draft at this depth and place is right.

        Where little is known of the place, it has its share of the depth, and the depth that of ``PRIOR_ACCEPTED``.

        Args:
            depth: from 1.
            place: among the drafts at that depth, from 0: strategies list their best guesses first.
            width: how many drafts there are at that depth.
        """
        at_depth = self.depths.share(depth, PRIOR_ACCEPTED**depth)
        return self.places.share((depth, place, width), at_depth / width)

    def values(self, tree: DraftTree) -> list[float]:
        """Return what each node is worth: the probability that the target's text runs through it, ``[nodes]``."""
        if tree.confidence is not None:
            correction = (self.surely + PRIOR_ROUNDS / 2) / (self.believed + PRIOR_ROUNDS / 2)
            return [min(1.0, value * correction) for value in tree.confidence]
        return [self.joint(*place) if place[0] else 1.0 for place in places(tree)]

    def learn(self, tree: DraftTree, text: Sequence[int]) -> None:
        """Compare a tree with the tokens that came."""
        path = [0]
        for token in text:
            child = tree.child(path[-1], token)
            if child is None:
                break
            path.append(child)
        for depth in range(1, min(tree.depth, len(text)) + 1):  # deeper, nobody knows what would have come
            self.depths.count(depth, depth < len(path))
        if tree.confidence is None:
            for node, place in enumerate(places(tree)):
                if 0 < place[0] <= len(text):
                    self.places.count(place, node in path)
        else:
            known = [at for at in range(1, len(tree)) if tree.depths[at] <= len(text)]
            self.believed += sum(tree.confidence[at] for at in known)
            self.surely += len(path) - 1


def places(tree: DraftTree) -> list[Place]:
    """Return each node's place, ``[nodes]``.

    The number belongs to the place: a strategy that has fewer guesses than usual fills their places with others.
    """
    widths, seen = Counter(tree.depths), Counter[int]()
    found: list[Place] = []
    for depth in tree.depths:
        found.append((depth, seen[depth], widths[depth]))
        seen[depth] += 1
    return found


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
