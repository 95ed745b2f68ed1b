"""Interleaved comparison: order rotates, ratios are taken within a round."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec_lab.measure.alternate import Sample, alternate, ratio, spread


def test_systems_take_turns_in_rotating_order() -> None:
    """Guards BM-04: no system is always the first one, which pays for warm-up."""
    order: list[str] = []

    def system(name: str, seconds: float) -> Callable[[int], Sample]:
        def run(work: int) -> Sample:
            order.append(f"{name}{work}")
            return Sample(units=work, seconds=seconds)

        return run

    rates = alternate({"a": system("a", 1.0), "b": system("b", 2.0)}, [1, 2], rounds=2)
    assert order == ["a1", "b1", "b2", "a2", "b1", "a1", "a2", "b2"]
    assert rates == {"a": [1.5, 1.5], "b": [0.75, 0.75]}  # 3 units in 2 s and in 4 s


def test_ratio_is_the_median_over_rounds() -> None:
    faster = ratio({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]}, "a", "b")
    assert (faster.median, faster.low, faster.high, faster.count) == (2.0, 1.0, 3.0, 3)


def test_one_measurement_has_no_spread() -> None:
    """Guards BM-08: a spread of a single value is not printed."""
    assert spread([1.25]).text() == "1.25"
    assert spread([1.0, 3.0]).text() == "2.00 (1.00-3.00)"


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no median"):
        spread([])
