"""The command line of a trace: from Hydra's configuration to a drawn answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from specdec_lab.bench import metrics
from specdec_lab.bench.benchmark import threads
from specdec_lab.bench.columns import scalars
from specdec_lab.bench.prompts import Prompt, PromptSet
from specdec_lab.bench.records import RowKey, make_row
from specdec_lab.bench.run import enough_memory, render
from specdec_lab.bench.settings import RunPlan, plan_run
from specdec_lab.bench.trace_view import PAGE_WIDTH, Trace, render_trace, write_html
from specdec_lab.command import SUCCESS, run_plain_job, say
from specdec_lab.config import PositiveInt, suggest, validate
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.errors import InputError, SpecdecError, listed

TOTALS = (
    "output_tokens",
    "rounds",
    "proposed",
    "proposed_nodes",
    "accepted",
    "bonus",
    "mean_acceptance_length",
    "mean_accepted_drafts",
    "acceptance_rate",
)
"""Counters under the trace. Times are not among them: one answer without warm-up is no measurement."""


class TraceSettings(BaseModel):
    """Values of ``conf/trace.yaml`` that a benchmark does not have; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    strategy: str = "ngram"
    prompt: Annotated[str, Field(min_length=1)] | None = None
    question_id: str | None = None
    round: PositiveInt | None = None
    html: Annotated[str, Field(min_length=1)] | None = None


@dataclass(frozen=True)
class TracePlan:
    """A trace whose settings are checked, before anything is loaded.

    Attributes:
        run: the benchmark's plan of the same configuration; its last strategy is the traced one.
        prompt: only its first turn is answered.
    """

    settings: TraceSettings
    run: RunPlan
    prompt: Prompt


def plan_trace(config: Mapping[str, Any]) -> TracePlan:
    """Check a resolved configuration, as plain containers, and choose the prompt.

    Raises:
        InputError: names the first thing that is wrong.
    """
    own = {name: value for name, value in config.items() if name in TraceSettings.model_fields}
    settings = validate(TraceSettings, own)
    drafters = config.get("drafter") or {}
    if settings.strategy not in drafters:
        remedy = f"there is no strategy of that name{suggest(settings.strategy, drafters)}"
        raise InputError("strategy", settings.strategy, remedy)
    if settings.html is not None and (Path(settings.html).is_dir() or not Path(settings.html).parent.is_dir()):
        raise InputError("html", settings.html, "give the name of a file in a folder that exists")
    shared = {name: value for name, value in config.items() if name not in own}
    run = plan_run({**shared, "strategies": [settings.strategy]})
    return TracePlan(settings, run, choose_prompt(settings, run.prompts))


def choose_prompt(settings: TraceSettings, prompts: PromptSet) -> Prompt:
    """Return the prompt that the settings ask for.

    Raises:
        InputError: a prompt and a question at once, or a question that is not among the prompts.
    """
    if settings.prompt is not None:
        if settings.question_id is not None:
            raise InputError("question_id", settings.question_id, "a prompt is given as well; give one of the two")
        return Prompt("prompt", "prompt", (settings.prompt,))
    if settings.question_id is None:
        return prompts.prompts[0]
    found = [prompt for prompt in prompts.prompts if str(prompt.question_id) == settings.question_id]
    if not found:
        known = [str(prompt.question_id) for prompt in prompts.prompts]
        remedy = f"{prompts.source} has no such question; it has {listed(known, most=6)}"
        raise InputError("question_id", settings.question_id, remedy)
    return found[0]


def trace_answer(plan: TracePlan) -> Trace:
    """Load the target, decode the answer and count it as the benchmark does.

    Raises:
        SpecdecError: the target cannot be loaded, or the answer not be decoded.
        OSError: a file of the target cannot be read.
    """
    with enough_memory():
        return _trace(plan)


def _trace(plan: TracePlan) -> Trace:
    target = plan.run.load_target()
    strategy, settings, prompt = plan.run.strategies[-1], plan.run.settings, plan.prompt
    with threads(settings.threads, target):
        drafter = strategy.make(target)
        ids, noise_key = render(target, prompt, []), (prompt.question_id, 0, 0)  # as in the benchmark's first repeat
        request = Request(ids, settings.max_new_tokens, settings.stop, noise_key)
        events = list(
            speculative_decode(
                target,
                drafter,
                [request],
                sampling=plan.run.sampling,
                acceptance=plan.run.acceptance,
                batch_nodes=settings.batch_nodes,
            )
        )
    generation = events[-1].generation
    assert generation is not None
    if generation.error is not None:
        raise SpecdecError(generation.error)
    row = make_row(RowKey(strategy.name, prompt.question_id, 0, 0), prompt, generation, None)
    counters = dict(scalars(metrics.counters([row])))
    first = prompt.turns[0]
    turn = f" · turn 1 of {len(prompt.turns)}" if len(prompt.turns) > 1 else ""
    return Trace(
        generation=generation,
        prompt=first,
        title=f"{strategy.name} on {target.name} · {len(generation.output_ids)} tokens, "
        f"ended by {generation.finish_reason}{turn}",
        tokenizer=target.tokenizer,
        totals={name: counters[name] for name in TOTALS},
    )


def trace_job(config: DictConfig) -> None:
    """Trace one answer inside Hydra; see ``specdec_lab.command.run_job``."""
    run_plain_job(config, _run)


def _run(config: Mapping[str, Any], _: Path, __: Console) -> int:
    out = Console()
    if not out.is_terminal:
        out.width = PAGE_WIDTH
    coloured = out.color_system is not None and not out.no_color
    plan = plan_trace(config)
    trace = trace_answer(plan)
    out.print(render_trace(trace, coloured=coloured, round_number=plan.settings.round), crop=False)
    if plan.settings.html is not None:
        write_html(trace, Path(plan.settings.html), plan.settings.round)
        say(out, f"page: {plan.settings.html}")
    return SUCCESS
