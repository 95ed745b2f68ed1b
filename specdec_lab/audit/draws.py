"""Whether drafts that were drawn at random have the law that is handed on with them, on any target."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scipy.stats import kstest
from torch import Tensor

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree
from specdec_lab.verify import Acceptance, checked_draft_probs, next_draft_probs


class RecordingDrafter(Drafter):
    """Another strategy whose trees are looked at on their way."""

    def __init__(self, inner: Drafter, record: Callable[[DraftTree], None]) -> None:
        super().__init__(inner.target, max_nodes=inner.max_nodes)
        self.inner, self.record = inner, record
        self.feature_layers, self.lossless, self.draws = inner.feature_layers, inner.lossless, inner.draws

    def allocate(self, rows: int, tokens: int) -> None:
        """Make room for the other strategy."""
        self.inner.allocate(rows, tokens)

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the other strategy's tree."""
        return self.propose_batch([context])[0]

    def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """Return the other strategy's trees."""
        trees = self.inner.propose_batch(contexts)
        for tree in trees:
            self.record(tree)
        return trees


def draw_test(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    sampling: SamplingParams,
    acceptance: Acceptance,
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Test the drafts of some answers against their stated laws.

    A draft's place in its law is the mass of what is likelier, and a random part of its own: uniform if the draft has
    that law, and shifted if it was drawn from a sharper or flatter one. The places of all drafts are compared with the
    uniform law (Kolmogorov-Smirnov).

    Returns:
        ``drafts`` and ``p_value``, which is ``None`` without drafts.
    """
    places: list[float] = []
    rng = random.Random(sampling.seed)
    watched = RecordingDrafter(drafter, lambda tree: places.extend(places_in_law(tree, target.vocab_size, rng)))
    for event in speculative_decode(target, watched, requests, sampling=sampling, acceptance=acceptance):
        if event.generation is not None:
            on_answer()
    return {"drafts": len(places), "p_value": float(kstest(places, "uniform").pvalue) if places else None}


def places_in_law(tree: DraftTree, vocab_size: int, rng: random.Random) -> Iterator[float]:
    """Yield each drawn node's place in the law that its parent states, in [0, 1]."""
    if tree.draft_probs is None:
        return
    laws = checked_draft_probs(tree, vocab_size)
    for node, children in enumerate(tree.children):
        law: Tensor = laws[node]
        for child in children:
            token = tree.tokens[child]
            before = law > law[token]
            before[:token] |= law[:token] == law[token]
            yield float(law[before].sum()) + rng.random() * float(law[token])
            law = next_draft_probs(tree, law, token)
