"""Medusa heads trained together with a LoRA adapter of the target (Medusa-2)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specdec_lab.distill import losses as token_losses
from specdec_lab.distill.batch import Batch, ahead
from specdec_lab.distill.learner import Outcome
from specdec_lab.distill.learners.medusa import MedusaLearner
from specdec_lab.heads.formats import save_head
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.target import Target
from specdec_lab.targets.adapter import Adapter

ADAPTER = "adapter"
"""Folder beside the heads' weights, for ``target.adapter``."""


class Medusa2Learner(MedusaLearner):
    """Medusa-2 (arXiv 2401.10774, sections 2.2.2 and 2.3.2): the target bends towards what its heads can foresee.

    Loss: that of the heads on the adapted target's states, times ``heads_weight``, and a term that holds the adapted
    target to the law of the one without adapter (self-distillation: KL(original || adapted)). The original is the
    same model with its adapter off, so no second copy is held.

    The target that decodes is the adapted one: texts are its own, and no longer those of the model without.

    The paper trains the heads alone first: ``start`` names the folder of such heads, beside which the adapter starts
    from no change at all. Without it both start together.

    Args:
        rank: of the adapter, on every linear layer but the output layer.
        scale: what its changes are multiplied with.
        heads_weight: of the heads' loss.
        heads: and what follows: see ``MedusaLearner``.
    """

    whole_start = False
    shardable = False  # the adapter's weights are also held by the target's layers, which would keep the old ones

    def __init__(
        self,
        target: Target,
        counts: Tensor,
        *,
        rank: Annotated[int, Field(ge=1, le=256)] = 16,
        scale: Annotated[float, Field(gt=0)] = 2.0,
        heads_weight: Annotated[float, Field(gt=0)] = 0.2,
        heads: Annotated[int, Field(ge=1, le=16)] = 4,
        blocks: Annotated[int, Field(ge=1, le=8)] = 1,
        own_output: bool = False,
        draft_vocab: Annotated[int, Field(ge=1)] | None = 8192,
        decay: Annotated[float, Field(gt=0, le=1)] = 0.8,
        losses: dict[str, float] | None = None,
        root: bool = False,
        transitions: Annotated[float, Field(ge=0, le=2)] = 0.0,
    ) -> None:
        super().__init__(
            target,
            counts,
            heads=heads,
            blocks=blocks,
            own_output=own_output,
            draft_vocab=draft_vocab,
            decay=decay,
            losses=losses,
            root=root,
            transitions=transitions,
        )
        self.heads_weight = heads_weight
        self.head = nn.ModuleDict({"heads": self.head, ADAPTER: Adapter(target.model, rank, scale)})

    def forward(self, batch: Batch) -> Outcome:
        """Return the sums of the heads' losses on the adapted states, and of the divergence from the original's law."""
        with self._adapter().on():
            adapted = self.target.states(batch.ids, batch.lengths, (-1,), differentiable=True)[-1]
        held = self._divergence(batch, adapted)
        heads = self._forward_heads(batch, adapted)
        total = self.heads_weight * heads.loss + held
        return replace(heads, loss=total, parts={**heads.parts, "target/forward_kl": held.detach()})

    def serving(self) -> AbstractContextManager[None]:
        """Let the target decode with the adapter."""
        return self._adapter().on()

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the heads in their published layout, and the adapter in peft's beside them."""
        save_head(self._heads(), folder, provenance)
        self._adapter().save(folder / ADAPTER)

    def _divergence(self, batch: Batch, adapted: Tensor) -> Tensor:
        """Return the sum of KL(original || adapted) over the labels, on all ids."""
        output = self.target.model.get_output_embeddings()
        assert output is not None
        weight = output.weight.detach()
        marked = ahead(batch.supervised, 1)
        original = F.linear(batch.features[-1][marked].to(weight.dtype), weight).float().softmax(dim=-1)
        logits = F.linear(adapted[marked].to(weight.dtype), weight)
        return token_losses.forward_kl(original, logits).sum()

    def _heads(self) -> MedusaHeads:
        assert isinstance(self.head, nn.ModuleDict)
        heads = self.head["heads"]
        assert isinstance(heads, MedusaHeads)
        return heads

    def _adapter(self) -> Adapter:
        assert isinstance(self.head, nn.ModuleDict)
        adapter = self.head[ADAPTER]
        assert isinstance(adapter, Adapter)
        return adapter
