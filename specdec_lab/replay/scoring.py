"""What a drafter would have proposed at every position of recorded texts, and how much of it was right.

In an engine a round starts where the one before stopped, so easy stretches are seen by few rounds and hard ones by
many, and two strategies never meet the same positions. Here every strategy drafts at every position. The messages that
it gets are those of plain decoding, one token each: what a strategy learns from nodes that were not accepted (the
window of lookahead, the rejected nodes of recycling) it does not learn here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.bench import metrics
from specdec_lab.bench.metrics import ratio
from specdec_lab.distill.features import CachedFeatures
from specdec_lab.drafters.base import DraftContext, Drafter, Randomness, Verification
from specdec_lab.errors import InputError
from specdec_lab.noise import HashedNoise
from specdec_lab.replay.recording import LAST, Recording, Text
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, chain

CONFIDENCE_BINS = 10


@dataclass
class Replayed:
    """What one strategy drafted over all positions; lists have an entry per position, in the order of the texts.

    Attributes:
        accepted: drafts that the text follows from the root.
        proposed: depth of the tree.
        nodes: of the tree, without its root.
        ranks: ``{(depth, rank): [right, offered]}``, where a node is offered if its parent is on the text; rank counts
            its elder siblings, from 1.
        confidences: per node that has one: what the strategy believed, and whether the text runs through it.
        categories: of the texts.
    """

    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    ranks: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    confidences: list[tuple[float, bool]] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)

    def add(self, tree: DraftTree, following: Sequence[int], category: str) -> None:
        """Score one tree against the tokens that followed its root."""
        on_text = nodes_on_text(tree, following)
        self.accepted.append(len(on_text) - 1)
        self.proposed.append(tree.depth)
        self.nodes.append(len(tree) - 1)
        self.categories.append(category)
        elder: dict[int, int] = {}
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            elder[parent] = elder.get(parent, 0) + 1
            if parent in on_text:
                counts = self.ranks.setdefault((tree.depths[node], elder[parent]), [0, 0])
                counts[0] += node in on_text
                counts[1] += 1
            if tree.confidence is not None:
                self.confidences.append((tree.confidence[node], node in on_text))


def nodes_on_text(tree: DraftTree, following: Sequence[int]) -> set[int]:
    """Return the root and the nodes whose path from it is how the text goes on."""
    found, at = {0}, 0
    for node in range(1, len(tree)):  # a parent precedes its child
        depth = tree.depths[node]
        if tree.parents[node] == at and depth <= len(following) and tree.tokens[node] == following[depth - 1]:
            found.add(node)
            at = node
    return found


def replay(
    recording: Recording,
    target: Target,
    states: CachedFeatures,
    drafter: Drafter,
    stride: int = 1,
    on_text: Callable[[], None] = lambda: None,
) -> Replayed:
    """Let a drafter draft at the positions of every text.

    Args:
        target: for what drafters share with it; it runs no forward.
        stride: score every so-manieth position; the strategy drafts at all of them, since that is when it learns.
        on_text: called after each text.

    Raises:
        InputError: the drafter reads hidden states that were not recorded.
    """
    layers = {layer: recorded_layer(layer, target, recording.layers) for layer in drafter.feature_layers}
    found = Replayed()
    drafter.allocate(1, max(len(text.ids) for text in recording.texts) + drafter.max_nodes)
    for number, text in enumerate(recording.texts):
        _replay_text(number, text, target, states, drafter, layers, stride, found)
        on_text()
    return found


def recorded_layer(layer: int, target: Target, recorded: Sequence[int]) -> int:
    """Return the name under which a hidden state was recorded.

    Raises:
        InputError: it was not.
    """
    states = target.depth + 1
    for name in recorded:
        if name == layer or name % states == layer % states:
            return name
    raise InputError("recording", list(recorded), f"hidden state {layer} is not in it; record with layers=[{layer}]")


@torch.inference_mode()
def _replay_text(
    number: int,
    text: Text,
    target: Target,
    states: CachedFeatures,
    drafter: Drafter,
    layers: dict[int, int],
    stride: int,
    found: Replayed,
) -> None:
    hidden = {layer: rows[0] for layer, rows in states.batch([text.example()]).features.items()}  # [tokens, hidden]
    logits = output_logits(target, hidden[LAST])
    prompt, ids = len(text.prompt_ids), text.ids

    def rows(first: int, last: int) -> dict[int, Tensor]:
        return {layer: hidden[name][first:last] for layer, name in layers.items()}

    tree = chain(ids[0], ids[1:prompt])
    whole = tuple(range(prompt))
    message = Verification(number, True, tree, whole, ids[prompt], logits[prompt - 1 : prompt], rows(0, prompt))
    randomness = Randomness(SamplingParams(), "rejection", HashedNoise(0), (number,))
    context = DraftContext(number, 0, list(ids[: prompt + 1]), prompt, message, 1, randomness)
    for at in range(prompt, len(ids) - 1):  # ids[at] is the root, and its own state is not known yet
        context.max_depth = len(ids) - 1 - at
        tree = drafter.propose_batch([context])[0]
        if (at - prompt) % stride == 0:
            found.add(tree, ids[at + 1 :], text.category)
        root = DraftTree((ids[at],), (-1,))
        context.tokens.append(ids[at + 1])
        context.verification = Verification(
            number, False, root, (0,), ids[at + 1], logits[at : at + 1], rows(at, at + 1)
        )


def output_logits(target: Target, states: Tensor) -> Tensor:
    """Return the target's logits from its last hidden states, ``[tokens, hidden] -> [tokens, vocab]``.

    A soft cap that some models put on them is left out: it moves no token past another.
    """
    output: Any = target.model.get_output_embeddings()
    return F.linear(states.to(output.weight.dtype), output.weight, getattr(output, "bias", None))


def numbers(replayed: Replayed) -> dict[str, Any]:
    """Return what a replay says of one strategy.

    Returns:
        ``positions``; ``mean_accepted_drafts`` over positions, each as likely as any other, so it is not the mean over
        an engine's rounds; ``mean_nodes``; ``acceptance_by_depth`` as ``metrics`` defines it; ``acceptance_by_rank``:
        ``[depths][ranks]`` of the share that was right among nodes whose parent was; ``calibration``: per bin of
        confidence its mean, the share that was right and the number of nodes, and ``calibration_error``: the mean
        distance of the two over nodes; null for a strategy without confidences; ``by_category``.
    """
    row = {"accepted_per_round": replayed.accepted, "proposed_per_round": replayed.proposed}
    bins = calibration(replayed.confidences)
    nodes = sum(one["nodes"] for one in bins)
    error = sum(one["nodes"] * abs(one["mean_confidence"] - one["share_right"]) for one in bins)
    by_category: dict[str, list[int]] = {}
    for category, accepted in zip(replayed.categories, replayed.accepted, strict=True):
        by_category.setdefault(category, []).append(accepted)
    return {
        "positions": len(replayed.accepted),
        "mean_accepted_drafts": ratio(sum(replayed.accepted), len(replayed.accepted)),
        "mean_nodes": ratio(sum(replayed.nodes), len(replayed.nodes)),
        "acceptance_by_depth": metrics.acceptance_by_depth([row]),
        "acceptance_by_rank": _by_rank(replayed.ranks),
        "calibration": bins or None,
        "calibration_error": ratio(error, nodes),
        "by_category": {name: sum(own) / len(own) for name, own in sorted(by_category.items())},
    }


def _by_rank(ranks: dict[tuple[int, int], list[int]]) -> list[list[float | None]]:
    depths = max((depth for depth, _ in ranks), default=0)
    widths = [max((rank for depth, rank in ranks if depth == level), default=0) for level in range(1, depths + 1)]
    return [
        [ratio(*ranks.get((level, rank), [0, 0])) for rank in range(1, width + 1)]
        for level, width in enumerate(widths, start=1)
    ]


def calibration(confidences: Sequence[tuple[float, bool]]) -> list[dict[str, Any]]:
    """Return, for each bin of confidence that has nodes, what was believed and what was so."""
    binned: dict[int, list[tuple[float, bool]]] = {}
    for believed, right in confidences:
        binned.setdefault(min(int(believed * CONFIDENCE_BINS), CONFIDENCE_BINS - 1), []).append((believed, right))
    return [
        {
            "mean_confidence": sum(believed for believed, _ in own) / len(own),
            "share_right": sum(right for _, right in own) / len(own),
            "nodes": len(own),
        }
        for _, own in sorted(binned.items())
    ]


def disagreement(replayed: dict[str, Replayed]) -> dict[str, Any]:
    """Return where strategies differ, over positions that all were asked at.

    Returns:
        ``first_right_alone``: ``{a: {b: share}}`` of positions where *a* had the next token in its tree and *b* had
        not; ``any_right``: share where at least one had it; ``none_right``: the rest; ``best_of_all``: mean accepted
        drafts of whichever strategy is best at each position, which no choice between them can exceed.
    """
    names, count = list(replayed), len(next(iter(replayed.values())).accepted)
    right = {name: [accepted > 0 for accepted in one.accepted] for name, one in replayed.items()}
    alone = {
        a: {b: ratio(sum(x and not y for x, y in zip(right[a], right[b], strict=True)), count) for b in names if b != a}
        for a in names
    }
    together = list(zip(*right.values(), strict=True))
    best = [max(found) for found in zip(*(one.accepted for one in replayed.values()), strict=True)]
    return {
        "first_right_alone": alone,
        "any_right": ratio(sum(any(one) for one in together), count),
        "none_right": ratio(sum(not any(one) for one in together), count),
        "best_of_all": ratio(sum(best), count),
    }
