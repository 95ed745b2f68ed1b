"""Medusa heads, on a frozen target (Medusa-1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from specdec_lab.distill import losses as token_losses
from specdec_lab.distill.batch import Batch, Example, ahead
from specdec_lab.distill.hits import HitCounter
from specdec_lab.distill.learner import Learner, Outcome
from specdec_lab.distill.learners.recurrent import CROSS_ENTROPY, chosen_vocabulary, covered
from specdec_lab.distill.teacher import Teacher
from specdec_lab.drafters.medusa import MedusaDrafter
from specdec_lab.heads.formats import save_head
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.transitions import Transitions
from specdec_lab.target import Target


class MedusaLearner(Learner):
    """Medusa-1 (arXiv 2401.10774, section 2.2.1): the loss of head *h* is weighted with ``decay ** h``.

    Deviation: the heads learn the teacher's law by default, where the paper takes the text's tokens.

    Args:
        heads: how many tokens ahead, from the second next one.
        blocks: residual blocks per head.
        own_output: whether each head has an output layer of its own; it starts as the target's rows.
        draft_vocab: ids they can draft, the most frequent labels; ``None``: all.
        decay: weight of a head over the one before.
        losses: weights of token losses.
        root: whether the heads also see the token after the state that they read, which is known when they draft; not
            as in the paper. Hydra (arXiv 2402.05109) lets them see the drafts before their own too.
        transitions: weight of which tokens follow which in the training texts, see ``specdec_lab.heads.transitions``;
            the heads then learn what that does not say. 0: heads alone, as in the paper.
    """

    kind = "medusa"

    def __init__(
        self,
        target: Target,
        counts: Tensor,
        *,
        heads: Annotated[int, Field(ge=1, le=16)] = 4,
        blocks: Annotated[int, Field(ge=1, le=8)] = 1,
        own_output: bool = False,
        draft_vocab: Annotated[int, Field(ge=1)] | None = 8192,
        decay: Annotated[float, Field(gt=0, le=1)] = 0.8,
        losses: dict[str, float] | None = None,
        root: bool = False,
        transitions: Annotated[float, Field(ge=0, le=2)] = 0.0,
    ) -> None:
        super().__init__(target)
        self.transitions = transitions
        self.mix = dict(CROSS_ENTROPY if losses is None else losses)
        token_losses.check_mix(self.mix)
        self.vocabulary = chosen_vocabulary(target, counts, draft_vocab)
        self._parts = (SharedParts(target, self.vocabulary),)
        made = MedusaHeads(target.hidden_size, self.vocabulary, heads, blocks, own_output, root)
        if own_output:
            with torch.no_grad():
                for head in made:
                    head[blocks].weight.copy_(self._parts[0].output)  # pyright: ignore[reportIndexIssue]
        self.head: nn.Module = made
        self.decay, self.feature_layers = decay, made.feature_layers
        self.offsets = tuple(2 + head for head in range(heads))

    def count_in(self, examples: Sequence[Example]) -> None:
        """Count which tokens follow which: the labels of the training texts, and what stands before them."""
        if self.transitions:
            texts = ((example.ids, example.supervised) for example in examples)
            self._heads().transitions = Transitions.counted(texts, self.vocabulary, self.transitions)

    def forward(self, batch: Batch) -> Outcome:
        """Return the sums of the losses of all heads."""
        return self._forward_heads(batch, batch.features[-1])

    def _forward_heads(self, batch: Batch, states: Tensor) -> Outcome:
        """Return the sums of the losses of all heads on these states, ``[rows, tokens, hidden]``."""
        heads, parts = self._heads(), self._parts[0]
        teacher = Teacher(batch, parts, self.vocabulary)
        counter = HitCounter(batch.supervised)
        hidden = states.to(next(heads.parameters()).dtype)
        output = parts.output.to(hidden.dtype)
        if heads.root is not None:
            hidden = heads.begin(hidden, parts.embed(ahead(batch.ids, 1)))
        total = torch.zeros((), device=batch.ids.device)
        shown: dict[str, Tensor] = {}
        for at, offset in enumerate(self.offsets):
            rows = teacher.at(offset)
            logits = heads.one(at, hidden[rows.marked], output)
            if self.transitions:
                if heads.transitions is None:
                    raise RuntimeError("no text has been counted yet; call count_in first")
                before = ahead(batch.ids, offset - 1)[rows.marked]
                logits = logits + heads.transitions.log_factors(before, rows.labels if self.training else None)
            loss = token_losses.mixed(self.mix, rows.target_probs, logits).sum()
            shown[f"head{at + 1}/token"] = loss.detach()
            total = total + self.decay**at * loss
            greedy = None if self.training else teacher.takes_likeliest(offset)
            counter.count(at + 1, rows.marked, logits, rows.labels, greedy)
        return Outcome(total, shown, counter.hits, counter.seen, counter.ranked)

    def begin_at(self, head: nn.Module) -> None:
        """Take over other heads; where they do not see the root and these do, it adds nothing in the beginning.

        Raises:
            RuntimeError: they have other weights.
        """
        heads = self._heads()
        unseen = {} if heads.root is None else {"root": torch.zeros_like(heads.root)}
        heads.load_state_dict({**unseen, **head.state_dict()})
        assert isinstance(head, MedusaHeads)
        heads.transitions = head.transitions  # until those of the texts to be learnt are counted

    def tables(self) -> list[nn.Module]:
        """Return the output layers of the heads' own, if they have any."""
        return [head[-1] for head in self._heads() if isinstance(head, nn.ModuleList) and self._heads().own_output]

    def coverage(self, batch: Batch) -> float:
        """Return the share of labels that the draft vocabulary holds."""
        return covered(self.vocabulary, batch)

    def drafter(self, **settings: Any) -> MedusaDrafter:
        """Return the strategy with the heads as they are now."""
        return MedusaDrafter(self.target, head=self._heads(), **settings)

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the heads in their published layout."""
        save_head(self.head, folder, provenance)

    def _heads(self) -> MedusaHeads:
        assert isinstance(self.head, MedusaHeads)
        return self.head
