"""The command line of the measurements: from Hydra's configuration to tables and JSON files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from specdec_lab.bench.console import progress, result_console
from specdec_lab.bench.files import START_ANEW, storage, write_atomically
from specdec_lab.bench.prompts import load_prompts
from specdec_lab.bench.run import render
from specdec_lab.command import SUCCESS, run_plain_job
from specdec_lab.config import PositiveInt, Threads, check_arguments, validate
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import Drafter
from specdec_lab.drafters.lookahead import LookaheadDrafter
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.measure.acceptance import acceptance_table, draw_identity, measure_acceptance
from specdec_lab.measure.alternate import Sample, alternate, ratio, spread
from specdec_lab.measure.attention import attention_table, measure_attention
from specdec_lab.measure.exactness import exactness_table, measure_identity, measure_margin_move
from specdec_lab.measure.growth import measure_memory, measure_round_cost, repeated, round_cost_table
from specdec_lab.measure.peers import PromptIds, our_loop, transformers_generate
from specdec_lab.measure.sampling_cost import SAMPLING_COST, measure_sampling_cost, sampling_cost_table
from specdec_lab.measure.strategies import StrategyRates, measure_strategies, strategies_table
from specdec_lab.provenance import machine, package_versions
from specdec_lab.strategies import named_strategy, plan_target
from specdec_lab.target import Exact, Target

Part = Literal[
    "attention",
    "exactness",
    "generate",
    "lookup",
    "long_lookup",
    "growth",
    "memory",
    "acceptance",
    "sampling",
    "strategies",
    "lookahead",
    "batches",
]

LONG_PROMPTS = (1024, 2048, 4096)
"""Prompt lengths, in tokens, at which prompt lookup is compared."""

GROWTH_HISTORIES = (1024, 2048, 4096, 8000)
"""Histories, in tokens, behind which the cost of a round is measured."""

IDENTITY_PROMPTS, IDENTITY_TOKENS = 18, 48
"""Answers that the identity count compares, and their length."""

CHAIN_DRAFTS = 4
"""Length of the drawn chains on which acceptance rules are compared."""

SAMPLING_HISTORIES = (128, 4096)
"""Histories, in tokens, behind which the choice of tokens is timed."""

MEMORY_REQUESTS = 200
"""Requests in a row over which memory must stay flat."""


class MeasureSettings(BaseModel):
    """Values of ``conf/measure.yaml`` besides its groups; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: tuple[Part, ...]
    alternations: PositiveInt = 5
    max_new_tokens: Annotated[int, Field(strict=True, ge=2)] = 64
    k: PositiveInt = 8
    threads: Threads = 2
    strategies: tuple[str, ...] = ("autoregressive", "ngram", "lookahead", "recycling", "hybrid")
    batch_sizes: tuple[PositiveInt, ...] = (1, 2, 4, 8)
    batch_nodes: PositiveInt | None = None


@dataclass(frozen=True)
class Bench:
    """What every part works with: a loader, the default target, and rendered prompts."""

    settings: MeasureSettings
    load: Callable[[Exact], Target]
    target: Target
    prompts: Sequence[PromptIds]
    source: Mapping[str, str]
    console: Console


def measure_job(config: DictConfig) -> None:
    """Run the chosen parts inside Hydra; see ``specdec_lab.command.run_job``."""
    run_plain_job(config, _run)


def _run(config: Mapping[str, Any], folder: Path, _: Console) -> int:
    console = result_console()
    bench = _set_up(config, console)
    for part in bench.settings.parts:
        table, figures = PARTS[part](bench)
        console.print(table)
        record = {
            "machine": machine(),
            "versions": package_versions(),
            "settings": bench.settings.model_dump(),
            **bench.source,
        }
        with storage(folder, START_ANEW):
            write_atomically(folder / f"{part}.json", json.dumps({**record, "figures": figures}, indent=2) + "\n")
            if part in PICTURES:
                PICTURES[part](figures, folder / f"{part}.svg")
    return SUCCESS


def _set_up(config: Mapping[str, Any], console: Console) -> Bench:
    config = dict(config)
    target_node, prompts_node = dict(config.pop("target")), config.pop("prompts")
    settings = validate(MeasureSettings, config)
    load_target = plan_target(target_node)
    prompt_set = load_prompts(**check_arguments(load_prompts, prompts_node, "prompts"))
    torch.set_num_threads(settings.threads)
    target = load_target()
    rendered = [render(target, prompt, []) for prompt in prompt_set.prompts]
    source = {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": prompt_set.source,
        "prompts_sha256": prompt_set.sha256,
    }
    return Bench(settings, lambda exact: load_target(exact=exact), target, rendered, source, console)


def _attention(bench: Bench) -> tuple[Table, Any]:
    with progress(bench.console, total=16) as report:
        results = measure_attention(bench.target, repeats=bench.settings.alternations, on_step=partial(report, "step"))
    figures = [
        {"history": history, "nodes": nodes, "implementation": name, "milliseconds": asdict(spread)}
        for (history, nodes, name), spread in results.items()
    ]
    return attention_table(results), figures


def _exactness(bench: Bench) -> tuple[Table, Any]:
    chosen = [prompt for prompt in bench.prompts if len(prompt) > 32][:IDENTITY_PROMPTS]
    with progress(bench.console, total=6 * len(chosen)) as report:
        counts = measure_identity(bench.load, chosen, IDENTITY_TOKENS, on_answer=partial(report, "answer"))
    moves = spread(measure_margin_move(bench.target, chosen))
    table = exactness_table(counts)
    table.caption = (
        f"largest move of the top-2 margin per prompt, 16 tokens at once against one at a time: {moves.text(3)} logits"
    )
    return table, {"identity": [asdict(count) for count in counts], "largest_margin_move_logits": asdict(moves)}


def _compare(
    bench: Bench,
    systems: Mapping[str, Callable[[PromptIds], Sample]],
    prompts: Sequence[PromptIds],
) -> tuple[list[str], dict[str, Any]]:
    """Let ``ours`` and ``transformers`` take turns over the prompts; a first prompt of each is warm-up."""
    for run in systems.values():
        run(prompts[0])
    rounds = bench.settings.alternations
    with progress(bench.console, total=rounds * len(prompts) * len(systems)) as report:
        rates = alternate(systems, prompts, rounds, on_sample=lambda name, sample: report(name))
    faster = ratio(rates, "ours", "transformers")
    cells = [spread(rates["ours"]).text(1), spread(rates["transformers"]).text(1), faster.text(3)]
    return cells, {"tokens_per_second": rates, "ratio": asdict(faster)}


def _systems(bench: Bench, lookup: bool) -> dict[str, Callable[[PromptIds], Sample]]:
    target, tokens, k = bench.target, bench.settings.max_new_tokens, bench.settings.k
    if not lookup:
        return {
            "ours": our_loop(target, AutoregressiveDrafter(target), tokens),
            "transformers": transformers_generate(target, tokens),
        }
    return {
        "ours": our_loop(target, NgramDrafter(target, k=k), tokens),
        "transformers": transformers_generate(target, tokens, prompt_lookup_num_tokens=k),
    }


def _peer_table(title: str) -> Table:
    return Table("work", "ours, tok/s", "transformers, tok/s", "ratio, median (range)", title=title)


def _generate(bench: Bench, lookup: bool = False) -> tuple[Table, Any]:
    table = _peer_table("ngram against prompt_lookup_num_tokens" if lookup else "autoregressive against generate")
    cells, figures = _compare(bench, _systems(bench, lookup), bench.prompts)
    table.add_row(f"{len(bench.prompts)} prompts", *cells)
    return table, figures


def _long_lookup(bench: Bench) -> tuple[Table, Any]:
    table, figures = _peer_table("ngram against prompt_lookup_num_tokens, long prompts"), {}
    text = [token for prompt in bench.prompts for token in prompt]
    for length in LONG_PROMPTS:
        work = [tuple(repeated(text[at * 97 :], length)) for at in range(3)]
        cells, figures[str(length)] = _compare(bench, _systems(bench, lookup=True), work)
        table.add_row(f"{length} tokens", *cells)
    return table, figures


def _growth(bench: Bench) -> tuple[Table, Any]:
    target, drafters = bench.target, _drafters(bench)
    text = [token for prompt in bench.prompts for token in prompt]
    with progress(bench.console, total=3 * len(GROWTH_HISTORIES) * len(drafters)) as report:
        costs = measure_round_cost(
            target, drafters, text, GROWTH_HISTORIES, bench.settings.max_new_tokens, on_answer=partial(report, "answer")
        )
    return round_cost_table(costs), [asdict(cost) for cost in costs]


def _memory(bench: Bench) -> tuple[Table, Any]:
    drafter = NgramDrafter(bench.target, k=bench.settings.k)
    with progress(bench.console, total=MEMORY_REQUESTS) as report:
        resident, stayed = measure_memory(
            bench.target, drafter, bench.prompts, MEMORY_REQUESTS, on_answer=partial(report, "request")
        )
    table = Table("requests", "resident, MB", title="Memory over requests in a row")
    for at in range(0, len(resident), max(1, len(resident) // 8)):
        table.add_row(str(at + 1), f"{resident[at] / 1e6:.0f}")
    table.add_row(str(len(resident)), f"{resident[-1] / 1e6:.0f}")
    table.caption = f"cache buffers stayed in place: {'yes' if stayed else 'NO'}"
    return table, {"resident_bytes": resident, "buffers_stayed": stayed}


def _acceptance(bench: Bench) -> tuple[Table, Any]:
    with progress(bench.console, total=3 * len(bench.prompts)) as report:
        chains = measure_acceptance(bench.target, bench.prompts, CHAIN_DRAFTS, on_chain=partial(report, "chain"))
    return acceptance_table(chains, CHAIN_DRAFTS), [asdict(one) for one in chains]


def _sampling(bench: Bench) -> tuple[Table, Any]:
    target = bench.target
    drafters = {"autoregressive": AutoregressiveDrafter(target), "ngram": NgramDrafter(target, k=bench.settings.k)}
    text = [token for prompt in bench.prompts for token in prompt]
    prompts = {length: [tuple(repeated(text[at * 97 :], length)) for at in range(3)] for length in SAMPLING_HISTORIES}
    with progress(bench.console, total=3 * len(prompts) * len(drafters) * len(SAMPLING_COST)) as report:
        costs = measure_sampling_cost(
            target, drafters, prompts, bench.settings.max_new_tokens, on_answer=partial(report, "answer")
        )
    return sampling_cost_table(costs), [asdict(cost) for cost in costs]


def _side_by_side(
    bench: Bench,
    drafters: Callable[[], Mapping[str, Drafter]],
    title: str,
    batch_sizes: Sequence[int] = (1,),
    alternations: int = 1,
) -> tuple[Table, Any]:
    found: list[StrategyRates] = []
    strategies = drafters()
    total = len(bench.prompts) * len(strategies) * len(batch_sizes) * alternations
    with progress(bench.console, total=total, what="answers") as report:
        for at, batch_size in enumerate(batch_sizes):
            if at:
                strategies = drafters()
            found += measure_strategies(
                bench.target,
                strategies,
                bench.prompts,
                bench.settings.max_new_tokens,
                batch_size=batch_size,
                alternations=alternations,
                batch_nodes=bench.settings.batch_nodes,
                on_answer=report,
            )
    return strategies_table(found, title), [asdict(one) for one in found]


def _strategies(bench: Bench) -> tuple[Table, Any]:
    return _side_by_side(bench, partial(_drafters, bench), "strategies", alternations=bench.settings.alternations)


def _drafters(bench: Bench) -> dict[str, Drafter]:
    names = dict.fromkeys(("autoregressive", *bench.settings.strategies))
    return {name: named_strategy(name, {}, f"strategies.{name}", "strategies").make(bench.target) for name in names}


def _lookahead(bench: Bench) -> tuple[Table, Any]:
    target = bench.target
    drafters = {
        "autoregressive": AutoregressiveDrafter(target),
        "window alone": LookaheadDrafter(target, guesses=0, text_pool=False),
        "window and its pool": LookaheadDrafter(target, text_pool=False),
        "pool of the text alone": LookaheadDrafter(target, window=0),
        "all": LookaheadDrafter(target),
    }
    return _side_by_side(bench, lambda: drafters, "parts of lookahead")


def _batches(bench: Bench) -> tuple[Table, Any]:
    return _side_by_side(bench, partial(_drafters, bench), "batches", bench.settings.batch_sizes)


PICTURES: Mapping[Part, Callable[[Any, Path], None]] = {"acceptance": draw_identity}

PARTS: Mapping[Part, Callable[[Bench], tuple[Table, Any]]] = {
    "attention": _attention,
    "exactness": _exactness,
    "generate": _generate,
    "lookup": partial(_generate, lookup=True),
    "long_lookup": _long_lookup,
    "growth": _growth,
    "memory": _memory,
    "acceptance": _acceptance,
    "sampling": _sampling,
    "strategies": _strategies,
    "lookahead": _lookahead,
    "batches": _batches,
}
