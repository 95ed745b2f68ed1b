"""The measured part of a run: every strategy decodes every prompt, turn and repeat, one row each."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from specdec_lab.bench.prompts import Prompt
from specdec_lab.bench.records import RequestLog, RowKey, failed_row, make_row
from specdec_lab.bench.schedule import Block, blocks
from specdec_lab.bench.settings import BASELINE, RunPlan
from specdec_lab.chat import render_chat
from specdec_lab.cost import VerifyCost, measure_verify_cost
from specdec_lab.decode import Generation, Request, speculative_decode
from specdec_lab.drafters.base import Drafter
from specdec_lab.drafters.sized import SizedDrafter
from specdec_lab.errors import InputError, NoRoomError, described, one_line
from specdec_lab.target import Target
from specdec_lab.timing import Stopwatch

log = logging.getLogger(__name__)

WARM_UP_TEXT = "Count from one to ten, then count from one to ten again."
WARM_UP_TOKENS = 24

Clock = Callable[[], float]


@dataclass(frozen=True)
class Strategy:
    """A drafter and the target that it was made for, under the name that rows and summary use."""

    name: str
    drafter: Drafter
    target: Target


@dataclass
class Contexts:
    """What each turn of each prompt is answered to: the same token ids for every strategy.

    Turn n + 1 continues the baseline's answer to turn n, so that all strategies decode the same contexts.
    """

    target: Target
    log: RequestLog
    _rendered: dict[tuple[object, int, int], tuple[int, ...] | str] = field(default_factory=dict)

    def get(self, prompt: Prompt, turn: int, repeat: int) -> tuple[int, ...] | str:
        """Return the prompt's token ids, or one sentence about why there are none."""
        key = (prompt.question_id, turn, repeat)
        if key not in self._rendered:
            self._rendered[key] = self._render(prompt, turn, repeat)
        return self._rendered[key]

    def _render(self, prompt: Prompt, turn: int, repeat: int) -> tuple[int, ...] | str:
        answers: list[str] = []
        for earlier in range(turn):
            row = self.log.rows.get(RowKey(BASELINE, prompt.question_id, earlier, repeat))
            if row is None or row["status"] != "ok":
                return f"the baseline has no answer to turn {earlier}, which this turn continues"
            answers.append(row["text"])
        try:
            return render(self.target, prompt, answers)
        except Exception as error:  # a chat template is a program of the model's author and can fail in any way
            return described(error)


def render(target: Target, prompt: Prompt, answers: Sequence[str]) -> tuple[int, ...]:
    """Return the token ids of the turn that follows ``answers``, through the target's chat template."""
    if target.tokenizer is None:
        raise InputError("target", target.name, "a benchmark needs a tokenizer, and this target has none")
    messages = [{"role": "user", "content": prompt.turns[0]}]
    for answer, question in zip(answers, prompt.turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return render_chat(target.tokenizer, messages)


def run_rows(
    plan: RunPlan,
    strategies: Sequence[Strategy],
    requests: RequestLog,
    report: Callable[[str], None] = lambda name: None,
    clock: Clock = time.perf_counter,
) -> None:
    """Decode what is not in the log yet and append it there, row by row.

    Args:
        strategies: the baseline among them; all share one model.
        report: called with a strategy's name after each of its rows.
        clock: seconds, monotonic.

    Raises:
        OSError: a row cannot be written.
    """
    contexts = Contexts(strategies[0].target, requests)
    by_name = {strategy.name: strategy for strategy in strategies}
    for strategy in strategies:
        warm_up(strategy, plan)
    settings = plan.settings
    with collector_asleep() as collect:
        for block in blocks(plan.prompts.prompts, tuple(by_name), settings.repeats, settings.batch_size):
            ids = [contexts.get(prompt, block.turn, block.repeat) for prompt in block.prompts]
            longest = max((len(one) for one in ids if not isinstance(one, str)), default=0)
            try:
                allocate(plan, strategies, longest + settings.max_new_tokens)
            except Exception as error:  # no room for the longest; each decode asks for its own, and fails its own rows
                log.warning("a block of prompts is decoded without a common cache: %s", described(error))
            for name in block.order:
                for row in _rows_of_block(by_name[name], block, plan, requests, contexts, clock):
                    requests.append(row)
                    report(name)
                collect()


@contextmanager
def collector_asleep() -> Iterator[Callable[[], object]]:
    """Keep Python's garbage collector out of what is timed: a pass over all objects can take longer than ten rounds.

    What is there at the start is set aside, so that the passes that are asked for are short.

    Yields:
        A function that collects; call it where no clock runs.
    """
    awake = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if awake:
            gc.enable()


def rows_at_once(plan: RunPlan) -> int:
    """Return the rows of a batch that can ever be filled: no more than there are prompts."""
    return min(plan.settings.batch_size, len(plan.prompts.prompts))


def expected_keys(plan: RunPlan, strategies: Sequence[Strategy]) -> set[RowKey]:
    """Return the keys of every row that a complete run has."""
    return {
        RowKey(strategy.name, prompt.question_id, turn, repeat)
        for strategy in strategies
        for prompt in plan.prompts.prompts
        for turn in range(len(prompt.turns))
        for repeat in range(plan.settings.repeats)
    }


def check_same_prompts(plan: RunPlan, strategies: Sequence[Strategy], requests: RequestLog) -> None:
    """Refuse to mix rows of an earlier run with prompts that are others now, or become other tokens.

    Raises:
        InputError: a row has no place in the plan, or its first turn was rendered to other ids.
    """
    contexts = Contexts(strategies[0].target, requests)
    remedy = "its row in the run folder was decoded from other tokens, which resume=true cannot go on with; "
    remedy += "restore prompts, tokenizer and chat template, or use another run folder"
    by_id = {prompt.question_id: prompt for prompt in plan.prompts.prompts}
    expected = expected_keys(plan, strategies)
    for key, row in requests.rows.items():
        fits = key in expected
        if fits and key.turn == 0:
            fits = tuple(row["prompt_ids"]) == contexts.get(by_id[key.question_id], 0, key.repeat)
        if not fits:
            raise InputError("prompts.path", plan.prompts.source, f"question {key.question_id}: {remedy}")


def reserve(
    plan: RunPlan,
    strategies: Sequence[Strategy],
    verify_ms: Mapping[int, float] | None = None,
    agree: Callable[[Any], Any] = lambda value: value,
) -> dict[int, float] | None:
    """Give each target its cache for the whole run, and all strategies the times by which trees are sized.

    Args:
        verify_ms: as an earlier part of the run measured them; ``None`` measures them.
        agree: makes one value of those that several processes have found.

    Returns:
        Milliseconds of a verify forward by its nodes; ``None`` if no strategy asks for them.

    Raises:
        NoRoomError: there is not enough memory.
    """
    tokens = cache_tokens(strategies[0].target, plan.prompts.prompts, plan.settings.max_new_tokens)
    allocate_targets(plan, strategies, tokens)
    waiting = [
        drafter
        for drafter in (strategy.drafter for strategy in strategies)
        if isinstance(drafter, SizedDrafter) and drafter.awaits_cost
    ]
    if waiting and verify_ms is None:
        most = max(drafter.max_nodes for drafter in waiting)
        cost = measure_verify_cost(waiting[0].target, most, rows=rows_at_once(plan))
        verify_ms = None if cost is None else dict(cost.points)
    verify_ms = agree(verify_ms) if waiting else None
    for drafter in waiting:
        drafter.size_by(None if verify_ms is None else VerifyCost(verify_ms))
    allocate(plan, strategies, tokens)
    return None if verify_ms is None else dict(verify_ms)


def allocate(plan: RunPlan, strategies: Sequence[Strategy], tokens: int) -> None:
    """Give each target a cache for any strategy's request of ``tokens`` tokens; one that is large enough is kept.

    So no strategy has to wait for a larger one while it decodes, and all run on caches of one size.
    """
    tokens = allocate_targets(plan, strategies, tokens)
    for strategy in strategies:
        strategy.drafter.allocate(rows_at_once(plan), tokens)


def allocate_targets(plan: RunPlan, strategies: Sequence[Strategy], tokens: int) -> int:
    """Give each target a cache for the widest strategy, and return the tokens of it that positions allow."""
    nodes = max(strategy.drafter.max_nodes for strategy in strategies)
    limits = [strategy.target.max_length for strategy in strategies]
    tokens = min([tokens, *(limit for limit in limits if limit is not None)])
    for strategy in strategies:
        strategy.target.allocate(rows_at_once(plan), tokens, nodes)
    return tokens


def cache_tokens(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Estimate the most prompt and answer tokens over all turns, so that the cache is allocated once at its final size.

    Earlier answers are not known yet, and their text is tokenised anew, which can take some more tokens than the
    answer had. Each is counted a quarter longer than it can get; where that falls short, ``allocate`` grows the cache
    between two blocks.
    """
    answer = max_new_tokens + max_new_tokens // 4 + 8
    longest = 0
    for prompt in prompts:
        for turn in range(len(prompt.turns)):
            with suppress(Exception):  # a prompt that cannot be rendered will be a failed row
                length = len(render(target, prompt, [""] * turn)) + turn * answer
                if target.max_length is None or length < target.max_length:
                    longest = max(longest, length)
    return longest + max_new_tokens


def warm_up(strategy: Strategy, plan: RunPlan) -> None:
    """Decode a short text of our own in every row of the batch, so that no measured request pays for first calls."""
    prompt = Prompt("warm-up", "warm-up", (WARM_UP_TEXT,))
    try:
        request = Request(render(strategy.target, prompt, []), WARM_UP_TOKENS, noise_key=("warm-up",))
    except Exception:  # the rows will say what is wrong
        log.warning("%s could not be warmed up", strategy.name, exc_info=True)
        return
    batch = [request] * rows_at_once(plan)
    for _, generation in decode(strategy, batch, plan, len(batch), time.perf_counter):
        if generation.error is not None:
            log.warning("%s could not be warmed up: %s", strategy.name, generation.error)


def decode(
    strategy: Strategy, requests: Sequence[Request], plan: RunPlan, batch_size: int, clock: Clock
) -> Iterator[tuple[int, Generation]]:
    """Yield index and generation of each request as it finishes; whatever goes wrong ends in a failed generation.

    An exception leaves open which row of a batch is to blame, so its unfinished requests are decoded again one by one.
    """
    target, finished = strategy.target, set()
    watch = Stopwatch(target.synchronize, clock)
    try:
        for progress in speculative_decode(
            target,
            strategy.drafter,
            requests,
            sampling=plan.sampling,
            acceptance=plan.acceptance,
            batch_size=batch_size,
            batch_nodes=plan.settings.batch_nodes,
            stopwatch=watch,
        ):
            if progress.generation is not None:
                finished.add(progress.index)
                yield progress.index, progress.generation
        return
    except Exception as error:  # of the model or the drafter; the consumer's own do not pass through here
        log.warning("%s failed", strategy.name, exc_info=True)
        sentence = described(error)
    with suppress(RuntimeError):  # no cache, or a device that no longer answers: the next attempt says so
        for row in range(target.cache.rows):
            target.reset(row, clear=True)
    for index, request in enumerate(requests):
        if index in finished:
            continue
        if len(requests) == 1:
            yield index, Generation(request, error=sentence)
        else:
            for _, generation in decode(strategy, [request], plan, 1, clock):
                yield index, generation


def _rows_of_block(
    strategy: Strategy, block: Block, plan: RunPlan, requests: RequestLog, contexts: Contexts, clock: Clock
) -> Iterator[dict]:
    """Yield a strategy's rows of a block that are not in the log, as they finish."""
    settings = plan.settings
    todo: list[tuple[RowKey, Prompt, Request]] = []
    for prompt in block.prompts:
        key = RowKey(strategy.name, prompt.question_id, block.turn, block.repeat)
        if key in requests.rows:
            continue
        ids = contexts.get(prompt, block.turn, block.repeat)
        if isinstance(ids, str):
            yield failed_row(key, prompt, (), ids)
            continue
        noise_key = (prompt.question_id, block.turn, block.repeat)
        todo.append((key, prompt, Request(ids, settings.max_new_tokens, settings.stop, noise_key)))
    if not todo:
        return
    start_peak_memory(strategy.target.device)
    answers = decode(strategy, [request for *_, request in todo], plan, rows_at_once(plan), clock)
    for index, generation in answers:
        key, prompt, _ = todo[index]
        yield make_row(key, prompt, generation, peak_memory_bytes(strategy.target.device))


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn a lack of memory into one sentence.

    Raises:
        NoRoomError: instead of what PyTorch or Python raise.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        remedy = "use a smaller model, batch_size or max_new_tokens, or shorter prompts"
        raise NoRoomError(f"the memory does not suffice ({one_line(error)}); {remedy}") from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether PyTorch found no memory; on a CPU it has no exception of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def start_peak_memory(device: torch.device) -> None:
    """Begin to watch the device's memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that was in use, weights included.

    On CUDA the most that PyTorch had allocated since ``start_peak_memory``. On a CPU the resident size of the whole
    process now, at the end of a request, since the system keeps no peak that could be reset.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss
