"""Cost formulas against hand-worked values and against each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_lab.cost import (
    best_chain_length,
    break_even_acceptance,
    chain_speedup,
    expected_emitted,
    rough_best_chain_length,
    rough_chain_speedup,
)


def test_expected_emitted_by_hand():
    """0.5: 1 + 1/2 + 1/4; never a wrong draft: all of them and the bonus token; never a right one: the bonus alone."""
    assert expected_emitted(0.5, 2) == pytest.approx(1.75)
    assert expected_emitted(1.0, 4) == 5
    assert expected_emitted(0.0, 4) == 1


def test_speedup_by_hand():
    """0.8, five drafts at a twentieth: (1 - 0.8^6) / 0.2 over 1.25 is 2.95; the rule of thumb says 4."""
    assert chain_speedup(0.8, 5, 0.05) == pytest.approx(2.951, abs=1e-3)
    assert rough_chain_speedup(0.8, 5, 0.05) == pytest.approx(4.0)


@given(st.floats(0, 0.99), st.integers(1, 12), st.floats(0.001, 1))
def test_the_rule_of_thumb_is_exact_for_one_draft_and_too_high_beyond(acceptance: float, k: int, cost: float):
    """(1 + K a) / (1 + K c) is not the expected speed-up."""
    assert rough_chain_speedup(acceptance, 1, cost) == pytest.approx(chain_speedup(acceptance, 1, cost))
    assert rough_chain_speedup(acceptance, k, cost) >= chain_speedup(acceptance, k, cost) - 1e-9


def test_best_length_is_searched_and_not_the_root():
    """At 0.8 and a twentieth the root says 4; the formula's best is another, and no length beats it."""
    best = best_chain_length(0.8, 0.05, 20)
    assert rough_best_chain_length(0.8, 0.05) == pytest.approx(4.0)
    assert best == 8
    assert all(chain_speedup(0.8, best, 0.05) >= chain_speedup(0.8, k, 0.05) for k in range(1, 21))


def test_break_even_acceptance():
    """One draft pays when it is right more often than it costs; drafts as dear as the target never pay beyond one."""
    assert break_even_acceptance(1, 0.3) == pytest.approx(0.3)
    assert chain_speedup(break_even_acceptance(4, 0.1) or 0, 4, 0.1) == pytest.approx(1.0)
    assert break_even_acceptance(3, 1.0) is None
