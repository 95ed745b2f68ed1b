"""Every outcome once, with its probability."""

from __future__ import annotations

import pytest
import torch

from specdec_lab.audit.enumeration import EnumeratedNoise, TooManyOutcomesError, as_law, outcomes, total_variation


def test_all_outcomes_come_once_and_their_probabilities_add_up():
    law = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)

    def run(noise: EnumeratedNoise) -> tuple[object, ...]:
        first = noise.draw(law)
        if first == 2:
            return first, noise.happens(0.25), noise.happens(1.0), noise.happens(0.0)
        return (first, noise.draw(law)) if first == 3 else (first,)

    found = list(outcomes(run))
    assert dict(found) == pytest.approx(
        {
            (0,): 0.5,
            (2, True, True, False): 0.075,
            (2, False, True, False): 0.225,
            (3, 0): 0.1,
            (3, 2): 0.06,
            (3, 3): 0.04,
        }
    )
    assert len(found) == 6


def test_what_needs_no_chance_has_one_outcome():
    assert list(outcomes(lambda noise: noise.happens(1.5))) == [(True, 1.0)]


def test_too_many_outcomes_are_said():
    with pytest.raises(TooManyOutcomesError, match="more than 7"):
        list(outcomes(lambda noise: [noise.happens(0.5) for _ in range(3)], limit=7))
    assert len(list(outcomes(lambda noise: [noise.happens(0.5) for _ in range(3)], limit=8))) == 8


def test_total_variation():
    assert total_variation({"a": 0.5, "b": 0.5}, {"b": 0.5, "c": 0.5}) == 0.5
    assert total_variation({"a": 1.0}, {"b": 1.0}) == 1.0
    assert as_law([1.0, 3.0]).tolist() == [0.25, 0.75]
