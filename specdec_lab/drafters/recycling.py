"""Token recycling: what the target ranked next to each token earlier is drafted when that token comes again."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from specdec_lab.drafters.base import DraftContext, Drafter, Verification
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree


class RecyclingDrafter(Drafter):
    """Drafts a tree over an adjacency table of the target's own top-k (Token Recycling, arXiv 2408.08696).

    Every verified node, rejected ones too, leaves the target's most likely tokens after its token in the table.
    Deviations: the table belongs to the sequence and begins with what followed each token in the prompt, where the
    paper keeps one table for all requests; the tree grows best-first by rank, where the paper's template is fixed.

    Args:
        successors: tokens kept per token, the likeliest first.
        nodes: draft tokens of a tree.
        depth: deepest draft.
        first: guessed probability that the first-ranked token is right.
        decay: factor from one rank to the next.
        tokens: tokens that the table has successors of; the one updated longest ago is forgotten.
    """

    def __init__(
        self,
        target: Target,
        *,
        successors: Annotated[int, Field(ge=1, le=64)] = 8,
        nodes: Annotated[int, Field(ge=1, le=512)] = 8,
        depth: Annotated[int, Field(ge=1, le=64)] = 5,
        first: Annotated[float, Field(gt=0, lt=1)] = 0.5,
        decay: Annotated[float, Field(gt=0, lt=1)] = 0.35,
        tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 8192,
    ) -> None:
        super().__init__(target, max_nodes=nodes + 1)
        self.successors, self.nodes, self.depth, self.tokens = successors, nodes, depth, tokens
        self.rank_values = [first * decay**rank for rank in range(successors)]
        self.eos_ids = target.eos_ids

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the tree of the likeliest paths by the table's ranks."""
        if context.state is None:
            context.state = AdjacencyTable(self.successors, self.tokens)
            context.state.follow_text(context.tokens)
        table: AdjacencyTable = context.state
        self._learn(table, context.verification)
        return self._grow(table, context.tokens[-1], min(self.depth, context.max_depth))

    def _learn(self, table: AdjacencyTable, message: Verification) -> None:
        """Take the target's most likely tokens after every node it has just seen."""
        tokens = message.tree.tokens[-1:] if message.is_prompt else message.tree.tokens
        best = (
            message.logits.float().topk(min(self.successors, message.logits.shape[-1]), dim=-1).indices.tolist()
        )  # [nodes, successors]
        for token, following in zip(tokens, best, strict=True):
            table.set(token, following)

    def _grow(self, table: AdjacencyTable, root: int, depth: int) -> DraftTree:
        tokens, parents, depths = [root], [-1], [0]
        order = 0  # first come, first served among equal values
        frontier: list[tuple[float, int, int, int, int]] = []  # (-value, order, parent, rank, token)

        def offer(parent: int, value: float, rank: int) -> None:
            nonlocal order
            following = table.get(tokens[parent])
            if rank < len(following):
                order += 1
                heapq.heappush(frontier, (-value * self.rank_values[rank], order, parent, rank, following[rank]))

        values = [1.0]
        offer(0, 1.0, 0)
        while frontier and len(tokens) <= self.nodes:
            value, _, parent, rank, token = heapq.heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            values.append(-value)
            offer(parent, values[parent], rank + 1)
            if depths[-1] < depth and token not in self.eos_ids:
                offer(len(tokens) - 1, -value, 0)
        return DraftTree(tuple(tokens), tuple(parents), confidence=tuple(values))


class AdjacencyTable:
    """Successors of tokens, the likeliest first; bounded."""

    def __init__(self, successors: int, tokens: int) -> None:
        self._successors, self._tokens = successors, tokens
        self._table: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def set(self, token: int, following: Iterable[int]) -> None:
        """Replace what follows a token."""
        self._table[token] = tuple(following)
        self._table.move_to_end(token)
        if len(self._table) > self._tokens:
            self._table.popitem(last=False)

    def get(self, token: int) -> tuple[int, ...]:
        """Return what follows a token, the likeliest first; nothing if it is unknown."""
        return self._table.get(token, ())

    def follow_text(self, tokens: Sequence[int]) -> None:
        """Begin with what followed each token of a text, the most recent first."""
        for before, after in pairwise(tokens):
            others = [token for token in self.get(before) if token != after]
            self.set(before, [after, *others][: self._successors])
