"""Distillation losses: pure functions of the target's law and a head's logits, one value per position.

In all of them ``target_probs`` are the target's probabilities, renormalised on the draft vocabulary, and
``draft_logits`` the head's logits over the same ids, both ``[positions, draft_vocab]``; the result is ``[positions]``,
in nats where it is a divergence. The target's law gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdec_lab.errors import InputError

Loss = Callable[[Tensor, Tensor], Tensor]

TINY = 1e-8
"""Added to a probability before its logarithm, so that laws that do not meet give a large number and no infinity."""


def cross_entropy(target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Return ``-sum p log q``: the token loss of EAGLE (arXiv 2401.15077, eq. 4) and EAGLE-3."""
    loss = _CrossEntropy.apply(target_probs, draft_logits)
    assert isinstance(loss, Tensor)
    return loss


def forward_kl(target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Return ``KL(p || q) = sum p (log p - log q)`` (arXiv 1503.02531): the student covers what the teacher may say."""
    return cross_entropy(target_probs, draft_logits) - entropy(target_probs)


def entropy(target_probs: Tensor) -> Tensor:
    """Return ``-sum p log p``, ``[positions]``: without gradient, and a few rows at a time like ``cross_entropy``."""
    found = torch.empty(len(target_probs), dtype=torch.float32, device=target_probs.device)
    smallest = torch.finfo(torch.float32).tiny
    for some in row_chunks(target_probs):
        probs = target_probs[some].detach().float()
        found[some] = -(probs * probs.clamp_min(smallest).log()).sum(dim=-1)
    return found


def reverse_kl(target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Return ``KL(q || p) = sum q (log q - log p)`` (arXiv 2306.08543): the student stays where the teacher is."""
    log_draft = _log(draft_logits)
    return (log_draft.exp() * (log_draft - (target_probs.detach().float() + TINY).log())).sum(dim=-1)


def total_variation(target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Return ``1 - sum min(p, q)``: the probability that rejection sampling rejects (arXiv 2211.17192, cor. 3.6)."""
    return 0.5 * (target_probs.detach().float() - _log(draft_logits).exp()).abs().sum(dim=-1)


def acceptance_nll(target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Return ``-log sum min(p, q)``: the negative log-likelihood of acceptance (arXiv 2602.23881)."""
    overlap = torch.minimum(target_probs.detach().float(), _log(draft_logits).exp()).sum(dim=-1)
    return -(overlap + TINY).log()


def smooth_l1(predicted: Tensor, true: Tensor) -> Tensor:
    """Return the mean over the hidden axis of the smooth L1 distance, as EAGLE regresses features (its eq. 3).

    Args:
        predicted: ``[positions, hidden]``.
        true: the target's own, ``[positions, hidden]``; no gradient.
    """
    return F.smooth_l1_loss(predicted.float(), true.detach().float(), reduction="none").mean(dim=-1)


TOKEN_LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "acceptance_nll": acceptance_nll,
}
"""Token losses by the names that configurations use."""


def check_mix(mix: Mapping[str, float], where: str = "losses") -> None:
    """Refuse a mix of losses that is empty, unknown or negative.

    Raises:
        InputError: names the entry.
    """
    if not mix:
        raise InputError(where, dict(mix), f"name at least one of {', '.join(TOKEN_LOSSES)} with its weight")
    for name, weight in mix.items():
        if name not in TOKEN_LOSSES:
            raise InputError(where, name, f"there is no loss of that name; choose from {', '.join(TOKEN_LOSSES)}")
        if not weight > 0:
            raise InputError(f"{where}.{name}", weight, "give a weight above 0, or leave the loss out")


def mixed(mix: Mapping[str, float], target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the weighted sum of token losses, ``[positions]``."""
    parts = [weight * TOKEN_LOSSES[name](target_probs, draft_logits) for name, weight in mix.items()]
    return torch.stack(parts).sum(dim=0)


def _log(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that makes its gradient ``softmax(logits) - p`` on the way, a few rows at a time.

    At eight thousand ids, reading and writing rows of probabilities takes as long as the head's own matrix products;
    autograd's chain of operations walks over all of them a dozen times, where here the rows at hand stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, target_probs: Tensor, draft_logits: Tensor) -> Tensor:
        """Return ``[positions]``."""
        loss = torch.empty(len(draft_logits), dtype=torch.float32, device=draft_logits.device)
        slope = torch.empty_like(draft_logits) if ctx.needs_input_grad[1] else None
        for some in row_chunks(draft_logits):
            probs, logits = target_probs[some].float(), draft_logits[some].float()
            most = logits.amax(dim=-1, keepdim=True)
            exponentials = (logits - most).exp_()
            total = exponentials.sum(dim=-1, keepdim=True)
            norm = (most + total.log())[:, 0]
            loss[some] = norm - (probs * logits).sum(dim=-1)
            if slope is not None:
                slope[some] = exponentials.div_(total).sub_(probs)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:
        """Return the gradient of the logits alone."""
        (slope,) = ctx.saved_tensors
        if slope is None:
            return None, None
        scaled = torch.empty_like(slope)
        for some in row_chunks(slope):
            scaled[some] = slope[some] * grads[0][some, None]
        return None, scaled


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of ``[positions, draft_vocab]`` that are worked on at once: all of them off the CPU."""
    rows, ids = logits.shape
    at_once = max(1, rows if logits.device.type != "cpu" else CACHED_NUMBERS // ids)
    for start in range(0, rows, at_once):
        yield slice(start, start + at_once)


CACHED_NUMBERS = 2**17
"""Logits whose gradient is made at once on a CPU: half a megabyte of float32, and a few such buffers."""
