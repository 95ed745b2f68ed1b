"""The settings of a prediction, checked before a target is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field

from specdec_lab.compare.runs import Run, read_named_run
from specdec_lab.config import PositiveInt, Threads, demand, suggest, validate
from specdec_lab.errors import InputError
from specdec_lab.predict.roofline import Hardware, ModelShape

HERE = "here"
"""Value of ``hardware`` for this machine, with the run's own target."""

Sheet = TypeVar("Sheet", bound=BaseModel)


class PredictSettings(BaseModel):
    """Values of ``conf/predict.yaml``; the file explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Annotated[str, Field(min_length=1)]
    hardware: str | dict[str, Any] = HERE
    target: str | dict[str, Any] | None = None
    draft: str | dict[str, Any] | None = None
    batch_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 4, 16, 64)
    contexts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1024, 8192)
    devices: PositiveInt | None = None
    overhead_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.2
    repeats: PositiveInt = 9
    threads: Threads | None = None


@dataclass(frozen=True)
class PredictPlan:
    """A checked prediction; ``hardware`` is ``None`` for this machine."""

    settings: PredictSettings
    run: Run
    hardware: Hardware | None
    target: ModelShape | None
    draft: ModelShape | None


def plan_prediction(config: Mapping[str, Any]) -> PredictPlan:
    """Check a resolved configuration, as plain containers, and read the run.

    Raises:
        InputError: names the first thing that is wrong.
    """
    demand(config, "run", "give the folder of a finished benchmark, as run=outputs/demo")
    settings = validate(PredictSettings, config)
    run = read_named_run(settings.run)
    if settings.hardware == HERE:
        for name in ("target", "draft"):
            if getattr(settings, name) is not None:
                remedy = "hardware=here measures the run's own models; leave it out or choose a hardware"
                raise InputError(name, getattr(settings, name), remedy)
        return PredictPlan(settings, run, None, None, None)
    if settings.target is None:
        raise InputError(
            "target", None, f"hardware={settings.hardware} needs one; choose from {', '.join(sheets('models'))}"
        )
    return PredictPlan(
        settings,
        run,
        sheet("hardware", "machines", settings.hardware, Hardware),
        sheet("target", "models", settings.target, ModelShape),
        None if settings.draft is None else sheet("draft", "models", settings.draft, ModelShape),
    )


def sheets(group: str) -> list[str]:
    """Return the names of the files in a folder of ``conf/predict/``."""
    folder = resources.files("specdec_lab.conf.predict") / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def sheet(field: str, group: str, value: str | Mapping[str, Any], model: type[Sheet]) -> Sheet:
    """Return the numbers of ``conf/predict/GROUP/VALUE.yaml``, or those that are given in its place.

    Raises:
        InputError: an unknown name, or fields that are wrong.
    """
    if isinstance(value, str):
        known = sheets(group)
        if value not in known:
            raise InputError(field, value, f"there is no such file in conf/predict/{group}/{suggest(value, known)}")
        text = (resources.files("specdec_lab.conf.predict") / group / f"{value}.yaml").read_text("utf-8")
        given: Mapping[str, Any] = yaml.safe_load(text)
    else:
        given = value
    return validate(model, {name: _number(one) for name, one in given.items()}, field)


def _number(value: Any) -> Any:
    """Return 4.8e12 as a number, which YAML 1.1 reads as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
