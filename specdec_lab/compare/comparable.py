"""Whether runs may be compared: what they differ in, by name, and what is refused until the user allows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_lab.compare.runs import FIELD, Run
from specdec_lab.config import suggest
from specdec_lab.errors import InputError

Read = Callable[[Run], Any]


@dataclass(frozen=True)
class Fact:
    """Something that runs have to agree on.

    Attributes:
        name: what ``--allow`` calls it.
        read: its value in a run; of a mapping only the fields that differ are shown.
        effect: what happens to a comparison of runs that differ in it, as the end of a sentence.
        refused: whether such a comparison is refused unless it is allowed; else the difference is only named.
    """

    name: str
    read: Read
    effect: str
    refused: bool = True


def _of(name: str) -> Read:
    return lambda run: run.summary[name]


def _machine(run: Run) -> dict[str, Any]:
    return {"cpu": run.summary["machine"]["cpu"], "gpu": run.summary["machine"]["gpu"], "device": _device(run)}


def _device(run: Run) -> str:
    stated = str((run.config.get("target") or {}).get("device", "auto"))
    if stated != "auto":
        return stated.split(":")[0]  # which of several alike does not matter, and auto does not say
    return "cuda" if run.summary["machine"]["gpu"] else "cpu"


def _target(run: Run) -> dict[str, Any]:
    """Return the target as configured and as loaded, without what is a fact of its own."""
    configured = {key: value for key, value in (run.config.get("target") or {}).items() if key not in _OWN_FACTS}
    loaded = {key: run.summary["target"][key] for key in ("name", "model", "parameters")}
    size = _DTYPE_BYTES.get(run.summary["target"]["dtype"], 1)
    return {**configured, **loaded, "stored_weights": run.summary["target"]["weight_bytes"] / size}


def _sampling(run: Run) -> dict[str, Any]:
    """Return the parameters without the seed, which is a fact of its own."""
    return {key: value for key, value in run.summary["sampling"].items() if key != "seed"}


def _seeds(run: Run) -> dict[str, Any]:
    return {"seed": run.summary["seed"], "sampling.seed": run.summary["sampling"].get("seed")}


_OWN_FACTS = ("device", "dtype", "revision")

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Weights in the dtype's own size are as many in any dtype; those of a quantised target are fewer."""


FACTS = (
    Fact("machine", _machine, "times of unlike machines say nothing about strategies"),
    Fact("threads", lambda run: run.summary["machine"]["threads"], "the number of threads changes every time"),
    Fact("target", _target, "acceptance and times are the target's as much as the strategy's"),
    Fact("revision", lambda run: run.summary["target"]["revision"], "another revision of a model is another model"),
    Fact("dtype", lambda run: run.summary["target"]["dtype"], "the dtype changes times and answers"),
    Fact("prompts", lambda run: run.summary["prompts"]["sha256"], "acceptance depends on the prompts"),
    Fact("versions", _of("versions"), "another version of a library can change every number"),
    Fact(
        "acceptance",
        lambda run: {"rule": run.summary["acceptance"], "typical": run.summary["typical"]},
        "another rule accepts other drafts, and a lossy one changes the answers",
    ),
    Fact("sampling", _sampling, "other sampling gives other answers and another acceptance"),
    Fact("exact", _of("exact"), "padded forwards take longer, the baseline's too"),
    Fact("max_new_tokens", _of("max_new_tokens"), "acceptance and speed change along an answer"),
    Fact("stop", lambda run: list(run.config.get("stop") or ()), "other stop texts end answers elsewhere"),
    Fact("batch_size", _of("batch_size"), "in a batch a forward costs less per row, and drafts gain less"),
    Fact("batch_nodes", _of("batch_nodes"), "the bound cuts trees"),
    Fact("repeats", _of("repeats"), "only the repeats that all have are paired", refused=False),
    Fact("seed", _seeds, "sampling noise and bootstrap are drawn anew", refused=False),
    Fact("git_sha", _of("git_sha"), "another commit can change every number", refused=False),
    Fact("complete", _of("complete"), "requests that failed on either side take no part", refused=False),
)


@dataclass(frozen=True)
class Difference:
    """A fact that runs do not agree on.

    Attributes:
        fact: its name.
        effect: see ``Fact``.
        refused: whether the comparison is only there because the difference was allowed.
        values: one per run, in their order.
    """

    fact: str
    effect: str
    refused: bool
    values: tuple[Any, ...]


def differences(runs: Sequence[Run]) -> tuple[Difference, ...]:
    """Return what the runs differ in, in the order of ``FACTS``."""
    found = []
    for fact in FACTS:
        values = [fact.read(run) for run in runs]
        if any(value != values[0] for value in values):
            found.append(Difference(fact.name, fact.effect, fact.refused, _narrowed(values)))
    return tuple(found)


def _narrowed(values: Sequence[Any]) -> tuple[Any, ...]:
    """Leave only the fields of mappings that differ."""
    if not all(isinstance(value, Mapping) for value in values):
        return tuple(values)
    names = list(dict.fromkeys(name for value in values for name in value))
    kept = [name for name in names if any(value.get(name) != values[0].get(name) for value in values)]
    return tuple({name: value.get(name) for name in kept} for value in values)


def check_allowed(names: Collection[str]) -> None:
    """Refuse a name that is no fact, or one that needs no leave.

    Raises:
        InputError: names what there is to allow.
    """
    known = [fact.name for fact in FACTS if fact.refused]
    for name in names:
        if name not in known:
            raise InputError("--allow", name, f"there is nothing of that name to allow{suggest(name, known)}")


def check_comparable(runs: Sequence[Run], allowed: Collection[str]) -> tuple[Difference, ...]:
    """Return what the runs differ in, all of it allowed or harmless enough to be only named.

    Args:
        allowed: names of facts that may differ.

    Raises:
        InputError: names every difference that is neither, with the values of the first.
    """
    found = differences(runs)
    barred = [one for one in found if one.refused and one.fact not in allowed]
    if barred:
        first, *others = barred
        also = f"; they also differ in {', '.join(one.fact for one in others)}" if others else ""
        leave = ",".join([*allowed, *(one.fact for one in barred)])
        shown = [f"{run.folder}: {plain(value)}" for run, value in zip(runs, first.values, strict=True)]
        remedy = (
            f"the runs differ in {first.fact} ({'; '.join(dict.fromkeys(shown))}), and {first.effect}{also}; give runs "
            f"that agree, or --allow {leave} to compare them with the differences named"
        )
        raise InputError(FIELD, str(runs[-1].folder), remedy)
    return found


def plain(value: Any) -> str:
    """Return a value in words: fields of a mapping as ``name=value``, hashes shortened."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={plain(one)}" for name, one in value.items()) or "nothing"
    if isinstance(value, str) and len(value) in (40, 64) and set(value) <= set("0123456789abcdef"):
        return value[:12]
    return "none" if value is None else str(value)
