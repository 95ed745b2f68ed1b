"""How much a head has seen, its beginnings included."""

from __future__ import annotations

import pytest

from specdec_lab.heads.facts import training_tokens


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"trained_on": {"labels": 7.0}}, 7),
        ({"trained_on": {"labels": 7}, "started_from": None}, 7),
        ({"trained_on": {"labels": 7}, "started_from": {"trained_on": {"labels": 5}}}, 12),
        ({"trained_on": {"labels": 7}, "started_from": {}}, None),
        ({}, None),
        ({"trained_on": "much"}, None),
    ],
)
def test_training_tokens(facts: dict, expected: int | None):
    """A head that began at another has seen that one's labels too; what is not said is not counted as nothing."""
    assert training_tokens(facts) == expected
