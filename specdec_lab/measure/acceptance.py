"""Acceptance rules on the real laws of a target: the same drawn chains, what each rule accepts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from specdec_lab.audit.enumeration import EnumeratedNoise, outcomes
from specdec_lab.choices import Choices, SequenceRule
from specdec_lab.noise import Chance, HashedNoise
from specdec_lab.report.charts import styled
from specdec_lab.sampling import Processing, SamplingParams
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, chain, root_only
from specdec_lab.verify import Walk, reject, traverse

DRAFT_TEMPERATURE = 1.5
"""The draft law is that of the target at this temperature: a draft that is good, and measurably not the target."""

ROOT_DRAWS = 200
"""Drafts that are drawn at the root of each chain, to count how many are rejected."""

STEP = 8
"""Tokens of plain text between two contexts."""


class _DecisionsAlone:
    """Enumerates what is accepted, and not which token follows: 2 outcomes each in place of one per token."""

    def __init__(self, noise: EnumeratedNoise) -> None:
        self._noise = noise

    def happens(self, probability: float) -> bool:
        return self._noise.happens(probability)

    def draw(self, law: Tensor) -> int:
        return int(law.argmax())


@dataclass(frozen=True)
class ChainAcceptance:
    """Expected accepted drafts of one drawn chain under each rule, and how near the two laws are at its root.

    Attributes:
        overlap: sum of the smaller of both probabilities at the root; 1 less it is their total variation.
        root_rejected: share of ``ROOT_DRAWS`` drafts that were drawn there and rejected.
    """

    rejection: float
    block: float
    picked: float
    overlap: float
    root_rejected: float


def expected_accepted(
    rule: Callable[[DraftTree, Callable[[int], Tensor], Chance], Walk], tree: DraftTree, laws: Sequence[Tensor]
) -> float:
    """Return the mean number of drafts of a fixed tree that a rule accepts, over all its decisions."""
    found = outcomes(lambda noise: len(rule(tree, lambda node: laws[node], _DecisionsAlone(noise))[0]) - 1)
    return sum(accepted * probability for accepted, probability in found)


def measure_acceptance(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    k: int,
    contexts_per_prompt: int = 3,
    on_chain: Callable[[], None] = lambda: None,
) -> list[ChainAcceptance]:
    """Draw chains of ``k`` drafts along plain samples of each prompt, and compare the rules on them.

    The target samples at temperature 1; drafts are drawn from its law at ``DRAFT_TEMPERATURE``.
    """
    found = []
    noise, plain = HashedNoise(0), SamplingParams(1.0)
    processing, warm = Processing(plain, target), SamplingParams(DRAFT_TEMPERATURE)
    for number, prompt in enumerate(prompts):
        target.allocate(1, len(prompt) + STEP * contexts_per_prompt + 1, k + 1)
        logits = target.prefill(0, prompt).row_logits(0)[-1]
        text = list(prompt)
        for _ in range(contexts_per_prompt):
            for _ in range(STEP):
                text.append(noise.target_token(logits.float(), (number, len(text))))
                output = target.forward({0: root_only(text[-1])})
                logits = output.row_logits(0)[-1]
                target.commit({0: (0,)})
            found.append(_one_chain(target, text, logits, k, noise.chance((number, len(text))), processing, warm))
            on_chain()
    return found


def _one_chain(
    target: Target,
    text: Sequence[int],
    logits: Tensor,
    k: int,
    chance: Chance,
    processing: Processing,
    draft_sampling: SamplingParams,
) -> ChainAcceptance:
    """Draw a chain behind a text whose last token is in the cache, whose row is as before afterwards."""
    rows, drafts, draft_laws = [logits], [], []
    for _ in range(k):
        law = (rows[-1].float() / draft_sampling.temperature).double().softmax(dim=-1).cpu()
        draft_laws.append(law)
        drafts.append(chance.draw(law))
        tree = chain(drafts[0], drafts[1:])
        rows = [logits, *target.forward({0: tree}).row_logits(0)]  # verifies the chain so far: K forwards in all
    tree = chain(text[-1], drafts, torch.stack([*draft_laws, draft_laws[-1]]))
    rule = SequenceRule(processing, text, 1, (), target.device)
    choices = Choices(tree, torch.stack(rows), len(text), rule, HashedNoise(0), greedy=False)
    laws = [choices.law(node) for node in range(len(tree))]
    picked = [float(laws[node][token]) for node, token in enumerate(drafts)]
    return ChainAcceptance(
        rejection=expected_accepted(reject, tree, laws),
        block=expected_accepted(traverse, tree, laws),
        picked=sum(_products(picked)),
        overlap=float(torch.minimum(laws[0], draft_laws[0]).sum()),
        root_rejected=rejected_share(laws[0], draft_laws[0], text),
    )


def rejected_share(target_probs: Tensor, draft_probs: Tensor, text: Sequence[int]) -> float:
    """Return how many of ``ROOT_DRAWS`` drafts, drawn from a law behind a text, the target's law rejects."""
    noise, refused = HashedNoise(1), 0
    both = torch.stack([draft_probs, draft_probs])
    for draw in range(ROOT_DRAWS):
        chance = noise.chance((*text, draw))
        tree = chain(text[-1], [chance.draw(draft_probs)], both)
        refused += len(reject(tree, lambda node: target_probs, chance)[0]) == 1
    return refused / ROOT_DRAWS


def draw_identity(chains: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the share of rejected drafts against the total variation of both laws: they are one number."""
    with styled():
        figure = Figure(figsize=(4.2, 4.0), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="#555555", linewidth=0.8)
        axes.plot([1 - one["overlap"] for one in chains], [one["root_rejected"] for one in chains], "o", markersize=3)
        axes.set(xlabel="total variation of target and draft", ylabel=f"rejected, of {ROOT_DRAWS} drawn drafts")
        figure.savefig(path)


def _products(values: Sequence[float]) -> Iterator[float]:
    product = 1.0
    for value in values:
        product *= value
        yield product


def acceptance_table(chains: Sequence[ChainAcceptance], k: int) -> Table:
    """Render the means."""
    table = Table("rule", "accepted drafts per round", title=f"{len(chains)} drawn chains of {k}, same chains for all")
    for name in ("rejection", "block", "picked"):
        shown = "walk, as if picked" if name == "picked" else name
        table.add_row(shown, f"{mean(getattr(one, name) for one in chains):.3f}")
    apart = mean(abs(one.root_rejected - (1 - one.overlap)) for one in chains)
    table.caption = (
        f"overlap of both laws at the root: {mean(one.overlap for one in chains):.3f}; of {ROOT_DRAWS} drafts drawn at "
        f"each root the rejected share was {apart:.3f} from their total variation, in the mean"
    )
    return table
