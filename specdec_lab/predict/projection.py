"""Measured acceptance on hardware and models that are not at hand: what would it be worth there?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.optimize import root_scalar

from specdec_lab.bench.metrics import ratio
from specdec_lab.bench.settings import BASELINE
from specdec_lab.compare.ledger import ROUND_PARTS
from specdec_lab.cost import VerifyCost, expected_emitted
from specdec_lab.predict.roofline import Hardware, ModelShape, devices_needed, forward_seconds

LONGEST_CHAIN = 32

ALWAYS = 0.95
"""Share of rounds with a draft from which on a strategy counts as one that always drafts. Where a lookup finds nothing,
it would find nothing for a longer chain either, so no best length can be told from its mean."""


@dataclass(frozen=True)
class Drafting:
    """What a run measured of a strategy, and what a projection keeps of it.

    Attributes:
        name: of the strategy.
        emitted_per_round: mean acceptance length, bonus token included.
        nodes_per_round: of a verify forward, root included.
        depth_per_round: of the offered trees; a model of its own runs so many forwards a round.
        draft_share: time of a round in a drafter with weights over the target's forward of one node.
        weight_share: bytes of the drafter's parameters over the target's.
        host_seconds: of drafting per round, for a drafter without weights.
        model: whether it drafts with a causal language model of its own.
        chain: whether its trees are chains, and nearly every round drafts one.
    """

    name: str
    emitted_per_round: float
    nodes_per_round: float
    depth_per_round: float
    draft_share: float
    weight_share: float
    host_seconds: float
    model: bool
    chain: bool

    @property
    def acceptance(self) -> float | None:
        """Return the acceptance probability per draft that would give this length, if it is a chain's."""
        if not self.chain or not self.depth_per_round:
            return None
        return fitted_acceptance(self.emitted_per_round, self.depth_per_round)


def fitted_acceptance(emitted_per_round: float, depth: float) -> float:
    """Return the acceptance probability, the same at each draft, with which a chain emits so many tokens a round."""
    if emitted_per_round >= (depth + 1) * (1 - 1e-6):
        return 1.0
    if emitted_per_round <= 1:
        return 0.0
    found = root_scalar(lambda rate: expected_emitted(rate, depth) - emitted_per_round, bracket=[0.0, 1 - 1e-9])
    return float(found.root)


def measured_drafting(summary: Mapping[str, Any]) -> tuple[Drafting, ...]:
    """Return every strategy of a ``summary.json`` that drafted; none if the baseline has no round to compare with."""
    found: list[Drafting] = []
    baseline = next(entry for entry in summary["strategies"] if entry["name"] == BASELINE)
    if not baseline["rounds"]:
        return ()
    plain_seconds = baseline["time_seconds"]["verify"] / baseline["rounds"]
    for entry in summary["strategies"]:
        rounds = entry["rounds"]
        if entry["name"] == BASELINE or not rounds or not entry["proposed_nodes"]:
            continue
        weights = entry["memory_bytes"]["draft_weights"]
        found.append(
            Drafting(
                name=entry["name"],
                emitted_per_round=entry["mean_acceptance_length"],
                nodes_per_round=1 + entry["proposed_nodes"] / rounds,
                depth_per_round=entry["proposed"] / rounds,
                draft_share=entry["time_seconds"]["draft"] / rounds / plain_seconds if weights else 0.0,
                weight_share=weights / summary["target"]["weight_bytes"],
                host_seconds=0.0 if weights else entry["time_seconds"]["draft"] / rounds,
                model="model" in entry["config"],
                chain=entry["proposed_nodes"] == entry["proposed"]
                and entry["acceptance_by_depth"]["offered"][0] >= ALWAYS * rounds,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Place:
    """Where a projection is made: machine, models, and what is decoded at once.

    Attributes:
        draft: shape of the model that a strategy with a model of its own drafts with; ``None`` scales it by size.
        devices: accelerators that share every forward; ``None`` takes the fewest that hold models and cache.
        overhead_seconds: of every round, for what is neither weights nor cache: launches, sampling, scheduling.
    """

    hardware: Hardware
    target: ModelShape
    draft: ModelShape | None
    batch_size: int
    tokens: int
    devices: int | None
    overhead_seconds: float


def project(drafting: Drafting, place: Place) -> dict[str, Any]:
    """Return what a strategy would gain at a place, at the acceptance and tree size that were measured.

    A round takes one forward of the target over all nodes, the drafting, and the overhead; the baseline's takes a
    forward of one node and the same overhead. Drafting with a named draft model takes its forwards one after the other;
    any other drafter with weights keeps its measured time in proportion to the target's forward of one node.

    Returns:
        ``baseline_ms`` and ``cycle_ms`` of a round; ``break_even_acceptance_length``: their ratio; ``speedup``:
        measured length over that; ``baseline_tokens_per_second`` and ``tokens_per_second`` of all rows together;
        ``best_chain_length`` and ``best_chain_speedup`` if the trees were chains; ``devices``; ``memory_bytes``.
    """
    held = [place.target.weight_bytes, place.target.kv_bytes(place.tokens, place.batch_size)]
    draft = place.draft if drafting.model else None
    if draft is None:
        held.append(drafting.weight_share * place.target.weight_bytes)
    else:
        held += [draft.weight_bytes, draft.kv_bytes(place.tokens, place.batch_size)]
    devices = place.devices or max(1, devices_needed(place.hardware, *held))
    together = Hardware(**{name: devices * value for name, value in place.hardware.model_dump().items()})
    rows = (place.batch_size, place.tokens)

    def cycle(nodes: float, depth: float) -> float:
        verify = forward_seconds(place.target, together, nodes, *rows)
        if draft is not None:
            drafted = depth * forward_seconds(draft, together, 1, *rows)
        else:
            share = drafting.draft_share * depth / drafting.depth_per_round
            drafted = (
                share * forward_seconds(place.target, together, 1, *rows) + place.batch_size * drafting.host_seconds
            )
        return verify + drafted + place.overhead_seconds

    baseline = forward_seconds(place.target, together, 1, place.batch_size, place.tokens) + place.overhead_seconds
    own = cycle(drafting.nodes_per_round, drafting.depth_per_round)
    return {
        "strategy": drafting.name,
        "batch_size": place.batch_size,
        "context_tokens": place.tokens,
        "devices": devices,
        "memory_bytes": sum(held),
        "baseline_ms": 1e3 * baseline,
        "cycle_ms": 1e3 * own,
        "break_even_acceptance_length": own / baseline,
        "speedup": drafting.emitted_per_round * baseline / own,
        "baseline_tokens_per_second": place.batch_size / baseline,
        "tokens_per_second": place.batch_size * drafting.emitted_per_round / own,
        **_best_chain(drafting.acceptance, lambda k: cycle(k + 1, k) / baseline),
    }


def _best_chain(acceptance: float | None, relative_cycle: Callable[[int], float]) -> dict[str, Any]:
    if acceptance is None:
        return {"best_chain_length": None, "best_chain_speedup": None}
    speedups = {k: expected_emitted(acceptance, k) / relative_cycle(k) for k in range(1, LONGEST_CHAIN + 1)}
    best = max(speedups, key=lambda k: (speedups[k], -k))
    return {"best_chain_length": best, "best_chain_speedup": speedups[best]}


def predict_here(
    summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], verify_cost: VerifyCost
) -> list[dict[str, Any]]:
    """Return each strategy's speed-up as the cost model predicts it from verify times measured apart, and as measured.

    Predicted: (tokens emitted x the baseline's round) / (sum over rounds of the forward's time for that round's nodes
    + everything else that rounds took). Forward times are those of ``verify_cost``, on both sides; acceptance, tree
    sizes, drafting and the rest are the run's.

    Args:
        rows: of ``requests.jsonl``.
        verify_cost: of the target on this machine, measured behind a history as long as the run's.
    """
    entries = {entry["name"]: entry for entry in summary["strategies"]}
    baseline = entries[BASELINE]
    if not baseline["rounds"]:
        return []
    baseline_ms = verify_cost.of(1) + _besides_verify_ms(baseline) / baseline["rounds"]
    found = []
    for drafting in measured_drafting(summary):
        entry = entries[drafting.name]
        own = [row for row in rows if row["strategy"] == drafting.name and row["status"] == "ok"]
        verify = sum(verify_cost.of(1 + nodes) for row in own for nodes in row["proposed_nodes_per_round"])
        predicted = entry["emitted"] * baseline_ms / (verify + _besides_verify_ms(entry))
        measured = None if entry["speedup"] is None else entry["speedup"]["ratio_of_totals"]
        found.append(
            {
                "strategy": drafting.name,
                "nodes_per_round": drafting.nodes_per_round,
                "mean_acceptance_length": drafting.emitted_per_round,
                "predicted_speedup": predicted,
                "measured_speedup": measured,
                "predicted_over_measured": None if measured is None else ratio(predicted, measured),
            }
        )
    return found


def _besides_verify_ms(entry: Mapping[str, Any]) -> float:
    return 1e3 * sum(entry["time_seconds"][part] for part in ROUND_PARTS if part != "verify")
