"""Strategies and targets as a configuration states them, checked against the class or loader that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import yaml
from omegaconf import MISSING

from specdec_lab.config import available_strategies, check_arguments, locate, suggest
from specdec_lab.drafters.base import Drafter
from specdec_lab.errors import InputError
from specdec_lab.target import Exact, Target


@dataclass(frozen=True)
class StrategyPlan:
    """A strategy that will run: its class and its checked parameters, to be called with the target.

    Attributes:
        where: the configuration node, for messages.
    """

    name: str
    drafter_class: type[Drafter]
    parameters: Mapping[str, Any]
    where: str = ""

    def make(self, target: Target) -> Drafter:
        """Return the strategy for a target.

        Raises:
            InputError: a parameter that only shows with the target to be wrong.
        """
        try:
            return self.drafter_class(target, **self.parameters)
        except InputError as error:
            raise InputError(f"{self.where}.{error.field}".lstrip("."), error.value, error.remedy) from error


def plan_strategy(name: str, node: Mapping[str, Any], where: str) -> StrategyPlan:
    """Check a strategy's configuration without a target.

    Args:
        where: the configuration node, for messages.

    Raises:
        InputError: names the field that is wrong.
    """
    drafter_class = locate(node.get("_target_"), where)
    if not (isinstance(drafter_class, type) and issubclass(drafter_class, Drafter)):
        raise InputError(f"{where}._target_", node.get("_target_"), "this is no Drafter class; name one")
    parameters = without_target(node, where)
    for field, value in parameters.items():
        if value == MISSING:
            raise InputError(f"{where}.{field}", value, "this strategy needs a value here; give one")
    checked = check_arguments(drafter_class, parameters, where)
    try:
        drafter_class.check_parameters(**checked)
    except InputError as error:
        raise InputError(f"{where}.{error.field}", error.value, error.remedy) from None
    return StrategyPlan(name, drafter_class, checked, where)


def named_strategy(name: str, changes: Mapping[str, Any], where: str, listed_in: str) -> StrategyPlan:
    """Check the strategy of a file in ``conf/drafter/`` with some of its parameters changed.

    Args:
        where: of the parameters, for messages.
        listed_in: field that names the strategy, for messages.

    Raises:
        InputError: there is no such file, or a field is wrong.
    """
    known = available_strategies()
    if name not in known:
        raise InputError(listed_in, name, f"there is no strategy of that name{suggest(name, known)}")
    return plan_strategy(name, {**strategy_node(name), **changes}, where)


def strategy_node(name: str) -> dict[str, Any]:
    """Return what the file of a strategy in ``conf/drafter/`` states."""
    text = (resources.files("specdec_lab.conf") / "drafter" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def plan_target(node: Mapping[str, Any], exact: Exact = "off") -> partial[Target]:
    """Check a target's configuration and return what loads it; its ``keywords`` are the checked arguments.

    Args:
        node: the configuration node, with ``_target_``.
        exact: see ``specdec_lab.target.Target``.

    Raises:
        InputError: names the field that is wrong.
    """
    loader = locate(node.get("_target_"), "target")
    return partial(loader, **check_arguments(loader, {**without_target(node, "target"), "exact": exact}, "target", ()))


def without_target(node: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a node's parameters without ``_target_``.

    Raises:
        InputError: another of Hydra's own fields, which would do something of its own.
    """
    for name in node:
        if name.startswith("_") and name != "_target_":
            raise InputError(f"{where}.{name}", node[name], "of Hydra's own fields only _target_ has a meaning here")
    return {name: value for name, value in node.items() if name != "_target_"}
