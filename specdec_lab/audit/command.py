"""The command line of an audit: from Hydra's configuration to a certificate."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_original_cwd
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from specdec_lab.audit.draws import draw_test
from specdec_lab.audit.enumeration import TooManyOutcomesError
from specdec_lab.audit.rules import Siblings, largest_error, rule_of
from specdec_lab.audit.strategies import OUTCOMES, TOY_SAMPLING, TextCheck, compare_texts, law_error, toy_target
from specdec_lab.bench.benchmark import threads
from specdec_lab.bench.console import progress, result_console
from specdec_lab.bench.files import START_ANEW, storage, write_atomically
from specdec_lab.bench.prompts import PromptSet, load_prompts
from specdec_lab.bench.run import enough_memory, render
from specdec_lab.bench.settings import TypicalSettings
from specdec_lab.command import REFUSED, ROWS_FAILED, SUCCESS, JobFailedError, plain_config, say, say_error
from specdec_lab.config import PositiveInt, Threads, check_arguments, validate
from specdec_lab.decode import Request
from specdec_lab.drafters.base import Drafter
from specdec_lab.errors import InputError, SpecdecError, described
from specdec_lab.provenance import provenance
from specdec_lab.sampling import SamplingParams
from specdec_lab.strategies import StrategyPlan, plan_strategy, plan_target
from specdec_lab.target import Target
from specdec_lab.verify import LAW_RULES, Acceptance, RuleName

EQUAL_WITHIN = 1e-12
"""Largest total variation of two laws that are one law: what float64 loses in an enumeration."""

ENOUGH_DRAFTS = 100
"""Fewer drawn drafts than this say little about their law."""

TRACEBACK_HINT = "SPECDEC_LAB_TRACEBACK=1 shows where"

UNLIKELY = 1e-6
"""A true law gives a smaller p-value once in a million audits."""

CERTIFICATE = "certificate.json"


class AuditSettings(BaseModel):
    """Values of ``conf/audit.yaml`` besides its groups; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    acceptance: RuleName = "rejection"
    typical: TypicalSettings = TypicalSettings()
    cases: PositiveInt = 3
    max_new_tokens: Annotated[int, Field(strict=True, ge=2)] = 24
    batch_size: PositiveInt = 3
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    threads: Threads | None = None


@dataclass(frozen=True)
class AuditPlan:
    """An audit whose settings are checked, before a target is loaded."""

    settings: AuditSettings
    acceptance: Acceptance
    strategy: StrategyPlan
    load_target: Callable[[], Target]
    prompts: PromptSet


def plan_audit(config: Mapping[str, Any], name: str) -> AuditPlan:
    """Check a resolved configuration, as plain containers.

    Args:
        name: of the strategy.

    Raises:
        InputError: names the first thing that is wrong.
    """
    config = dict(config)
    groups = {group: config.pop(group, None) for group in ("drafter", "target", "prompts")}
    for group, node in groups.items():
        if not isinstance(node, Mapping):
            raise InputError(group, node, f"choose one of the files in conf/{group}/")
    drafter, target, prompts = (dict(node) for node in groups.values())
    settings = validate(AuditSettings, config)
    load_target = plan_target(target)
    return AuditPlan(
        settings,
        Acceptance(settings.acceptance, settings.typical.epsilon, settings.typical.delta),
        plan_strategy(name, drafter, "drafter"),
        load_target,
        load_prompts(**check_arguments(load_prompts, prompts, "prompts")),
    )


def audit(plan: AuditPlan, err: Console) -> dict[str, Any]:
    """Run every part of the proof that applies to the strategy.

    Returns:
        The certificate as a mapping; its ``verdict`` is ``lossless``, ``lossy`` (as labelled), ``failed``, or
        ``unproved`` where a strategy that draws its drafts drew too few to judge and cannot be made for a toy target.

    Raises:
        SpecdecError: the target or the strategy cannot be made, or a request failed.
    """
    make = plan.strategy.make
    with enough_memory():
        target = plan.load_target()
        drafter = make(target)
    with threads(1, target):
        rules = _rules(plan, drafter, err)
        toys = _toys(plan, make, err)
    with threads(plan.settings.threads, target), enough_memory():
        draws = _draws(plan, target, drafter, err)
        texts = [_text_record(check) for check in _texts(plan, target, drafter, err)]
    errors = [part["largest_total_variation"] for part in (*rules, toys) if part["largest_total_variation"] is not None]
    holds = all(error <= EQUAL_WITHIN for error in errors) and all(one["identical"] == one["compared"] for one in texts)
    holds = holds and (draws is None or draws["p_value"] is None or draws["p_value"] > UNLIKELY)
    verdict = "lossy"
    if drafter.lossless_under(plan.acceptance):
        verdict = "lossless" if holds else "failed"
        if holds and draws is not None and not toys["laws"] and draws["drafts"] < ENOUGH_DRAFTS:
            verdict = "unproved"
    return {
        "strategy": plan.strategy.name,
        "config": dict(plan.strategy.parameters),
        "acceptance": plan.settings.acceptance,
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": {"source": plan.prompts.source, "sha256": plan.prompts.sha256, "count": len(plan.prompts.prompts)},
        "verdict": verdict,
        "rules": rules,
        "toy_targets": toys,
        "drawn_drafts": draws,
        "texts": texts,
        "seed": plan.settings.seed,
        **provenance(),
    }


def _rules(plan: AuditPlan, drafter: Drafter, err: Console) -> list[dict[str, Any]]:
    """Enumerate the acceptance rule on random trees and laws."""
    siblings: tuple[Siblings, ...] = ("fixed",)
    if drafter.draws and plan.acceptance.rule in LAW_RULES:
        siblings = ("with_replacement", "without_replacement")
    found = []
    with progress(err, len(siblings), what="kinds of siblings") as report:
        for kind in siblings:
            rng = random.Random(plan.settings.seed)
            count, error = largest_error(rule_of(plan.acceptance), kind, rng, plan.settings.cases)
            found.append({"siblings": kind, "laws": count, "largest_total_variation": error})
            report(kind)
    return found


def _toys(plan: AuditPlan, make: Callable[[Target], Drafter], err: Console) -> dict[str, Any]:
    """Enumerate the whole loop with the strategy on random toy targets."""
    rng, errors = random.Random(plan.settings.seed), []
    try:
        make(toy_target(random.Random(0)))
    except SpecdecError as error:  # heads and draft models that fit one target alone
        return {"laws": 0, "largest_total_variation": None, "skipped": f"it cannot be made for a toy ({error})"}
    if plan.acceptance.rule == "coupled":
        return {"laws": 0, "largest_total_variation": None, "skipped": "coupled drafts are proved by their texts"}
    work = [sampling for sampling in TOY_SAMPLING for _ in range(plan.settings.cases)]
    left_out = 0
    with progress(err, len(work), what="toy targets") as report:
        for sampling in work:
            try:
                errors.append(law_error(make, rng, sampling, plan.acceptance))
            except TooManyOutcomesError:
                left_out += 1
            report("enumerated")
    skipped = f"{left_out} had more than {OUTCOMES} outcomes" if left_out else None
    return {"laws": len(errors), "largest_total_variation": max(errors, default=None), "skipped": skipped}


def _draws(plan: AuditPlan, target: Target, drafter: Drafter, err: Console) -> dict[str, Any] | None:
    """Test on the real target that drawn drafts have the law that is handed on with them."""
    if not (drafter.draws and plan.acceptance.rule in LAW_RULES):
        return None
    requests = _requests(plan, target)
    with progress(err, len(requests), what="answers with drawn drafts") as report:
        sampling = SamplingParams(1.0, seed=plan.settings.seed)
        return draw_test(target, drafter, requests, sampling, plan.acceptance, partial(report, plan.strategy.name))


def _requests(plan: AuditPlan, target: Target) -> list[Request]:
    return [
        Request(render(target, prompt, []), plan.settings.max_new_tokens, noise_key=(prompt.question_id, 0, 0))
        for prompt in plan.prompts.prompts
    ]


def _texts(plan: AuditPlan, target: Target, drafter: Drafter, err: Console) -> Sequence[TextCheck]:
    """Compare texts with plain decoding's; only greedy ones where a strategy shares no more than the law."""
    seed, sizes = plan.settings.seed, dict.fromkeys((1, plan.settings.batch_size))
    samplings = [SamplingParams()]
    if not (drafter.draws and plan.acceptance.rule in LAW_RULES):
        samplings += [
            SamplingParams(1.0, seed=seed),
            SamplingParams(0.8, top_k=50, top_p=0.9, seed=seed),
            SamplingParams(1.0, min_p=0.05, repetition_penalty=1.2, min_new_tokens=8, seed=seed),
        ]
    requests = _requests(plan, target)
    work = [(sampling, size) for sampling in samplings for size in sizes]
    with progress(err, len(requests) * (len(samplings) + len(work)), what="answers") as report:
        on_answer = partial(report, plan.strategy.name)
        return list(compare_texts(target, drafter, requests, work, plan.acceptance, on_answer))


def _text_record(check: TextCheck) -> dict[str, Any]:
    return {**asdict(check), "sampling": check.sampling.record()}


def certificate_table(found: Mapping[str, Any]) -> Table:
    """Return what was proved, as a table."""
    table = Table(
        "proof",
        "checked",
        "result",
        title=f"{found['strategy']}, acceptance={found['acceptance']}: {found['verdict']}",
        caption=f"Laws are enumerated, not sampled; equal means a total variation of at most {EQUAL_WITHIN:g}. Texts: "
        f"{found['target']}, {found['dtype']}, against plain decoding with the same noise.",
        caption_justify="left",
    )
    for part in found["rules"]:
        name = f"acceptance rule, siblings {part['siblings'].replace('_', ' ')}"
        table.add_row(name, f"{part['laws']} laws", _variation(part["largest_total_variation"]))
    toys = found["toy_targets"]
    result = [_variation(toys["largest_total_variation"])] if toys["laws"] else []
    table.add_row(
        "whole loop on toy targets", f"{toys['laws']} laws", "; ".join([*result, *filter(None, [toys["skipped"]])])
    )
    if found["drawn_drafts"] is not None:
        draws = found["drawn_drafts"]
        shown = (
            "none drawn" if draws["p_value"] is None else f"p = {draws['p_value']:.2g} that they have their stated law"
        )
        table.add_row("drawn drafts on the real target", f"{draws['drafts']} drafts", shown)
    for check in found["texts"]:
        name = f"texts, {_sampling_text(check['sampling'])}, batch {check['batch_size']}"
        result = f"{check['identical']} identical"
        if check["first_difference"] is not None:
            first = check["first_difference"]
            result += f"; question {first['question']} parts at token {first['position']}"
        table.add_row(name, f"{check['compared']} texts", result)
    return table


def _variation(error: float) -> str:
    return f"largest total variation {error:.1e}"


def _sampling_text(sampling: Mapping[str, Any]) -> str:
    if sampling["temperature"] == 0:
        return "greedy"
    shown = {name: value for name, value in sampling.items() if value and name not in ("temperature", "seed")}
    return " ".join([f"T={sampling['temperature']:g}", *(f"{name}={value:g}" for name, value in shown.items())])


def audit_job(config: DictConfig) -> None:
    """Audit one strategy inside Hydra; paths are relative to the folder of the launch.

    Raises:
        SystemExit: something was refused, or the strategy is not what it says; it has been said.
        JobFailedError: the same within a sweep, which goes on.
    """
    out, err = result_console(), Console(stderr=True)
    hydra = HydraConfig.get()
    folder, name = Path(hydra.runtime.output_dir), hydra.runtime.choices["drafter"]
    with chdir(get_original_cwd()):
        try:
            found = audit(plan_audit(plain_config(config), str(name)), err)
            path = folder / f"{found['strategy']}.{found['acceptance']}.{CERTIFICATE}"
            with storage(folder, START_ANEW):
                write_atomically(path, json.dumps(found, indent=2) + "\n")
        except KeyboardInterrupt:
            say(err, "interrupted; an audit keeps nothing of what it has proved so far")
            raise
        except Exception as error:  # of the strategy, which can be anybody's
            if os.environ.get("SPECDEC_LAB_TRACEBACK"):
                raise
            hint = "" if isinstance(error, (SpecdecError, OSError)) else f"{name}: "
            hint += str(error) if isinstance(error, SpecdecError) else described(error)
            say_error(err, hint if isinstance(error, (SpecdecError, OSError)) else f"{hint} ({TRACEBACK_HINT})")
            code = REFUSED
        else:
            out.print(certificate_table(found))
            say(out, f"certificate: {path}")
            code = ROWS_FAILED if found["verdict"] in ("failed", "unproved") else SUCCESS
    if code != SUCCESS:
        raise JobFailedError(code) if hydra.mode is RunMode.MULTIRUN else SystemExit(code)
