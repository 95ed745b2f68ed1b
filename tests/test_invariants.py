"""What must not grow, move or drift over many rounds and requests, and how a round's time adds up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from oracles import decode, random_requests
from scripted import ScriptedDrafter
from tiny_models import tiny_model
from torch import Tensor

from specdec_lab.audit.toy import bigram_model, successor_table
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target, TreeCache
from specdec_lab.timing import Stopwatch, TimeSplit
from specdec_lab.tree import DraftTree, chain, root_only


def live_tensors() -> tuple[int, int]:
    """Return how many tensors are alive, and their elements."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return len(alive), sum(tensor.numel() for tensor in alive)


@pytest.mark.parametrize("make", [AutoregressiveDrafter, NgramDrafter])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, top_k=9)], ids=["greedy", "sampled"])
def test_memory_is_flat_over_200_requests(make: Callable[[Target], Drafter], sampling: SamplingParams):
    """Guards ML-01, ML-02 and ML-04: same buffers, same number of live tensors, with and without drafts."""
    target = Target(tiny_model("llama"))
    drafter = make(target)
    requests = random_requests(9, 10, (3, 12), (4, 12))
    target.allocate(2, 24, drafter.max_nodes)
    address = target.cache.address
    seen: set[tuple[int, int]] = set()
    for turn in range(20):
        generations = decode(target, drafter, requests, sampling=sampling, batch_size=2)
        assert target.cache.address == address
        del generations
        if turn in (1, 10, 19):
            seen.add(live_tensors())
    assert len(seen) == 1


def test_one_run_of_200_requests_holds_no_more_at_its_end(monkeypatch):
    """Guards ML-01 and ML-04: within one call too, and no cache is made after the first."""
    target = Target(tiny_model("llama"))
    made: list[TreeCache] = []
    init = TreeCache.__init__
    monkeypatch.setattr(TreeCache, "__init__", lambda self, *given: (made.append(self), init(self, *given))[1])
    features = ScriptedDrafter(target, lambda context: root_only(context.tokens[-1]), feature_layers=(0, -1))
    features.script = lambda context: (features.messages.clear(), chain(context.tokens[-1], [5] * context.max_depth))[1]
    requests = random_requests(9, 200, (3, 5), (2, 3, 4))
    finished, counts = 0, []
    for progress in speculative_decode(target, features, requests, batch_size=3):
        if progress.generation is not None:
            finished += 1
            if finished in (40, 120, 190):
                counts.append(live_tensors()[0])
    assert len(made) == 1
    assert max(counts) - min(counts) <= 12  # a few rows are at other points of their answers


def test_the_buffers_do_not_move_from_round_to_round():
    """Guards ML-02: nothing is concatenated or allocated anew while a text grows."""
    target = Target(bigram_model(successor_table([*range(1, 16), 0])))
    addresses: set[tuple[int, ...]] = set()

    def script(context: DraftContext) -> DraftTree:
        addresses.add(target.cache.address)
        return chain(context.tokens[-1], [(context.tokens[-1] + 1) % 16][: context.max_depth])

    (generation,) = decode(target, ScriptedDrafter(target, script), [Request((4,), 150)])
    assert len(generation.rounds) > 50
    assert len(addresses) == 1


def test_length_is_one_less_than_the_tokens_in_every_round():
    """Guards CP-01: prompt + emitted - 1 rows are committed, for rows that finish in the round too."""
    target = Target(tiny_model("qwen2"))
    lengths: list[tuple[int, int]] = []
    reset = target.reset

    def watching(row: int, *, clear: bool = False) -> None:
        if target.length(row):
            finished.append(target.length(row))
        reset(row, clear=clear)

    def script(context: DraftContext) -> DraftTree:
        lengths.append((target.length(context.row), len(context.tokens) - 1))
        guess = [context.tokens[-1]] * min(3, context.max_depth)
        return chain(context.tokens[-1], guess)

    finished: list[int] = []
    target.reset = watching  # type: ignore[method-assign]
    requests = random_requests(3, 12, (1, 4, 11), (1, 2, 5, 13))
    generations = decode(target, ScriptedDrafter(target, script), requests, batch_size=3)
    assert all(cached == wanted for cached, wanted in lengths)
    wanted = [len(item.request.prompt_ids) + len(item.output_ids) - 1 for item in generations]
    assert sorted(finished) == sorted(wanted)


# --- time -----------------------------------------------------------------------------------------------------------


class FakeClock:
    """Each reading is one second after the last; consumers can let time pass."""

    def __init__(self) -> None:
        self.now, self.synchronized = 0.0, 0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now

    def synchronize(self) -> None:
        self.synchronized += 1


def test_parts_of_a_lap_add_up():
    clock = FakeClock()
    watch = Stopwatch(clock.synchronize, clock)
    with watch.lap() as parts:
        for name in ("draft", "verify", "draft"):
            with watch.part(name):
                clock.now += 10
        clock.now += 5
    assert parts == {"draft": 22.0, "verify": 11.0, "other": 9.0}
    assert clock.synchronized == 2 + 3 * 2
    split = TimeSplit()
    split.add(parts)
    split.add(parts, share=0.5)
    assert split == TimeSplit(draft=33.0, verify=16.5, other=13.5)
    assert split.total == 63.0


class CountingWatch(Stopwatch):
    laps = 0

    def lap(self) -> Any:
        self.laps += 1
        return super().lap()


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_rows_share_the_wall_time_of_a_run(batch_size: int):
    """Guards BM-04 and BM-07: the rows' times add up to the loop's, and the consumer's time is nobody's."""
    clock = FakeClock()
    watch = CountingWatch(clock.synchronize, clock)
    target = Target(bigram_model(successor_table([*range(1, 16), 0])))
    requests = [Request((at,), budget) for at, budget in enumerate((5, 1, 9, 3, 7))]
    done = []
    spent = 0.0
    for progress in speculative_decode(target, NgramDrafter(target), requests, batch_size=batch_size, stopwatch=watch):
        if progress.generation is not None:
            done.append(progress.generation)
        clock.now += 1000.0
        spent += 1000.0
    # The second that passes between two laps belongs to none.
    total = sum(generation.time_seconds.total for generation in done)
    assert total == pytest.approx(clock.now - spent - watch.laps)
    for generation in done:
        assert generation.time_seconds.prefill > 0
        assert (generation.time_seconds.verify > 0) == bool(generation.rounds)
        own = sum(item.seconds for item in generation.rounds)
        assert generation.decode_elapsed_seconds >= own  # prefills of other rows lie between
        if batch_size == 1:
            assert generation.decode_elapsed_seconds == pytest.approx(own)


def test_work_outside_the_forward_does_not_depend_on_the_text():
    """Guards PF-01: tensor operations per round are as many at 200 tokens of history as at 20."""
    target = Target(bigram_model(successor_table([*range(1, 16), 0])))
    counter = count()
    calls: list[int] = []

    class CountOperations(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            next(counter)
            return func(*args, **(kwargs or {}))

    with CountOperations():
        for _ in speculative_decode(target, AutoregressiveDrafter(target), [Request((4,), 200)]):
            calls.append(next(counter))
    steps = [after - before for before, after in pairwise(calls)]
    assert len(set(steps[:-1])) == 1
