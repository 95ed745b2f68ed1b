"""The baseline: no drafts, so that each round is one plain decoding step through the same loop."""

from __future__ import annotations

from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, root_only


class AutoregressiveDrafter(Drafter):
    """Proposes nothing: a tree of one node."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, max_nodes=1)

    def propose(self, context: DraftContext) -> DraftTree:
        """Return the root alone."""
        return root_only(context.tokens[-1])
