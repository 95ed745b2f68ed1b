"""Attention of several steps at once: the fast form for CPUs is the plain one, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from specdec_lab.distill.unrolled import merged_attention, plain_attention


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_the_fused_form_is_the_plain_one(steps: int, tokens: int):
    """A wrong share of the two sets of keys, or a gradient of one alone, would train a head that decodes otherwise."""
    generator = torch.Generator().manual_seed(tokens + steps)
    shape = (2, 3, tokens, 8)
    sizes = (shape, shape, shape, (2, 3, tokens, steps, 8), (2, 3, tokens, steps, 8))
    parts = [torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_() for size in sizes]
    toward = torch.randn(shape, dtype=torch.float64, generator=generator)
    found = []
    for attend in (plain_attention, merged_attention):
        mixed = attend(*parts)
        found.append((mixed, *torch.autograd.grad((mixed * toward).sum(), parts)))
    for plain, merged in zip(*found, strict=True):
        assert plain.abs().sum() > 0
        torch.testing.assert_close(merged, plain, rtol=1e-9, atol=1e-9)


def test_half_precision_is_as_near_to_the_truth_as_the_plain_form():
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 2, 40, 16),) * 3 + ((1, 2, 40, 2, 16),) * 2
    parts = [torch.randn(size, generator=generator) for size in sizes]
    true = plain_attention(*(part.double() for part in parts))
    halves = [part.bfloat16() for part in parts]
    errors = [(attend(*halves).double() - true).abs().max().item() for attend in (plain_attention, merged_attention)]
    assert errors[1] < 1.5 * errors[0]
