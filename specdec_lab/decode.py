"""The only decode loop: propose, forward, verify, cut at stop or budget, commit, record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_lab.drafters.base import DraftContext, Drafter, Verification
from specdec_lab.errors import DrafterError, InputError, NonFiniteLogitsError, NoRoomError
from specdec_lab.sampling import NON_FINITE, SamplingParams, TokenChooser
from specdec_lab.stopping import FinishReason, StopRule
from specdec_lab.target import Target, TargetOutput
from specdec_lab.timing import Stopwatch, TimeSplit
from specdec_lab.tree import DraftTree, chain, root_only
from specdec_lab.verify import follow

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Request:
    """One answer to decode.

    Attributes:
        prompt_ids: the rendered prompt.
        max_new_tokens: most tokens of the answer, EOS included.
        stop: strings that end the answer; their tokens stay in ``output_ids``, the text is cut before them.
        noise_key: what identifies the answer's noise besides the seed: question, turn, sample.
        logprobs: whether to record the target's log-probability of each emitted token.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    noise_key: tuple[object, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True)
class Round:
    """One verify forward of one row.

    Attributes:
        tokens: of the offered tree, ``[nodes]``, root first.
        parents: of the offered tree, ``[nodes]``.
        path: accepted nodes that were emitted, ``[accepted]``, without the root.
        proposed: depth of the offered tree: the most that could have been accepted.
        bonus: tokens that the target added after the accepted ones: 1, or 0 where the answer ended before it.
        seconds: wall time of the round, whole, for every row of a batch.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    proposed: int
    bonus: int
    seconds: float

    @property
    def accepted(self) -> int:
        """Draft tokens that were emitted."""
        return len(self.path)

    @property
    def proposed_nodes(self) -> int:
        """Nodes of the offered tree without its root."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Generation:
    """One finished answer, or why there is none.

    Attributes:
        output_ids: without the prompt, with EOS; empty if the request failed.
        logprobs: natural logarithm of the target's raw probability per output token, if asked for.
        time_seconds: the request's share of wall time by part.
        decode_elapsed_seconds: wall time from first token to last as its user saw it, other rows' prefills included.
        error: one sentence if the request failed, else ``None``.
    """

    request: Request
    output_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    rounds: tuple[Round, ...] = ()
    logprobs: tuple[float, ...] | None = None
    time_seconds: TimeSplit = field(default_factory=TimeSplit)
    decode_elapsed_seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Progress:
    """Tokens that one request has just gained; the last one carries the finished ``generation``.

    ``text`` is filled in by ``generate(stream=True)``: the pieces add up to the generation's text.
    """

    index: int
    new_tokens: tuple[int, ...]
    generation: Generation | None = None
    text: str = ""


@dataclass
class _Sequence:
    """A request in a cache row."""

    index: int
    request: Request
    stop_rule: StopRule
    context: DraftContext
    started_at: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    time: TimeSplit = field(default_factory=TimeSplit)
    finish_reason: FinishReason | None = None

    @property
    def output(self) -> list[int]:
        return self.context.tokens[self.context.prompt_length :]

    @property
    def max_depth(self) -> int:
        """Deepest draft that could still be committed: the target adds one more token after it."""
        return self.stop_rule.budget - (len(self.context.tokens) - self.context.prompt_length) - 1


@dataclass(frozen=True)
class _Verdict:
    """What one round adds to one row: ``len(new_tokens)`` nodes of the tree are committed, the root first."""

    path: tuple[int, ...]
    new_tokens: tuple[int, ...]
    finish_reason: FinishReason | None

    @property
    def committed(self) -> tuple[int, ...]:
        """Nodes whose rows stay in the cache: every emitted token but the last, after the root."""
        return self.path[: len(self.new_tokens)]

    @property
    def accepted(self) -> tuple[int, ...]:
        """Draft nodes whose tokens were emitted."""
        return self.path[1 : 1 + len(self.new_tokens)]


def speculative_decode(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    sampling: SamplingParams = GREEDY,
    batch_size: int = 1,
    stopwatch: Stopwatch | None = None,
) -> Iterator[Progress]:
    """Decode requests with one strategy; every strategy and the baseline run through this loop.

    Rows of a batch finish at different times, and the next request takes the free row. A request that cannot be run
    ends in a ``Generation`` with an error; the others go on.

    Yields:
        Committed tokens as they come. Time that the consumer spends between two of them is not counted.

    Raises:
        InputError: a batch of no rows.
        DrafterError: the strategy broke a promise.
        RuntimeError: another decode took the target's cache before this one had ended.
    """
    if drafter.target is not target:
        raise DrafterError(f"{type(drafter).__name__} was made for another target; make one for {target.name}")
    if batch_size < 1:
        raise InputError("batch_size", batch_size, "give a whole number of at least 1")
    watch = stopwatch or Stopwatch()
    choose = TokenChooser(sampling)
    target.allocate(batch_size, max((_tokens_needed(target, r) for r in requests), default=0), drafter.max_nodes)
    lease = target.lease
    waiting, free = deque(enumerate(requests)), list(reversed(range(batch_size)))
    active: dict[int, _Sequence] = {}
    elapsed = 0.0  # wall time spent in the loop, in seconds
    while waiting or active:
        while waiting and free:
            _check_lease(target, lease)
            index, request = waiting.popleft()
            try:
                with watch.lap() as parts:
                    sequence = _start(target, drafter, index, request, free[-1], choose)
            except (InputError, NoRoomError, NonFiniteLogitsError) as error:
                target.reset(free[-1], clear=True)
                yield Progress(index, (), Generation(request, error=str(error)))
                continue
            elapsed += sum(parts.values())
            sequence.time.prefill = sum(parts.values())  # all of the set-up, so that decode time is that of the rounds
            sequence.started_at = elapsed
            active[free.pop()] = sequence
            yield from _report(target, sequence, tuple(sequence.output), elapsed, active, free)
        if not active:
            continue
        _check_lease(target, lease)
        with watch.lap() as parts:
            contexts = _contexts_to_draft(active)
            with watch.part("draft"):
                proposed = drafter.propose_batch(contexts) if contexts else []
            trees = _checked_trees(drafter, active, contexts, proposed)
            with watch.part("verify"):
                output = target.forward(trees, drafter.feature_layers)
            with watch.part("accept"):
                walks = _walk(trees, output, active, choose)
            verdicts = {row: _cut(active[row], trees[row], walk) for row, walk in walks.items()}
            with watch.part("commit"):
                target.commit({row: verdict.committed for row, verdict in verdicts.items()})
            for row, verdict in verdicts.items():
                _commit_tokens(target, active[row], trees[row], verdict, output)
        seconds = sum(parts.values())
        elapsed += seconds
        for row, tree in trees.items():
            sequence = active[row]
            if row not in verdicts:
                target.reset(row, clear=True)
                free.append(row)
                yield Progress(active.pop(row).index, (), Generation(sequence.request, error=NON_FINITE))
                continue
            sequence.time.add(parts, share=1 / len(trees))
            sequence.rounds.append(_round(tree, verdicts[row], seconds))
            yield from _report(target, sequence, verdicts[row].new_tokens, elapsed, active, free)


def _check_lease(target: Target, lease: int) -> None:
    """Refuse to go on in a cache that another decode has emptied while this one waited for its consumer."""
    if target.lease != lease:
        raise RuntimeError(f"another decode has taken the cache of {target.name}; finish one before the next begins")


def _tokens_needed(target: Target, request: Request) -> int:
    """Return the cache slots that a request can come to use; 0 if it will be refused."""
    limit = target.max_length
    wanted = len(request.prompt_ids) + request.max_new_tokens
    if limit is None:
        return wanted
    return min(wanted, limit) if len(request.prompt_ids) < limit else 0


def _start(target: Target, drafter: Drafter, index: int, request: Request, row: int, choose: TokenChooser) -> _Sequence:
    """Prefill a prompt and emit its first token; the drafter's first message is the prompt, accepted in full."""
    prompt, limit = request.prompt_ids, target.max_length
    if not prompt:
        raise NoRoomError("the prompt has no tokens; give at least one")
    if limit is not None and len(prompt) >= limit:
        raise NoRoomError(f"the prompt has {len(prompt)} tokens and the target {limit} positions; shorten the prompt")
    if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
        strange = next(token for token in prompt if not 0 <= token < target.vocab_size)
        raise InputError("prompt_ids", strange, f"token ids run from 0 to {target.vocab_size - 1}")
    budget = request.max_new_tokens if limit is None else min(request.max_new_tokens, limit - len(prompt))
    rule = StopRule(budget, target.eos_ids, request.stop, target.tokenizer)
    target.reset(row)
    output = target.prefill(row, prompt, drafter.feature_layers)
    logits = output.row_logits(row)
    token = choose.round(output)[row](0, prompt, request.noise_key)
    _, reason = rule.take((token,))
    tree = chain(prompt[0], prompt[1:])
    message = Verification(index, True, tree, tuple(range(len(tree))), token, logits, output.row_features(row))
    context = DraftContext(index, row, [*prompt, token], len(prompt), message, budget - 1)
    sequence = _Sequence(index, request, rule, context, finish_reason=reason)
    if request.logprobs:
        sequence.logprobs += _logprobs(logits, (0,), (token,))
    return sequence


def _contexts_to_draft(active: dict[int, _Sequence]) -> list[DraftContext]:
    """Return the contexts of rows that can use a draft; a row with one token left gets a plain step."""
    contexts = [sequence.context for sequence in active.values() if sequence.max_depth > 0]
    for context in contexts:
        context.max_depth = active[context.row].max_depth
    return contexts


def _checked_trees(
    drafter: Drafter, active: dict[int, _Sequence], contexts: Sequence[DraftContext], proposed: Sequence[DraftTree]
) -> dict[int, DraftTree]:
    """Return one tree per row and hold the drafter to its promises."""
    trees = {row: root_only(sequence.context.tokens[-1]) for row, sequence in active.items()}
    name, vocab_size = type(drafter).__name__, drafter.target.vocab_size
    for context, tree in zip(contexts, proposed, strict=True):
        if tree.tokens[0] != context.tokens[-1]:
            raise DrafterError(f"{name} rooted its tree at {tree.tokens[0]}, not at {context.tokens[-1]}")
        if tree.depth > context.max_depth or len(tree) > drafter.max_nodes:
            raise DrafterError(
                f"{name} proposed {len(tree)} nodes at depth {tree.depth}; "
                f"it may propose {drafter.max_nodes} at depth {context.max_depth}"
            )
        if max(tree.tokens) >= vocab_size:
            raise DrafterError(f"{name} proposed token {max(tree.tokens)}; the target's ids end at {vocab_size - 1}")
        if tree.draft_probs is not None:  # to walk such a tree as if it were deterministic would waste its drafts
            raise DrafterError(f"{name} proposed sampled drafts; no acceptance rule for draft_probs is available yet")
        trees[context.row] = tree
    return trees


def _walk(
    trees: dict[int, DraftTree], output: TargetOutput, active: dict[int, _Sequence], choose: TokenChooser
) -> dict[int, tuple[tuple[int, ...], int]]:
    """Return path and next token per row; a row whose logits are not finite is missing."""
    walks: dict[int, tuple[tuple[int, ...], int]] = {}
    for row, token_at in choose.round(output).items():
        with suppress(NonFiniteLogitsError):
            walks[row] = follow(trees[row], _target_token(trees[row], active[row], token_at, choose.samples))
    return walks


def _target_token(
    tree: DraftTree,
    sequence: _Sequence,
    token_at: Callable[[int, Sequence[int], tuple[object, ...]], int],
    needs_history: bool,
) -> Callable[[int], int]:
    """Return ``node -> target's token after it``, which sees all committed tokens and the path to the node."""
    tokens, key = sequence.context.tokens, sequence.request.noise_key

    def target_token(node: int) -> int:
        history = [*tokens, *(tree.tokens[at] for at in tree.path_to(node)[1:])] if needs_history else tokens
        return token_at(node, history, key)

    return target_token


def _cut(sequence: _Sequence, tree: DraftTree, walk: tuple[tuple[int, ...], int]) -> _Verdict:
    """Drop what comes after EOS, a stop string or the budget."""
    path, next_token = walk
    new = (*(tree.tokens[node] for node in path[1:]), next_token)
    count, reason = sequence.stop_rule.take(new)
    return _Verdict(path, new[:count], reason)


def _commit_tokens(
    target: Target, sequence: _Sequence, tree: DraftTree, verdict: _Verdict, output: TargetOutput
) -> None:
    """Append a round's tokens to the sequence and write the message to the drafter."""
    context = sequence.context
    logits = output.row_logits(context.row)
    context.tokens.extend(verdict.new_tokens)
    sequence.finish_reason = verdict.finish_reason
    if sequence.request.logprobs:
        sequence.logprobs += _logprobs(logits, verdict.committed, verdict.new_tokens)
    context.verification = Verification(
        sequence.index,
        False,
        tree,
        verdict.committed,
        verdict.new_tokens[-1],
        logits,
        output.row_features(context.row),
    )
    if target.length(context.row) != len(context.tokens) - 1:
        raise AssertionError(f"row {context.row} caches {target.length(context.row)} of {len(context.tokens)} tokens")


def _report(
    target: Target,
    sequence: _Sequence,
    new_tokens: tuple[int, ...],
    elapsed: float,
    active: dict[int, _Sequence],
    free: list[int],
) -> Iterator[Progress]:
    """Yield a row's new tokens; if they end its answer, free the row and yield the generation with them."""
    if sequence.finish_reason is None:
        yield Progress(sequence.index, new_tokens)
        return
    row = sequence.context.row
    target.reset(row)
    del active[row]
    free.append(row)
    output = sequence.output
    generation = Generation(
        request=sequence.request,
        output_ids=tuple(output),
        text=sequence.stop_rule.text(output),
        finish_reason=sequence.finish_reason,
        rounds=tuple(sequence.rounds),
        logprobs=tuple(sequence.logprobs) if sequence.request.logprobs else None,
        time_seconds=sequence.time,
        decode_elapsed_seconds=elapsed - sequence.started_at,
    )
    yield Progress(sequence.index, new_tokens, generation)


def _round(tree: DraftTree, verdict: _Verdict, seconds: float) -> Round:
    bonus = len(verdict.new_tokens) - len(verdict.accepted)
    return Round(tree.tokens, tree.parents, verdict.accepted, tree.depth, bonus, seconds)


def _logprobs(logits: Tensor, nodes: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return log p(token) under the raw logits of the node before it, natural logarithm."""
    rows = logits[list(nodes)].float().log_softmax(dim=-1)  # [tokens, vocab]
    return rows.gather(-1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
