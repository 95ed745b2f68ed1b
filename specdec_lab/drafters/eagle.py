"""EAGLE: a recurrent head drafts a tree from the target's hidden states, level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from specdec_lab.drafters.base import DraftContext
from specdec_lab.drafters.eagle_growth import Feed, Growth
from specdec_lab.drafters.medusa import MEASURED, check_head, measured_accuracy
from specdec_lab.drafters.sized import SizedDrafter
from specdec_lab.errors import DrafterError
from specdec_lab.heads.calibration import stated_calibration
from specdec_lab.heads.decoder import attention_shape
from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.facts import training_tokens
from specdec_lab.heads.formats import Kind, load_head
from specdec_lab.heads.packed import pack_linears, packed_bytes
from specdec_lab.heads.published_trees import published_tree
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.shipped import SHIPPED, head_source
from specdec_lab.rank_trees import RankTree, rank_tree, tree_from_accuracy
from specdec_lab.target import LayerShape, Target, TreeCache, refuse_without_memory
from specdec_lab.tree import DraftTree, root_only

DYNAMIC = "dynamic"


class EagleDrafter(SizedDrafter):
    """EAGLE-1, EAGLE-2 and EAGLE-3 (arXiv 2401.15077, 2406.16858, 2503.01840): the head decides which by its weights.

    The head's cache holds one row per committed token but the first, each made from the target's true hidden state;
    what the head made of its own drafts is forgotten at the end of a round.

    A dynamic tree expands, level by level, the ``width`` candidates that the head's probabilities multiply up to the
    most; at the end the best of all candidates stay (EAGLE-2). A static tree expands the same ranks in every round
    (EAGLE-1). Deviation: a candidate below ``min_probability`` is not expanded.

    A head that was trained with ``context_vocab`` drafts what its text holds besides its reduced vocabulary. Where the
    target's tokens are its likeliest ones, the head's probabilities are taken for what its training has found them to
    be worth (``specdec_lab.heads.calibration``).

    Args:
        head: folder or hub id of the head; ``shipped`` for that of the default target.
        kind: what the head is: ``eagle`` for EAGLE-1 and EAGLE-2 weights, ``eagle3``.
        tree: ``dynamic``; ``measured`` is static, from the accuracy that was measured in training; the name of a
            published tree; or its paths of ranks, ``[[0],[0,0],[1]]``.
        depth: deepest draft of a tree that is not stated path by path.
        width: candidates that are expanded at a level of a dynamic tree.
        branches: children of an expanded candidate.
        nodes: most draft tokens of a tree that is not stated path by path.
        min_probability: candidates below this are not expanded.
        verify_ms: milliseconds of a verify forward by its nodes, which decide how many of ``nodes`` are worth while;
            ``None`` measures them on the target once. Only for ``dynamic``.
        revision: branch, tag or commit of a hub id.

    Attributes:
        dtype: of the head, its cache and its output.
        output: the target's output layer as the head reads it; empty where the head has its own.
    """

    def __init__(
        self,
        target: Target,
        *,
        head: str | EagleHead | Eagle3Head = SHIPPED,
        kind: Literal["eagle", "eagle3"] = "eagle",
        tree: str | list[list[int]] = DYNAMIC,
        depth: Annotated[int, Field(ge=1, le=32)] = 8,
        width: Annotated[int, Field(ge=1, le=64)] = 4,
        branches: Annotated[int, Field(ge=1, le=64)] = 6,
        nodes: Annotated[int, Field(ge=1, le=512)] = 24,
        min_probability: Annotated[float, Field(ge=0, lt=1)] = 0.15,
        verify_ms: Mapping[int, float] | None = None,
        revision: str | None = None,
    ) -> None:
        facts: Mapping[str, Any] = {}
        source = head
        if isinstance(head, str):
            loaded, facts = load_head(kind, head_source(kind, head, target), target, revision=revision)
            assert isinstance(loaded, EagleHead | Eagle3Head)
            pack_linears(loaded)
            head = loaded
        self.head, self.parts = head, SharedParts(target, head.vocabulary)
        self.dtype = next(head.parameters()).dtype
        self.output = torch.empty(0) if head.own_output else self.parts.drafting_output(self.dtype)
        self.training_tokens, self.calibration = training_tokens(facts), stated_calibration(facts, "head", source)
        self.static = self._static(tree, depth, nodes, facts)
        self.depth = self.static.depth if self.static else depth
        self.width = width
        self.branches = min(self.static.branches if self.static else branches, len(head.vocabulary))
        self.nodes, self.min_probability = nodes, 0.0 if self.static else min_probability
        most = 1 + (len(self.static.paths) if self.static else nodes)
        super().__init__(target, max_nodes=most, verify_ms=verify_ms, sized=self.static is None)
        self.feature_layers = head.feature_layers
        self.token_ids: list[int] = head.vocabulary.token_ids.tolist()
        self._inside = frozenset(self.token_ids)
        self._context_bytes: dict[int, int] = {}  # by row, of the largest text so far
        self._cache: TreeCache | None = None

    @classmethod
    def check_parameters(
        cls,
        *,
        head: str,
        kind: Kind,
        tree: str | list[list[int]],
        verify_ms: Mapping[int, float] | None,
        revision: str | None,
        **others: Any,
    ) -> None:
        """Refuse a head that is none, an unknown tree and times that cannot be."""
        check_head(kind, head, revision)
        if isinstance(tree, str) and tree not in (DYNAMIC, MEASURED):
            published_tree(tree)
        super().check_parameters(verify_ms=verify_ms)

    def _static(self, tree: str | list[list[int]], depth: int, nodes: int, facts: Mapping[str, Any]) -> RankTree | None:
        if tree == DYNAMIC:
            return None
        if tree == MEASURED:
            return tree_from_accuracy(measured_accuracy(facts)[:depth], nodes)
        paths = published_tree(tree) if isinstance(tree, str) else tree
        return rank_tree(paths, 32, len(self.head.vocabulary))

    # --- memory -----------------------------------------------------------------------------------------------------

    def allocate(self, rows: int, tokens: int) -> None:
        """Make room for the committed tokens and one round's candidates; a cache that is large enough is kept."""
        super().allocate(rows, tokens)
        config = self.head.config
        _, kv_heads, head_dim = attention_shape(config)
        shape = LayerShape(kv_heads, head_dim, head_dim, self.dtype, self.target.device)
        widest = max(self.width, len(self.static.paths) if self.static else 1)
        catching_up = max(ALONE, self.depth + 1)  # a row is written as wide as the widest one beside it
        capacity = tokens + self.depth * widest + catching_up + 1
        if self._cache is None or not self._cache.holds(rows, capacity):
            self._cache = None  # the old one first: two need not fit
            shapes = dict.fromkeys(range(config.num_hidden_layers), shape)
            refuse_without_memory(list(shapes.values()), rows, capacity)
            self._cache = TreeCache(shapes, rows, capacity)
        self.head.rotation.reserve(capacity, torch.empty(0, dtype=self.dtype, device=self.target.device))

    @property
    def cache(self) -> TreeCache:
        """The head's own keys and values."""
        if self._cache is None:
            raise RuntimeError("the head has no cache yet; call allocate first")
        return self._cache

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of the head, of its rows of the target's output layer, and of its cache.

        Rows for what texts hold are counted as they came to be.
        """
        weights = sum(weight.nbytes for weight in self.head.parameters()) + packed_bytes(self.head)
        weights += sum(self._context_bytes.values())
        if not self.parts.is_own(self.output):
            weights += self.output.nbytes
        return {"draft_weights": weights, "draft_kv": 0 if self._cache is None else self._cache.bytes}

    # --- drafting ---------------------------------------------------------------------------------------------------

    def propose(self, context: DraftContext) -> DraftTree:
        """Return one sequence's tree."""
        return self.propose_batch([context])[0]

    @torch.inference_mode()
    def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """Catch up with the text, then draft all rows level by level, each level in one forward."""
        growing = {context.row: self._begin(context) for context in contexts}
        waiting = dict(growing)
        while waiting:
            states = self._run({row: growth.feed for row, growth in waiting.items()})
            memories = {row: growth.context.state for row, growth in waiting.items()}
            chances = self._chances({row: waiting[row].drafting(some) for row, some in states.items()}, memories)
            for row, growth in waiting.items():
                growth.extend(states[row], *chances[row], self)
            waiting = {row: growth for row, growth in waiting.items() if not growth.finished}
        return [self._tree(growing[context.row]) for context in contexts]

    def _begin(self, context: DraftContext) -> Growth:
        """Return a growth whose first feed is what was committed since the last round, with the target's states."""
        message = context.verification
        if context.state is None:
            context.state = _Memory(
                self.token_ids, self._cast(self.parts.output_at(torch.tensor([], dtype=torch.long)))
            )
            self.cache.clear(context.row)  # a NaN of an earlier sequence would reach this one through masked slots
        memory: _Memory = context.state
        path = torch.tensor(message.path)
        true = self.head.begin(
            {layer: self._cast(message.features[layer][path]) for layer in self.feature_layers}
        )  # [committed, hidden]
        tokens = [*message.tree.tokens[1:], message.next_token] if message.is_prompt else list(message.new_tokens)
        if memory.committed + len(tokens) != len(context.tokens) - 1:
            raise DrafterError(
                f"the head's cache has {memory.committed} of {len(context.tokens) - 1} rows and {len(tokens)} new ones"
            )
        start = memory.committed
        memory.committed += len(tokens)
        if self.head.context_vocab:
            self._meet(context.row, memory, context.tokens if message.is_prompt else tokens)
        feed = Feed(true, tokens, list(range(start, start + len(tokens))), start, None)
        return Growth(context, feed, min(self.depth, context.max_depth), memory.committed)

    def _meet(self, row: int, memory: _Memory, tokens: Sequence[int]) -> None:
        """Add what the draft vocabulary lacks of new tokens to what can be drafted in their text."""
        fresh = [token for token in dict.fromkeys(tokens) if token not in self._inside and token not in memory.met]
        if fresh:
            held, needed = len(memory.met), len(memory.met) + len(fresh)
            rows = self._cast(self.parts.output_at(torch.tensor(fresh)))
            if needed > len(memory.output_rows):  # twice as many, so that a long answer seldom moves them
                room = rows.new_empty(2 * needed, rows.shape[1])
                room[:held] = memory.output_rows[:held]
                memory.output_rows = room
            memory.output_rows[held:needed] = rows
            memory.token_ids = [*memory.token_ids, *fresh]
            memory.met.update(fresh)
            self._context_bytes[row] = max(self._context_bytes.get(row, 0), memory.output_rows.nbytes)

    def _run(self, feeds: Mapping[int, Feed]) -> dict[int, Tensor]:
        """Run the head on some rows' feeds and return the next states, ``{row: [fed, hidden]}``."""
        alone = [row for row, feed in feeds.items() if len(feed.tokens) > ALONE]
        if len(feeds) > 1 and alone:  # a prompt beside short feeds would pad them to its length
            found = {row: self._run({row: feeds[row]})[row] for row in alone}
            rest = {row: feed for row, feed in feeds.items() if row not in alone}
            return found | (self._run(rest) if rest else {})
        first, last = min(feeds), max(feeds) + 1
        width = max(len(feed.tokens) for feed in feeds.values())
        visible = width + max(feed.start for feed in feeds.values())
        device, some = self.target.device, next(iter(feeds.values())).states
        state = some.new_zeros(last - first, width, some.shape[-1])
        tokens = torch.full((last - first, width), next(iter(feeds.values())).tokens[0])  # 0 could embed to NaN
        positions = torch.zeros(last - first, width, dtype=torch.long)
        causal = len(feeds) == 1 and some.shape[0] == width == visible
        seen = None if causal else torch.zeros(last - first, 1, width, visible, dtype=torch.bool)
        if seen is not None:
            seen[..., 0] = True  # rows and columns that only pad see something, so that no softmax is over nothing
        for row, feed in feeds.items():
            at, count = row - first, len(feed.tokens)
            state[at, :count] = feed.states
            tokens[at] = feed.tokens[0]
            tokens[at, :count] = torch.tensor(feed.tokens)
            positions[at, :count] = torch.tensor(feed.positions)
            if seen is not None:
                feed.mark(seen[at, 0])
        embedded = self.parts.embed(tokens.to(device)).to(state.dtype)
        starts = [feeds[row].start if row in feeds else None for row in range(first, last)]
        self.cache.aim(first, starts, visible)
        mask = None if seen is None else seen.to(device)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, layer)
            return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, enable_gqa=True)

        output = self.head.step(state, embedded, self.head.rotation.at(positions.to(device)), attend)
        return {row: output[row - first, : len(feed.tokens)] for row, feed in feeds.items()}

    def _chances(
        self, states: Mapping[int, Tensor], memories: Mapping[int, _Memory]
    ) -> dict[int, tuple[list[list[int]], list[list[float]]]]:
        """Return the likeliest tokens after each state, and their chances, ``{row: ([states][branches], same)}``."""
        logits = self.head.logits(torch.cat(list(states.values())), self.output).float()
        if self.head.context_vocab:
            by_row = zip(states.items(), logits.split([len(some) for some in states.values()]), strict=True)
            best = [self._best(own, some, memories[row]) for (row, some), own in by_row]
        else:
            best = [self._best(logits)]
        indices = torch.cat([one for one, _ in best]).tolist()
        chances = torch.cat([one for _, one in best]).tolist()
        found, at = {}, 0
        for row, some in states.items():
            end, ids = at + len(some), memories[row].token_ids
            found[row] = ([[ids[index] for index in line] for line in indices[at:end]], chances[at:end])
            at = end
        return found

    def _best(
        self, logits: Tensor, states: Tensor | None = None, memory: _Memory | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return places and chances of the likeliest tokens, ``[states, branches]`` each.

        Args:
            logits: on the draft vocabulary, ``[states, draft_vocab]``.
            states: one text's, ``[states, hidden]``, with ``memory``, where what the text holds can be drafted too.
        """
        if states is not None and memory is not None:
            more = self.head.context_logits(states, memory.output_rows[: len(memory.met)])
            logits = torch.cat((logits, more.float()), dim=-1)
        best = logits.softmax(dim=-1).nan_to_num(0).topk(self.branches, dim=-1)  # what is no number is no chance
        return best.indices, best.values

    def _tree(self, growth: Growth) -> DraftTree:
        if len(growth.tokens) == 1:
            return root_only(growth.tokens[0])
        if self.static is not None:
            return DraftTree(tuple(growth.tokens), tuple(growth.parents), confidence=tuple(growth.values))
        return self.cut(growth.tokens, growth.parents, growth.values, self.nodes)

    def _cast(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)


ALONE = 64
"""A feed of more tokens than this, which is a prompt, runs by itself."""


@dataclass
class _Memory:
    """What is remembered of one sequence.

    Attributes:
        token_ids: that can be drafted: the draft vocabulary, and behind it what the text holds besides.
        output_rows: of the target's output layer at these others, with room for more, ``[room, hidden]``.
        met: these others.
        committed: rows of the head's cache that are made from true states; always one fewer than the text's tokens.
    """

    token_ids: list[int]
    output_rows: Tensor
    met: set[int] = field(default_factory=set)
    committed: int = 0
