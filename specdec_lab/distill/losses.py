"""Distillation losses: pure functions of two rows of logits, one value per position.

In all of them ``teacher_logits`` and ``student_logits`` are ``[positions, vocab]`` over the same ids, and the result is
``[positions]``, in nats where it is a divergence. The teacher gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.errors import InputError

Loss = Callable[[Tensor, Tensor], Tensor]

TINY = 1e-8
"""Added to a probability before its logarithm, so that laws that do not meet give a large number and no infinity."""


def cross_entropy(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return ``-sum p log q``: the token loss of EAGLE (arXiv 2401.15077, eq. 4) and EAGLE-3."""
    student = student_logits.float()
    return student.logsumexp(dim=-1) - (_law(teacher_logits) * student).sum(dim=-1)  # without a copy of log q


def forward_kl(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return ``KL(p || q) = sum p (log p - log q)`` (arXiv 1503.02531): the student covers what the teacher may say."""
    target_probs = _law(teacher_logits)
    return (target_probs * (_log(teacher_logits).detach() - _log(student_logits))).sum(dim=-1)


def reverse_kl(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return ``KL(q || p) = sum q (log q - log p)`` (arXiv 2306.08543): the student stays where the teacher is."""
    log_draft = _log(student_logits)
    return (log_draft.exp() * (log_draft - _log(teacher_logits).detach())).sum(dim=-1)


def total_variation(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return ``1 - sum min(p, q)``: the probability that rejection sampling rejects (arXiv 2211.17192, cor. 3.6)."""
    return 0.5 * (_law(teacher_logits) - _log(student_logits).exp()).abs().sum(dim=-1)


def acceptance_nll(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return ``-log sum min(p, q)``: the negative log-likelihood of acceptance (arXiv 2602.23881)."""
    overlap = torch.minimum(_law(teacher_logits), _log(student_logits).exp()).sum(dim=-1)
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


def mixed(mix: Mapping[str, float], teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return the weighted sum of token losses, ``[positions]``."""
    parts = [weight * TOKEN_LOSSES[name](teacher_logits, student_logits) for name, weight in mix.items()]
    return torch.stack(parts).sum(dim=0)


def _law(teacher_logits: Tensor) -> Tensor:
    return teacher_logits.detach().float().softmax(dim=-1)


def _log(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1)
