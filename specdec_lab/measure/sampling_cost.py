"""What the choice of tokens costs per round, by sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.base import Drafter
from specdec_lab.measure.alternate import Spread, spread
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target

SAMPLING_COST = {
    "greedy": SamplingParams(),
    "T=1": SamplingParams(1.0),
    "T=1, top-k 50": SamplingParams(1.0, top_k=50),
    "T=1, top-p 0.9": SamplingParams(1.0, top_p=0.9),
    "T=1, min-p 0.05": SamplingParams(1.0, min_p=0.05),
    "greedy, repetition penalty": SamplingParams(repetition_penalty=1.2),
    "T=1, repetition penalty": SamplingParams(1.0, repetition_penalty=1.2),
}


@dataclass(frozen=True)
class ChoiceCost:
    """Milliseconds per round in the accept part, and its share of decode time in percent, over answers."""

    strategy: str
    sampling: str
    history: int
    accept_ms: Spread
    accept_share: Spread


def measure_sampling_cost(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Mapping[int, Sequence[tuple[int, ...]]],
    max_new_tokens: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[ChoiceCost]:
    """Decode prompts of several lengths under each setting, settings and strategies taking turns.

    Args:
        prompts: by length of the history.
    """
    milliseconds: dict[tuple[str, str, int], list[float]] = {}
    shares: dict[tuple[str, str, int], list[float]] = {}
    for history, texts in prompts.items():
        for text in texts:
            for sampling_name, sampling in SAMPLING_COST.items():
                for name, drafter in drafters.items():
                    (*_, last) = speculative_decode(target, drafter, [Request(text, max_new_tokens)], sampling=sampling)
                    assert last.generation is not None
                    split, key = last.generation.time_seconds, (name, sampling_name, history)
                    rounds = max(1, len(last.generation.rounds))
                    milliseconds.setdefault(key, []).append(1e3 * split.accept / rounds)
                    shares.setdefault(key, []).append(100 * split.accept / max(1e-9, split.total - split.prefill))
                    on_answer()
    return [ChoiceCost(*key, spread(values), spread(shares[key])) for key, values in milliseconds.items()]


def sampling_cost_table(costs: Sequence[ChoiceCost]) -> Table:
    """Render the measurements."""
    table = Table("strategy", "sampling", "history", "accept, ms per round", "share of decode time, %")
    for cost in costs:
        table.add_row(
            cost.strategy, cost.sampling, str(cost.history), cost.accept_ms.text(2), cost.accept_share.text(1)
        )
    return table
