"""Lookahead decoding: a Jacobi window that guesses n-grams in parallel, and a pool that proposes those it has seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from specdec_lab.drafters.base import DraftContext, Drafter, Verification
from specdec_lab.errors import InputError
from specdec_lab.stopping import until_eos
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, find_path, from_paths


class LookaheadDrafter(Drafter):
    """Lookahead decoding (arXiv 2402.02057, algorithm 2) with its window and its guesses as branches of one tree.

    The window has ``level - 1`` levels of ``window`` tokens. Level 0 is a chain from the root; token *i* of a level
    hangs from token *i* of the level above, so that its depth is its position. The target's most likely token after
    the last level completes one n-gram per column, which goes to the pool, and becomes the new last level; level 0 is
    dropped. After ``a`` accepted drafts the first ``a`` columns are dropped too.

    Deviations: window tokens are drafts like any other and can be accepted; equal prefixes share nodes; free places of
    the window are filled with tokens of the text itself; the pool also takes the n-grams of prompt and output; a guess
    goes on where the pool knows how, up to ``depth``.

    Args:
        window: columns of the window; 0 switches it off and leaves the pool.
        level: tokens of an n-gram.
        guesses: distinct n-grams of the pool in one tree; 0 switches them off and leaves the window.
        depth: most draft tokens along one guess; ``level - 1`` is the paper's.
        text_pool: whether n-grams of prompt and output enter the pool.
        pool_keys: tokens that n-grams of the pool begin with; the one added to longest ago is forgotten.
        per_key: n-grams kept per first token; the oldest is forgotten.
    """

    def __init__(
        self,
        target: Target,
        *,
        window: Annotated[int, Field(ge=0, le=64)] = 4,
        level: Annotated[int, Field(ge=2, le=16)] = 3,
        guesses: Annotated[int, Field(ge=0, le=64)] = 3,
        depth: Annotated[int, Field(ge=1, le=64)] = 4,
        text_pool: bool = True,
        pool_keys: Annotated[int, Field(ge=1, le=1_000_000)] = 8192,
        per_key: Annotated[int, Field(ge=1, le=256)] = 16,
    ) -> None:
        self.check_parameters(window=window, level=level, guesses=guesses, depth=depth, per_key=per_key)
        super().__init__(target, max_nodes=1 + window * (level - 1) + guesses * depth)
        self.window, self.level, self.guesses, self.depth = window, level, guesses, depth
        self.text_pool, self.pool_keys, self.per_key = text_pool, pool_keys, per_key
        self.eos_ids = target.eos_ids

    @classmethod
    def check_parameters(
        cls, *, window: int, level: int, guesses: int, depth: int, per_key: int, **others: Any
    ) -> None:
        """Refuse a strategy without drafts, guesses shorter than an n-gram, and more guesses than are kept."""
        if not window and not guesses:
            raise InputError(
                "guesses", guesses, "window is 0 as well, which leaves nothing to draft; raise one of them"
            )
        if guesses and depth < level - 1:
            raise InputError("depth", depth, f"give at least level - 1, which is {level - 1}")
        if guesses > per_key:
            raise InputError("guesses", guesses, f"give at most per_key, which is {per_key}")

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the window's branches behind the guesses that begin with the current token."""
        if context.state is None:
            pool = NgramPool(self.level, self.pool_keys, self.per_key)
            context.state = _Memory(pool, self._fresh_window(context.tokens))
        memory: _Memory = context.state
        if not context.verification.is_prompt:
            self._advance(memory, context)
        if self.text_pool:
            memory.pool.catch_up(context.tokens)
        guesses = memory.pool.guesses(context.tokens[-1], self.guesses, self.depth)
        paths = [until_eos(path, self.eos_ids)[: context.max_depth] for path in guesses]
        paths += [path[: context.max_depth] for path in memory.column_paths()]
        return from_paths(context.tokens[-1], paths)

    def _fresh_window(self, tokens: Sequence[int]) -> list[list[int]]:
        levels = range(self.level - 1)
        return [[filler(tokens, level, column) for column in range(self.window)] for level in levels]

    def _advance(self, memory: _Memory, context: DraftContext) -> None:
        """Complete the window's n-grams with what the target said, and move it to the end of the text."""
        if not self.window:
            return
        said = self._after_window(memory, context.verification)
        for column, token in enumerate(said):
            if token is not None:
                memory.pool.add([*(level[column] for level in memory.levels), token])
        last = [filler(context.tokens, self.level, at) if token is None else token for at, token in enumerate(said)]
        accepted = len(context.verification.path) - 1
        moved = [level[accepted:] for level in (*memory.levels[1:], last)]
        for at, level in enumerate(moved):
            level += [filler(context.tokens, at, column) for column in range(len(level), self.window)]
        memory.levels = moved

    def _after_window(self, memory: _Memory, message: Verification) -> list[int | None]:
        """Return the target's most likely token after each column; ``None`` where the tree did not reach it."""
        nodes = [find_path(message.tree, path) for path in memory.column_paths()]
        there = [node for node in nodes if node is not None]
        said = iter(message.logits[there].float().argmax(dim=-1).tolist() if there else [])
        return [None if node is None else next(said) for node in nodes]


def filler(tokens: Sequence[int], level: int, column: int) -> int:
    """Return a token of the text for a free place of the window, another one per place and round."""
    mixed = (len(tokens) * 0x9E3779B1 + level * 0x85EBCA6B + column * 0xC2B2AE35) & 0xFFFFFFFF
    return tokens[((mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF) % len(tokens)]


@dataclass
class _Memory:
    """What a sequence's window and pool hold."""

    pool: NgramPool
    levels: list[list[int]]

    def column_paths(self) -> list[list[int]]:
        """Return the path of each column's last token from the root."""
        first = self.levels[0]
        return [[*first[: column + 1], *(level[column] for level in self.levels[1:])] for column in range(len(first))]


class NgramPool:
    """N-grams by their first token: the most recent first, a bounded number per token, a bounded number of tokens."""

    def __init__(self, length: int, keys: int, per_key: int) -> None:
        self._length, self._keys, self._per_key = length, keys, per_key
        self._rest: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._seen = 0

    def __len__(self) -> int:
        return sum(len(rest) for rest in self._rest.values())

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Add the n-grams that end in tokens which were not there at the last call."""
        for end in range(max(self._seen + 1, self._length), len(tokens) + 1):
            self.add(tokens[end - self._length : end])
        self._seen = len(tokens)

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or make it the most recent one of its first token."""
        first, rest = ngram[0], tuple(ngram[1:])
        kept = self._rest.setdefault(first, OrderedDict())
        self._rest.move_to_end(first)
        kept[rest] = None
        kept.move_to_end(rest)
        if len(kept) > self._per_key:
            kept.popitem(last=False)
        if len(self._rest) > self._keys:
            self._rest.popitem(last=False)

    def guesses(self, token: int, count: int, depth: int) -> list[tuple[int, ...]]:
        """Return distinct continuations of a token, the most recent first, each extended up to ``depth`` tokens."""
        found = [rest for rest, _ in zip(self._recent(token), range(count), strict=False)]
        return [self._extended(rest, depth) for rest in found]

    def _recent(self, token: int) -> Iterator[tuple[int, ...]]:
        return iter(reversed(self._rest.get(token, OrderedDict())))

    def _extended(self, path: tuple[int, ...], depth: int) -> tuple[int, ...]:
        while len(path) < depth:
            following = next(self._recent(path[-1]), None)
            if following is None:
                break
            path += following
        return path[:depth]
