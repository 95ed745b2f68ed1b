"""From configuration to arguments: which strategies there are, and values checked before anything is loaded."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Annotated, Any, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import MISSING
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from specdec_lab.errors import InputError, described

Model = TypeVar("Model", bound=BaseModel)

PositiveInt = Annotated[int, Field(strict=True, ge=1)]
"""A whole number of at least 1; neither a text nor a truth value passes for one."""

Threads = Annotated[int, Field(strict=True, ge=1, le=256)]
"""Threads of PyTorch on the CPU; far more than a machine has cores would fail when the first one starts."""

ALL_DRAFTERS = "all_drafters"
"""Name under which entry configurations pull in every file of ``conf/drafter/``."""


def available_strategies() -> tuple[str, ...]:
    """Return the names of the files in ``conf/drafter/``, sorted."""
    folder = resources.files("specdec_lab.conf") / "drafter"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def register_drafters() -> None:
    """Tell Hydra to compose each ``conf/drafter/NAME.yaml`` at ``drafter.NAME``; call it before composing.

    A defaults list cannot hold a wildcard, so the list is made here and stored as a configuration of its own, which
    an entry configuration names in its defaults as ``all_drafters``.
    """
    defaults = [{f"/drafter@drafter.{name}": name} for name in available_strategies()]
    ConfigStore.instance().store(name=ALL_DRAFTERS, node={"defaults": defaults}, package="_global_")


def locate(path: object, where: str) -> Any:
    """Import what a ``_target_`` names.

    Args:
        path: dotted path of a class or function, as a configuration file of the user's states it.
        where: the configuration node, for the message.

    Raises:
        InputError: there is nothing of that name.
    """
    hydra_log = logging.getLogger("hydra.utils")  # would log a second, longer version of the sentence
    before = hydra_log.disabled
    hydra_log.disabled = True
    try:
        return get_object(str(path))
    except Exception as error:  # an import runs the module, which can raise anything
        remedy = f"it cannot be imported ({described(error.__cause__ or error)}); mend the file or the name"
        raise InputError(f"{where}._target_", path, remedy) from error
    finally:
        hydra_log.disabled = before


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], where: str, skip: Sequence[str] = ("target",)
) -> dict[str, Any]:
    """Check keyword arguments against a signature's annotations and return them coerced to the annotated types.

    Args:
        function: a function or class; ``Annotated[int, Field(ge=1)]`` and the like are pydantic's.
        arguments: values by name; parameters without a default must be there.
        where: the configuration node, so that messages name the field as the user writes it.
        skip: parameters that are filled in elsewhere.

    Raises:
        InputError: an unknown or missing name, or a value that its annotation does not allow.
    """
    owner = function.__init__ if inspect.isclass(function) else function
    hints = get_type_hints(owner, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in skip or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, Any), default)
    for name, value in arguments.items():
        if name not in fields:
            raise InputError(f"{where}.{name}", value, f"there is no field of that name{suggest(name, fields)}")
    model = create_model(
        function.__name__, __config__=ConfigDict(arbitrary_types_allowed=True, protected_namespaces=()), **fields
    )
    checked = validate(model, arguments, where)
    return {name: getattr(checked, name) for name in fields}


def validate(model: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Build a pydantic model from plain values.

    Raises:
        InputError: names the first field that is wrong, its value and what pydantic says about it.
    """
    try:
        checked = model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join([where] * bool(where) + _path(first["loc"], values, missing=first["type"] == "missing"))
        value = None if first["type"] == "missing" else first["input"]
        remedy = first["msg"][0].lower() + first["msg"][1:]
        if first["type"] == "extra_forbidden":
            known = model.model_fields if len(first["loc"]) == 1 else ()
            remedy = f"there is no field of that name{suggest(str(first['loc'][-1]), known) if known else ''}"
        if first["type"] in ("tuple_type", "list_type"):
            remedy = f"give a list, as [{value}]"
        raise InputError(field, value, remedy) from None
    for name in type(checked).model_fields:
        value = values.get(name)
        if isinstance(value, bool) and not isinstance(getattr(checked, name), bool):
            field = f"{where}.{name}" if where else name
            raise InputError(field, value, "give a number or text here, not true or false")
    return checked


def _path(places: Sequence[int | str], values: Any, *, missing: bool) -> list[str]:
    """Return the part of pydantic's path that is the user's: it goes on with names of types where several may be."""
    found: list[str] = []
    for at, place in enumerate(places):
        inside: Any = dict(enumerate(values)) if isinstance(values, list | tuple) else values
        if isinstance(inside, Mapping) and place in inside:
            values = inside[place]
        elif not missing or at < len(places) - 1:
            break
        found.append(str(place))
    return found


def demand(values: Mapping[str, Any], field: str, remedy: str) -> None:
    """Refuse a configuration that leaves a value open which has no default.

    Raises:
        InputError: with the remedy.
    """
    if values.get(field) in (None, MISSING):
        raise InputError(field, None, remedy)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that tells what could have been meant."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"{meant}; choose from {', '.join(names)}" if names else "; none is accepted here"
