"""The strategies of all runs, each under a name of its own, with what every request took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec_lab.bench.metrics import Row
from specdec_lab.bench.settings import BASELINE
from specdec_lab.bench.statistics import DECODE, RequestKey, request_key
from specdec_lab.compare.runs import Run
from specdec_lab.errors import InputError


class Measured(NamedTuple):
    """What one request took: emitted tokens, decode time in seconds, and the category of its prompt."""

    tokens: int
    seconds: float
    category: str


@dataclass(frozen=True)
class Entry:
    """One strategy of one run.

    Attributes:
        label: its name in the comparison; no other entry has it.
        run: place of its run, from 0.
        numbers: its entry of ``summary.json``.
        requests: its successful requests that have a decode rate.
        baseline: those of the baseline of the same run.
        texts: token ids of each request's prompt; two runs share a request only if these agree, which a later turn's
            need not do: it continues the answer that its own run's baseline gave.
    """

    label: str
    run: int
    numbers: Mapping[str, Any]
    requests: Mapping[RequestKey, Measured]
    baseline: Mapping[RequestKey, Measured]
    texts: Mapping[RequestKey, tuple[int, ...]]

    @property
    def is_baseline(self) -> bool:
        """Whether this is what its run compares with."""
        return self.numbers["name"] == BASELINE


def make_entries(runs: Sequence[Run]) -> tuple[Entry, ...]:
    """Return the entries of all runs, in the order of the runs and of their summaries.

    Raises:
        InputError: a run without the baseline.
    """
    labels, found = entry_labels(runs), []
    for index, run in enumerate(runs):
        names = [entry["name"] for entry in run.summary["strategies"]]
        if BASELINE not in names:
            raise InputError("RUN_DIR", str(run.folder), f"the run has no {BASELINE} to compare with; run it again")
        baseline, texts = measured(run.rows_of(BASELINE)), run.texts()
        for entry in run.summary["strategies"]:
            own = measured(run.rows_of(entry["name"]))
            found.append(Entry(labels[index, entry["name"]], index, entry, own, baseline, texts))
    return tuple(found)


def measured(rows: Sequence[Row]) -> dict[RequestKey, Measured]:
    """Return what each successful request took; one that ended with its prefill has no decode rate and is left out."""
    found = {}
    for row in rows:
        tokens, seconds = DECODE.tokens([row]), DECODE.seconds([row])
        if tokens and seconds > 0:
            found[request_key(row)] = Measured(tokens, seconds, row["category"])
    return found


def entry_labels(runs: Sequence[Run]) -> dict[tuple[int, str], str]:
    """Return a label of its own for each strategy of each run, by place of the run and name.

    A name that is there once stays as it is. Else the parameters that differ are added, and where that does not tell
    them apart, the number of the run, from 1.
    """
    configs: dict[str, dict[int, Mapping[str, Any]]] = {}
    for index, run in enumerate(runs):
        for entry in run.summary["strategies"]:
            configs.setdefault(entry["name"], {})[index] = entry["config"]
    labels: dict[tuple[int, str], str] = {}
    for name, places in configs.items():
        told = {index: _with_parameters(name, config, list(places.values())) for index, config in places.items()}
        for index, label in told.items():
            alone = list(told.values()).count(label) == 1
            labels[index, name] = label if alone else f"{label} [run {index + 1}]"
    return labels


def _with_parameters(name: str, config: Mapping[str, Any], all_of_them: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(field for one in all_of_them for field in one)
    differing = [field for field in names if any(one.get(field) != all_of_them[0].get(field) for one in all_of_them)]
    return " ".join([name, *(f"{field}={config.get(field)}" for field in differing)])
