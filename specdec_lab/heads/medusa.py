"""Medusa heads (arXiv 2401.10774): each predicts one token further ahead from the same hidden state of the target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_lab.heads.packed import PackedLinear, linear
from specdec_lab.heads.transitions import Transitions
from specdec_lab.heads.vocabulary import DraftVocabulary


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``; with ``W`` and ``b`` at zero it starts as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., hidden]``."""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Heads of residual blocks; head *h* sees the state after token *t* and predicts token *t + 2 + h*.

    Parameter names are those of published checkpoints: ``{head}.{block}.linear.weight``, and
    ``{head}.{blocks}.weight`` for an output layer of its own. A head without one shares the target's output layer.

    Args:
        hidden_size: of the target.
        vocabulary: what they can draft.
        heads: how many.
        blocks: residual blocks per head, each with weights of its own.
        own_output: whether each head has an output layer of its own; otherwise they share the target's.
        sees_root: whether they also see the token after that state, token *t + 1*, which is known when they draft.

    Attributes:
        root: what its embedding, scaled to a root mean square of 1, adds to the state, ``[hidden, hidden]``, at zero in
            the beginning; ``None`` where it is not seen, as in the paper.
        transitions: which tokens follow which, for heads that were trained beside that; their laws alone are no drafts.
    """

    feature_layers: tuple[int, ...] = (-1,)

    def __init__(
        self,
        hidden_size: int,
        vocabulary: DraftVocabulary,
        heads: int,
        blocks: int,
        own_output: bool = False,
        sees_root: bool = False,
    ) -> None:
        def one() -> nn.ModuleList:
            parts: list[nn.Module] = [ResidualBlock(hidden_size) for _ in range(blocks)]
            if own_output:
                parts.append(nn.Linear(hidden_size, len(vocabulary), bias=False))
            return nn.ModuleList(parts)

        super().__init__(one() for _ in range(heads))
        self.hidden_size, self.vocabulary = hidden_size, vocabulary
        self.heads, self.blocks, self.own_output = heads, blocks, own_output
        self.root = nn.Parameter(torch.zeros(hidden_size, hidden_size)) if sees_root else None
        self.transitions: Transitions | None = None

    def begin(self, hidden: Tensor, root: Tensor) -> Tensor:
        """Return what heads that see the root start from, ``[..., hidden]``; others start from the states.

        Args:
            hidden: the target's last hidden states, ``[..., hidden]``.
            root: the target's embeddings of the tokens that followed them, ``[..., hidden]``.
        """
        assert self.root is not None
        alike = F.rms_norm(root.float(), root.shape[-1:], eps=1e-6)  # embeddings can be far smaller than states
        return hidden + F.linear(alike.to(hidden.dtype), self.root)

    def state(self, at: int, hidden: Tensor) -> Tensor:
        """Return what one head makes of what they start from, ``[..., hidden]``."""
        head = self[at]
        assert isinstance(head, nn.ModuleList)
        for block in head[: self.blocks]:
            hidden = block(hidden)
        return hidden

    def one(self, at: int, hidden: Tensor, shared_output: Tensor | PackedLinear) -> Tensor:
        """Return one head's logits, ``[..., draft_vocab]``; see ``logits``."""
        state = self.state(at, hidden)
        if self.own_output:
            return self[at][self.blocks](state)  # pyright: ignore[reportIndexIssue]
        return linear(state, shared_output)

    def logits(self, hidden: Tensor, shared_output: Tensor | PackedLinear) -> Tensor:
        """Return all heads' logits, ``[..., heads, draft_vocab]``.

        Args:
            hidden: what they start from, ``[..., hidden]``.
            shared_output: the target's output layer at the draft vocabulary, ``[draft_vocab, hidden]``, in the dtype of
                what they start from; read only by heads without an output layer of their own.
        """
        if self.own_output:
            return torch.stack([self.one(at, hidden, shared_output) for at in range(self.heads)], dim=-2)
        states = torch.stack([self.state(at, hidden) for at in range(self.heads)], dim=-2)
        return linear(states, shared_output)  # reads the output layer once for all heads
