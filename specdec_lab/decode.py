"""The only decode loop: propose, forward, verify, cut at stop or budget, commit, record."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec_lab.choices import NON_FINITE, Choices, SequenceRule, choices_of_round
from specdec_lab.drafters.base import DraftContext, Drafter, Randomness, Verification
from specdec_lab.errors import DrafterError, InputError, NonFiniteLogitsError, NoRoomError
from specdec_lab.noise import HashedNoise, Noise
from specdec_lab.sampling import Processing, SamplingParams
from specdec_lab.stopping import FinishReason, StopRule
from specdec_lab.target import Target, TargetOutput
from specdec_lab.timing import Stopwatch, TimeSplit
from specdec_lab.tree import DraftTree, chain, first_nodes, root_only, without
from specdec_lab.verify import LAW_RULES, REJECTION, Acceptance, Walk, accept, checked_draft_probs

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
        altered: accepted drafts that plain decoding would not have emitted there with the same noise, under a lossy
            rule; ``None`` under the others.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    proposed: int
    bonus: int
    seconds: float
    altered: int | None = None

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
        lossless: whether the acceptance rule keeps the target's law; if not, rounds count what it altered.
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
    lossless: bool = True
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
    rule: SequenceRule
    lossless: bool
    started_at: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    time: TimeSplit = field(default_factory=TimeSplit)
    finish_reason: FinishReason | None = None
    plain: bool = False  # whether the next round goes without drafts

    @property
    def output(self) -> list[int]:
        return self.context.tokens[self.context.prompt_length :]

    @property
    def max_depth(self) -> int:
        """Deepest draft that could still be committed: the target adds one more token after it."""
        if self.plain:
            return 0
        return self.stop_rule.budget - (len(self.context.tokens) - self.context.prompt_length) - 1


@dataclass(frozen=True)
class _Verdict:
    """What one round adds to one row: ``len(new_tokens)`` nodes of the tree are committed, the root first."""

    path: tuple[int, ...]
    new_tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    altered: int | None

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
    acceptance: Acceptance = REJECTION,
    batch_size: int = 1,
    batch_nodes: int | None = None,
    stopwatch: Stopwatch | None = None,
    noise: Noise | None = None,
) -> Iterator[Progress]:
    """Decode requests with one strategy; every strategy and the baseline run through this loop.

    Rows of a batch finish at different times, and the next request takes the free row. A request that cannot be run
    ends in a ``Generation`` with an error; the others go on.

    Args:
        acceptance: how drafts are accepted.
        batch_nodes: most tree nodes of a verify forward over all rows, padding to the widest tree included; picked
            trees keep their first nodes, drawn ones are never cut. ``None`` sets no bound.
        noise: where randomness comes from; hashes of the sampling seed by default.

    Yields:
        Committed tokens as they come. Time that the consumer spends between two of them is not counted.

    Raises:
        InputError: a batch of no rows, or a sampling parameter that does not fit the target.
        DrafterError: the strategy broke a promise.
        RuntimeError: another decode took the target's cache before this one had ended.
    """
    if drafter.target is not target:
        raise DrafterError(f"{type(drafter).__name__} was made for another target; make one for {target.name}")
    if batch_size < 1:
        raise InputError("batch_size", batch_size, "give a whole number of at least 1")
    watch = stopwatch or Stopwatch()
    decider = _Decider(Processing(sampling, target), acceptance, noise or HashedNoise(sampling.seed))
    tokens_needed = max((_tokens_needed(target, request) for request in requests), default=0)
    target.allocate(batch_size, tokens_needed, drafter.max_nodes)
    drafter.allocate(batch_size, tokens_needed)
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
                    sequence = _start(target, drafter, index, request, free[-1], decider)
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
            trees = _checked_trees(drafter, active, contexts, proposed, decider)
            if batch_nodes is not None:
                width = max(1, batch_nodes // (max(trees) - min(trees) + 1))  # rows in between are padded too
                trees = {row: first_nodes(tree, width) for row, tree in trees.items()}
            with watch.part("verify"):
                output = target.forward(trees, drafter.feature_layers)
            with watch.part("accept"):
                verdicts = _verdicts(trees, output, active, decider)
            with watch.part("commit"):
                target.commit({row: verdict.committed for row, verdict in verdicts.items()})
            for row, verdict in verdicts.items():
                _commit_tokens(target, active[row], trees[row], verdict, output)
        seconds = sum(parts.values())
        elapsed += seconds
        for row, tree in trees.items():
            sequence = active[row]
            if row not in verdicts and len(tree) > 1:  # perhaps a draft is to blame: its NaN reaches every node
                target.forget_drafts(row)
                sequence.time.add(parts, share=1 / len(trees))
                sequence.plain = True
                continue
            if row not in verdicts:
                target.reset(row, clear=True)
                free.append(row)
                yield Progress(active.pop(row).index, (), Generation(sequence.request, error=NON_FINITE))
                continue
            sequence.time.add(parts, share=1 / len(trees))
            sequence.plain = False
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


def _start(target: Target, drafter: Drafter, index: int, request: Request, row: int, decider: _Decider) -> _Sequence:
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
    stop_rule = StopRule(budget, target.eos_ids, request.stop, target.tokenizer)
    rule = SequenceRule(decider.processing, prompt, budget, request.noise_key, target.device)
    target.reset(row)
    output = target.prefill(row, prompt, drafter.feature_layers)
    logits = output.row_logits(row)
    token = decider.choices(output, {row: root_only(prompt[-1])}, {row: rule}, {row: len(prompt)})[row].token(0)
    rule.extend((token,))
    _, reason = stop_rule.take((token,))
    tree = chain(prompt[0], prompt[1:])
    message = Verification(index, True, tree, tuple(range(len(tree))), token, logits, output.row_features(row))
    randomness = Randomness(decider.processing.sampling, decider.acceptance.rule, decider.noise, request.noise_key)
    context = DraftContext(index, row, [*prompt, token], len(prompt), message, budget - 1, randomness)
    lossless = decider.acceptance.lossless
    sequence = _Sequence(index, request, stop_rule, context, rule, lossless, finish_reason=reason)
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
    drafter: Drafter,
    active: dict[int, _Sequence],
    contexts: Sequence[DraftContext],
    proposed: Sequence[DraftTree],
    decider: _Decider,
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
        try:
            trees[context.row] = _verifiable(tree, drafter, active[context.row], decider)
        except DrafterError as error:
            raise DrafterError(f"{name}: {error}") from None
    return trees


def _verifiable(tree: DraftTree, drafter: Drafter, sequence: _Sequence, decider: _Decider) -> DraftTree:
    """Return a tree as the acceptance rule takes it.

    Drafts that the target is forbidden to choose are dropped from a deterministic tree: they could only be rejected.
    """
    rule = decider.acceptance.rule
    if tree.draft_probs is not None:
        if rule == "coupled":
            raise DrafterError(
                "acceptance=coupled takes no draft_probs; draw drafts with shared_noise, or use rejection"
            )
        return replace(tree, draft_probs=checked_draft_probs(tree, drafter.target.vocab_size))
    needs_law = rule in LAW_RULES and not decider.processing.sampling.greedy
    if drafter.draws and needs_law and len(tree) > 1:
        raise DrafterError(
            f"it draws its drafts, and acceptance={rule} needs the draft_probs that they were drawn from"
        )
    length = len(sequence.context.tokens)
    forbidden = [sequence.rule.forbidden(length + depth) for depth in range(tree.depth)]
    if not any(forbidden):
        return tree
    return without(tree, lambda node: tree.tokens[node] in forbidden[tree.depths[node] - 1])


@dataclass(frozen=True)
class _Decider:
    """What a run of the loop decides by: processors, acceptance rule, noise."""

    processing: Processing
    acceptance: Acceptance
    noise: Noise

    def choices(
        self,
        output: TargetOutput,
        trees: dict[int, DraftTree],
        rules: dict[int, SequenceRule],
        lengths: dict[int, int],
    ) -> dict[int, Choices]:
        """Return the target's choices of each row; off the CPU, of all nodes at once."""
        typical = self.acceptance.rule == "typical"
        lawful = [row for row, tree in trees.items() if typical or tree.draft_probs is not None]
        at_once = output.logits.device.type != "cpu"
        return choices_of_round(
            output, trees, rules, lengths, self.processing, self.noise, all_at_once=at_once, lawful=lawful
        )


def _verdicts(
    trees: dict[int, DraftTree], output: TargetOutput, active: dict[int, _Sequence], decider: _Decider
) -> dict[int, _Verdict]:
    """Return what the round adds to each row; a row whose logits are not finite is missing."""
    rules = {row: sequence.rule for row, sequence in active.items()}
    lengths = {row: len(sequence.context.tokens) for row, sequence in active.items()}
    greedy, verdicts = decider.processing.sampling.greedy, {}
    for row, choices in decider.choices(output, trees, rules, lengths).items():
        chance = decider.noise.chance((*rules[row].key, "accept", lengths[row]))
        with suppress(NonFiniteLogitsError):
            walk = accept(trees[row], choices, chance, decider.acceptance, greedy)
            verdict = _cut(active[row], trees[row], walk)
            if not decider.acceptance.lossless:
                verdict = replace(verdict, altered=_altered(trees[row], choices, verdict))
            verdicts[row] = verdict
    return verdicts


def _altered(tree: DraftTree, choices: Choices, verdict: _Verdict) -> int:
    """Count emitted drafts that are not the target's own token after their parent."""
    return sum(choices.token(tree.parents[node]) != tree.tokens[node] for node in verdict.accepted)


def _cut(sequence: _Sequence, tree: DraftTree, walk: Walk) -> _Verdict:
    """Drop what comes after EOS, a stop string or the budget."""
    path, next_token = walk
    new = (*(tree.tokens[node] for node in path[1:]), next_token)
    count, reason = sequence.stop_rule.take(new)
    return _Verdict(path, new[:count], reason, altered=None)


def _commit_tokens(
    target: Target, sequence: _Sequence, tree: DraftTree, verdict: _Verdict, output: TargetOutput
) -> None:
    """Append a round's tokens to the sequence and write the message to the drafter."""
    context = sequence.context
    logits = output.row_logits(context.row)
    context.tokens.extend(verdict.new_tokens)
    sequence.rule.extend(verdict.new_tokens)
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
        lossless=sequence.lossless,
    )
    yield Progress(sequence.index, new_tokens, generation)


def _round(tree: DraftTree, verdict: _Verdict, seconds: float) -> Round:
    bonus = len(verdict.new_tokens) - len(verdict.accepted)
    return Round(tree.tokens, tree.parents, verdict.accepted, tree.depth, bonus, seconds, verdict.altered)


def _logprobs(logits: Tensor, nodes: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return log p(token) under the raw logits of the node before it, natural logarithm."""
    rows = logits[list(nodes)].float().log_softmax(dim=-1)  # [tokens, vocab]
    return rows.gather(-1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
