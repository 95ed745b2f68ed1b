"""Any number of finished runs as one comparison: strategies, verdicts, and what the runs differ in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from specdec_lab.bench.console import FEW_PROMPTS, few_prompts
from specdec_lab.bench.settings import BASELINE
from specdec_lab.compare.comparable import Difference, check_allowed, check_comparable, plain
from specdec_lab.compare.entries import Entry, make_entries
from specdec_lab.compare.ledger import budget, explanations, ledger
from specdec_lab.compare.pairs import baseline_ratio, prompt_sums, request_columns, shared_requests
from specdec_lab.compare.runs import Run, read_runs
from specdec_lab.compare.spec_bench import spec_bench_numbers
from specdec_lab.compare.verdicts import all_pairs
from specdec_lab.errors import InputError

COMPARISON_VERSION = 1
"""Version of the shape of ``comparison.json``."""

DRIFT = 0.02
"""Baselines of two runs that differ by more than this are pointed out."""

Budget = Literal["nodes", "draft_weights", "training_tokens"]

RUN_FACTS = (
    "created", "complete", "git_sha", "versions", "machine", "target", "prompts", "sampling", "exact", "acceptance",
    "typical", "max_new_tokens", "batch_size", "batch_nodes", "repeats", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """What ``comparison.json`` holds.

    Attributes:
        created: when it was made, ISO 8601, UTC.
        runs: ``folder`` and the facts of each run's ``summary.json``.
        differences: what the runs differ in, see ``specdec_lab.compare.comparable.Difference``.
        equal_budget: which budgets all drafting strategies have in common because that was asked for.
        notices: sentences about what limits the comparison.
        explanations: sentences about strategies that accept more and are slower.
        entries: one mapping per strategy and run: ``label``, ``run`` (from 1), ``prompts`` (that its speed-up counts),
            ``numbers`` (its entry of ``summary.json``, unchanged), ``ledger``, ``budget``, ``spec_bench``.
        pairs: see ``specdec_lab.compare.verdicts.all_pairs``.
    """

    created: str
    runs: tuple[dict[str, Any], ...]
    differences: tuple[Difference, ...]
    equal_budget: tuple[str, ...]
    notices: tuple[str, ...]
    explanations: tuple[str, ...]
    entries: tuple[dict[str, Any], ...]
    pairs: tuple[dict[str, Any], ...]

    def document(self) -> dict[str, Any]:
        """Return it as plain containers."""
        return {"comparison_version": COMPARISON_VERSION, **asdict(self)}


def compare(folders: Sequence[Path | str], *, allow: Collection[str] = (), equal: Collection[str] = ()) -> Comparison:
    """Compare the strategies of finished runs.

    Args:
        folders: run folders of ``scripts/benchmark.py``.
        allow: facts that the runs may differ in, see ``specdec_lab.compare.comparable.FACTS``.
        equal: budgets that all strategies that draft must have in common: ``nodes`` (largest tree that was offered),
            ``draft_weights`` (bytes of the drafter's parameters), ``training_tokens`` (labels that it was trained on).

    Raises:
        InputError: a folder without a finished run; runs that differ in what is not allowed; unequal budgets.
    """
    check_allowed(allow)
    for name in equal:
        if name not in get_args(Budget):
            raise InputError("--equal", name, f"there is no such budget; choose from {', '.join(get_args(Budget))}")
    runs = read_runs([Path(folder) for folder in folders])
    differences = check_comparable(runs, allow)
    entries = make_entries(runs)
    stated = tuple(_stated(entry, runs[entry.run]) for entry in entries)
    _check_budgets(stated, equal)
    pairs = tuple(all_pairs(entries, differences, runs[0].summary["seed"]))
    return Comparison(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        runs=tuple({"folder": str(run.folder), **{name: run.summary[name] for name in RUN_FACTS}} for run in runs),
        differences=differences,
        equal_budget=tuple(equal),
        notices=(*_run_notices(runs), *_drift_notices(entries), *_few_prompts(stated)),
        explanations=tuple(explanations(stated, pairs)),
        entries=stated,
        pairs=pairs,
    )


def _stated(entry: Entry, run: Run) -> dict[str, Any]:
    rows, baseline_rows = run.rows_of(entry.numbers["name"]), run.rows_of(BASELINE)
    baseline = next(one for one in run.summary["strategies"] if one["name"] == BASELINE)
    paired = entry.requests.keys() & entry.baseline.keys()
    by_category: dict[str, set[Any]] = {}
    for key in paired:
        by_category.setdefault(entry.requests[key].category, set()).add(key[0])
    return {
        "label": entry.label,
        "run": entry.run + 1,
        "baseline": entry.is_baseline,
        "prompts": len({key[0] for key in paired}),
        "prompts_by_category": {name: len(questions) for name, questions in sorted(by_category.items())},
        "numbers": dict(entry.numbers),
        "ledger": ledger(entry.numbers, baseline),
        "budget": budget(rows, entry.numbers),
        "spec_bench": spec_bench_numbers(rows, baseline_rows),
    }


def _check_budgets(entries: Sequence[dict[str, Any]], equal: Collection[str]) -> None:
    drafting = [entry for entry in entries if entry["numbers"]["proposed_nodes"]]
    for name in equal:
        values = {entry["label"]: entry["budget"][name] for entry in drafting}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{label} {value}" for label, value in values.items())
            raise InputError("--equal", name, f"the budgets differ ({shown}); give runs of strategies that agree")


def _run_notices(runs: Sequence[Run]) -> list[str]:
    found = []
    for number, run in enumerate(runs, start=1):
        failed = sum(entry["failed"] for entry in run.summary["strategies"])
        if failed:
            found.append(f"Run {number}: {failed} requests failed; each takes no part on either side of a pair.")
        elif not run.summary["complete"]:
            found.append(f"Run {number} is not complete.")
        lossy = [entry["name"] for entry in run.summary["strategies"] if not entry["lossless"]]
        if lossy:
            rule = plain({"acceptance": run.summary["acceptance"]})
            found.append(
                f"Run {number}: {', '.join(lossy)} is lossy ({rule}); its speed is not that of the same answers."
            )
    texts = [run.texts() for run in runs]
    for number, own in enumerate(texts[1:], start=2):
        shared = own.keys() & texts[0].keys()
        other = sum(own[request] != texts[0][request] for request in shared)
        if other or shared != own.keys() | texts[0].keys():
            found.append(
                f"Runs 1 and {number} share {len(shared) - other} requests; only these are compared between them "
                f"({other} have the same id and turn and are other tokens)."
            )
    return found


def _drift_notices(entries: Sequence[Entry]) -> list[str]:
    """Point out runs whose baselines are not equally fast: the machine was not the same, whatever its name."""
    first, *others = [entry for entry in entries if entry.is_baseline]
    found = []
    for other in others:
        keys = shared_requests(other, first)
        if not keys:
            continue
        drift = baseline_ratio(prompt_sums(request_columns(other, first, keys), [key[0] for key in keys]))
        if abs(drift - 1) > DRIFT:
            found.append(
                f"The baseline of run {other.run + 1} ran at {drift:.2f} times the speed of run 1's; strategies of "
                "different runs are compared by their speed-up over their own baseline."
            )
    return found


def _few_prompts(entries: Sequence[dict[str, Any]]) -> list[str]:
    fewest = min(entry["prompts"] for entry in entries)
    if fewest >= FEW_PROMPTS:
        return []
    if not fewest:
        return ["No prompt can be compared: no answer has a decode rate, as one that ends with its first token."]
    return [few_prompts(fewest)]
