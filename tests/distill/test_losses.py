"""Losses against values worked by hand and gradients against finite differences."""

import math

import pytest
import torch
from torch import Tensor

from specdec_lab.distill import losses
from specdec_lab.errors import InputError

TARGET_PROBS = [0.5, 0.3, 0.2]
DRAFT_PROBS = [0.7, 0.2, 0.1]


def row(probs: list[float]) -> Tensor:
    return torch.tensor([probs], dtype=torch.float64)


def by_hand(name: str) -> float:
    pairs = list(zip(TARGET_PROBS, DRAFT_PROBS, strict=True))
    return {
        "cross_entropy": -sum(p * math.log(q) for p, q in pairs),
        "forward_kl": sum(p * math.log(p / q) for p, q in pairs),
        "reverse_kl": sum(q * math.log(q / p) for p, q in pairs),
        "total_variation": 0.2,  # (|-0.2| + 0.1 + 0.1) / 2
        "acceptance_nll": -math.log(0.8),  # 0.5 + 0.2 + 0.1
    }[name]


@pytest.mark.parametrize("name", losses.TOKEN_LOSSES)
def test_value_worked_by_hand(name: str):
    found = losses.TOKEN_LOSSES[name](row(TARGET_PROBS), row(DRAFT_PROBS).log())
    assert found.item() == pytest.approx(by_hand(name), rel=1e-5)


@pytest.mark.parametrize("name", losses.TOKEN_LOSSES)
def test_gradient_is_that_of_finite_differences(name: str):
    teacher, student = torch.randn(2, 5).softmax(dim=-1), torch.randn(2, 5, requires_grad=True)
    loss = losses.TOKEN_LOSSES[name]
    loss(teacher, student).sum().backward()
    assert student.grad is not None
    step = 1e-3
    for row, column in ((0, 0), (1, 3)):
        moved = torch.zeros(2, 5)
        moved[row, column] = step
        with torch.no_grad():
            slope = (loss(teacher, student + moved) - loss(teacher, student - moved)).sum() / (2 * step)
        assert student.grad[row, column].item() == pytest.approx(slope.item(), abs=2e-3)


@pytest.mark.parametrize("name", losses.TOKEN_LOSSES)
def test_teacher_gets_no_gradient(name: str):
    """CF-02: a target that is trained by accident."""
    teacher = torch.randn(2, 5).softmax(dim=-1).requires_grad_()
    losses.TOKEN_LOSSES[name](teacher, torch.randn(2, 5, requires_grad=True)).sum().backward()
    assert teacher.grad is None


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "total_variation", "acceptance_nll"])
def test_nothing_to_lose_between_equal_laws(name: str):
    logits = torch.randn(4, 7)
    assert (
        losses.TOKEN_LOSSES[name](logits.softmax(dim=-1), logits + 3.0).abs().max() < 1e-5
    )  # logits count up to a constant


def test_laws_that_do_not_meet_stay_finite():
    """TD-08: an infinity in one position would spoil the batch."""
    apart = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1e4, 1e4]], requires_grad=True)
    for loss in losses.TOKEN_LOSSES.values():
        apart[1].grad = None
        value = loss(*apart)
        value.sum().backward()
        assert value.isfinite().all()
        assert apart[1].grad is not None
        assert apart[1].grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_cross_entropy_in_pieces_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int):
    """A wrong piece, or a gradient that does not know how much each row counts."""
    monkeypatch.setattr(losses, "CACHED_NUMBERS", 3 * 6)  # three rows of six ids at once
    teacher, logits = torch.randn(rows, 6).softmax(dim=-1), torch.randn(rows, 6).to(dtype)
    counts = torch.rand(rows)
    found, expected = (logits.clone().requires_grad_() for _ in range(2))
    value = losses.cross_entropy(teacher, found)
    plain = -(teacher * expected.float().log_softmax(dim=-1)).sum(dim=-1)
    torch.testing.assert_close(value, plain)
    (value * counts).sum().backward()
    (plain * counts).sum().backward()
    atol, rtol = (1e-6, 1e-5) if dtype is torch.float32 else (1e-3, 1e-2)
    torch.testing.assert_close(found.grad, expected.grad, atol=atol, rtol=rtol)
    with torch.no_grad():
        torch.testing.assert_close(losses.cross_entropy(teacher, logits), plain.detach())


def test_cross_entropy_of_nothing_on_another_device():
    """A process without labels keeps step with the others, on whatever device."""
    teacher, logits = torch.empty(0, 4, device="meta"), torch.empty(0, 4, device="meta", requires_grad=True)
    losses.cross_entropy(teacher, logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 4)


def test_smooth_l1_worked_by_hand():
    predicted, true = torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 0.0]])
    assert losses.smooth_l1(predicted, true).item() == pytest.approx((0.5 * 0.25 + 2.5) / 2)


def test_mix_adds_weighted_losses():
    teacher, student = torch.randn(3, 6).softmax(dim=-1), torch.randn(3, 6)
    both = losses.mixed({"forward_kl": 2.0, "total_variation": 0.5}, teacher, student)
    alone = 2 * losses.forward_kl(teacher, student) + 0.5 * losses.total_variation(teacher, student)
    assert torch.allclose(both, alone)


@pytest.mark.parametrize(
    ("mix", "field"), [({}, "losses"), ({"kl": 1.0}, "losses"), ({"forward_kl": 0.0}, "losses.forward_kl")]
)
def test_a_mix_that_cannot_be_is_refused(mix: dict[str, float], field: str):
    with pytest.raises(InputError) as error:
        losses.check_mix(mix)
    assert error.value.field == field
