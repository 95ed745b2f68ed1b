"""The settings of a run, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from omegaconf import MISSING
from pydantic import BaseModel, ConfigDict, Field

from specdec_lab.bench.prompts import PromptSet, load_prompts
from specdec_lab.config import PositiveInt, Threads, available_strategies, check_arguments, locate, suggest, validate
from specdec_lab.errors import InputError
from specdec_lab.heads.shipped import SHIPPED, is_shipped
from specdec_lab.sampling import SamplingParams
from specdec_lab.strategies import StrategyPlan, plan_strategy, plan_target, strategy_node
from specdec_lab.target import Exact, Target
from specdec_lab.tracking import TrackingSettings, check_tracking, tracking_settings
from specdec_lab.verify import Acceptance, RuleName

BASELINE = "autoregressive"
UNPADDED_BASELINE = "autoregressive_unpadded"
"""Name in result files of the baseline without ``exact=fixed_shape``, which runs beside it as a second reference."""

GROUPS = ("drafter", "target", "prompts", "sampling", "tracking")


class TypicalSettings(BaseModel):
    """Parameters of ``acceptance=typical``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = 0.09
    delta: float = 0.3


class BenchmarkSettings(BaseModel):
    """Values of ``conf/benchmark.yaml`` besides its groups; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: PositiveInt = 64
    batch_size: PositiveInt = 1
    batch_nodes: PositiveInt | None = None
    repeats: PositiveInt = 1
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    exact: Exact = "off"
    acceptance: RuleName = "rejection"
    typical: TypicalSettings = TypicalSettings()
    threads: Threads | None = None
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class RunPlan:
    """Everything about a run that is known before the target is loaded.

    Attributes:
        config: the resolved configuration as ``config.yaml`` states it: only the strategies that run, and neither
            ``resume`` nor ``overwrite``.
        load_target: loads the target; the model is not touched before.
        strategies: the baseline first.
    """

    config: Mapping[str, Any]
    settings: BenchmarkSettings
    sampling: SamplingParams
    acceptance: Acceptance
    load_target: Callable[[], Target]
    strategies: tuple[StrategyPlan, ...]
    prompts: PromptSet
    tracking: TrackingSettings | None


def plan_run(config: Mapping[str, Any]) -> RunPlan:
    """Check a resolved configuration, as plain containers, and load the prompts.

    Raises:
        InputError: names the first thing that is wrong.
    """
    config = dict(config)
    wanted = config.pop("strategies", None)
    groups = {name: _node(config.pop(name, None), name) for name in GROUPS}
    settings = validate(BenchmarkSettings, config)
    acceptance = Acceptance(settings.acceptance, settings.typical.epsilon, settings.typical.delta)
    sampling = SamplingParams(**check_arguments(SamplingParams, groups["sampling"], "sampling"))
    if settings.batch_nodes is not None and settings.batch_nodes < settings.batch_size:
        remedy = f"give at least batch_size, which is {settings.batch_size}: each row has a root"
        raise InputError("batch_nodes", settings.batch_nodes, remedy)
    if settings.batch_nodes is not None and settings.exact == "fixed_shape":
        remedy = "exact=fixed_shape pads every forward, beyond any bound; leave out the one or the other"
        raise InputError("batch_nodes", settings.batch_nodes, remedy)
    sampling.check_budget(settings.max_new_tokens)
    names = choose_strategies(wanted, groups["drafter"], groups["target"].get("model"))
    nodes = {name: _node(node, f"drafter.{name}") for name, node in groups["drafter"].items()}
    for name in names:
        _refuse_unshipped(name, nodes[name], groups["target"].get("model"))
    strategies = tuple(plan_strategy(name, nodes[name], f"drafter.{name}") for name in names)
    for name, node in nodes.items():  # what is not chosen may be overridden too, and must not be ignored
        if name not in names and MISSING not in node.values():
            _check_other(name, node)
    tracking = tracking_settings(groups["tracking"])
    if tracking is not None:
        check_tracking(tracking, names)
    load_target = plan_target(groups["target"], settings.exact)
    prompts = load_prompts(**check_arguments(load_prompts, groups["prompts"], "prompts"))
    kept = {name: value for name, value in config.items() if name not in ("resume", "overwrite")}
    chosen = {"strategies": list(names), "drafter": {name: groups["drafter"][name] for name in names}}
    return RunPlan(
        config={**groups, **chosen, **kept},
        settings=settings,
        sampling=sampling,
        acceptance=acceptance,
        load_target=load_target,
        strategies=strategies,
        prompts=prompts,
        tracking=tracking,
    )


def choose_strategies(
    wanted: Sequence[str] | None, drafters: Mapping[str, Any], target_model: str | None = None
) -> tuple[str, ...]:
    """Return the names of the strategies to run, the baseline first.

    Args:
        wanted: names of files in ``conf/drafter/``; ``None`` takes every strategy whose needs are met: none of its
            parameters is left open (``???``), and a head that is to be ``shipped`` is there for the target.
        drafters: the ``drafter`` node.
        target_model: ``model`` of the target's configuration.

    Raises:
        InputError: an unknown name, one given twice, or nothing to choose from.
    """
    if wanted is None:
        nodes = {name: _node(node, f"drafter.{name}") for name, node in drafters.items()}
        wanted = [name for name, node in nodes.items() if _needs_are_met(name, node, target_model)]
    if isinstance(wanted, str):
        raise InputError("strategies", wanted, f"give a list, as strategies=[{wanted}]")
    for name in wanted:
        if name not in drafters:
            raise InputError("strategies", name, f"there is no strategy of that name{suggest(str(name), drafters)}")
        if list(wanted).count(name) > 1:
            raise InputError("strategies", name, "this strategy is in the list twice; name it once")
    return (BASELINE, *(name for name in wanted if name != BASELINE))


def _refuse_unshipped(name: str, node: Mapping[str, Any], target_model: str | None) -> None:
    field = _unshipped(name, node, target_model)
    if field is not None:
        remedy = f"none comes with the package for the target {target_model}; train one, or give a folder or hub id"
        if field == "members":
            where = f"drafter.{name}.settings, as {{eagle3:{{head:FOLDER}}}}"
            remedy = f"one of them drafts with a head, and {remedy} in {where}"
        raise InputError(f"drafter.{name}.{field}", node[field], remedy)


def _needs_are_met(name: str, node: Mapping[str, Any], target_model: str | None) -> bool:
    return MISSING not in node.values() and _unshipped(name, node, target_model) is None


def _unshipped(name: str, node: Mapping[str, Any], target_model: str | None) -> str | None:
    """Return the field that wants a shipped head, its own or a member's, where none is there for the target.

    Which kind of head a strategy takes it says itself, or its module is called after it.
    """
    changes = node.get("settings") or {}
    for member in node.get("members") or ():
        if member in available_strategies() and member != name:
            own = {**strategy_node(member), **(changes.get(member) or {})}
            if _unshipped(member, own, target_model) is not None:
                return "members"
    kind = node.get("kind") or str(node.get("_target_", name)).rpartition(".")[0].rpartition(".")[2]
    if is_shipped(kind, target_model):
        return None
    return next((field for field, value in node.items() if value == SHIPPED), None)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """Return, as ``field=now (was before)``, what differs between two configurations; tracking does not count."""
    changes: list[str] = []
    for name in sorted({*before, *now} - ({"tracking"} if not where else set()), key=str):
        field, old, new = f"{where}{name}", before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += changed_settings(old, new, f"{field}.")
        elif old != new:
            changes.append(f"{field}={new!r} (was {old!r})")
    return changes


def _node(value: Any, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise InputError(where, value, f"this is a group of fields; set one of them, as {where}.FIELD=...")
    return value or {}


def _check_other(name: str, node: Mapping[str, Any]) -> None:
    """Check a strategy that will not run; one that cannot even be imported is nobody's concern here."""
    try:
        locate(node.get("_target_"), name)
    except InputError:
        return
    plan_strategy(name, node, f"drafter.{name}")
