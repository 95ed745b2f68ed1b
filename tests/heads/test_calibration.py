"""Probabilities of heads against what the target takes: the line, its fit, and where it is used."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_lab.distill.calibrating import calibration_numbers, fitted_lines, lines_of, odds_counts
from specdec_lab.distill.hits import HitCounter, Ranked
from specdec_lab.errors import InputError
from specdec_lab.heads.calibration import AT_ITS_WORD, Calibration, stated_calibration

LINES = ((1.0, math.log(2)), (2.0, 0.0))


def test_a_chance_by_hand():
    """Odds of 1 to 3 are doubled at the first depth, squared at all others."""
    line = Calibration(LINES)
    assert line.chance(0.25, 1) == pytest.approx(2 / (2 + 3))
    assert line.chance(0.25, 2) == line.chance(0.25, 7) == pytest.approx(1 / (1 + 9))
    assert line.chance(0.0, 1) == 0
    assert 0.999 < line.chance(1.0, 1) < 1
    assert AT_ITS_WORD.chance(0.25, 3) == 0.25


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 4))
def test_the_likelier_draft_stays_the_likelier(one: float, other: float, depth: int):
    line = Calibration(LINES)
    low, high = sorted((one, other))
    assert 0 <= line.chance(low, depth) <= line.chance(high, depth) <= 1


@pytest.mark.parametrize(
    "stated",
    [
        "much",
        [1.0, 0.0],
        [[1.0]],
        [[0.0, 0.0]],
        [[1.0, math.inf]],
        [[math.nan, 0.0]],
        [[1.0, "0"]],
        [[-1.0, 0.0]],
        [[60.0, 0.0]],
        [[1.0, -11]],
        [[10**400, 0]],
        [[True, 0.0]],
        {"a": 1},
    ],
    ids=str,
)
def test_what_is_no_calibration_is_refused(stated: Any):
    """A slope that is not above zero would turn the order of drafts around; a large one would overflow in decoding."""
    with pytest.raises(InputError, match="model='some/where': its calibration has to be a slope"):
        stated_calibration({"calibration": stated}, "model", "some/where")


@pytest.mark.parametrize("line", [(10.0, 10.0), (10.0, -10.0), (0.1, 10.0), (0.1, -10.0)])
def test_the_farthest_lines_stay_within_bounds(line: tuple[float, float]):
    for probability in (5e-324, 1e-30, 0.5, 1 - 1e-16, 1.0):
        assert 0 <= Calibration((line,)).chance(probability, 1) <= 1


def test_heads_from_elsewhere_are_taken_at_their_word():
    assert stated_calibration({}, "head", "x") is AT_ITS_WORD
    assert stated_calibration({"calibration": []}, "head", "x") == AT_ITS_WORD
    assert stated_calibration({"calibration": [[1.5, 0.25]]}, "head", "x").lines == ((1.5, 0.25),)


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (1.0, 0.6), (0.7, -0.3), (1.6, 1.0)])
def test_the_line_that_made_the_counts_is_found(slope: float, offset: float):
    """Also from several batches that are added up; a depth with few drafts has no line, nor have those below it."""
    generator = torch.Generator().manual_seed(0)
    sums: dict[str, float] = {"hits/depth1/top1": 3.0}
    for _ in range(4):
        odds = 3 * torch.randn(20_000, generator=generator) - 1
        right = torch.rand(20_000, generator=generator) < torch.sigmoid(slope * odds + offset)
        drafts = {1: Ranked(odds, right), 2: Ranked(odds[:30], right[:30]), 3: Ranked(odds, right)}
        for name, count in odds_counts(drafts).items():
            sums[name] = sums.get(name, 0) + count
    lines = fitted_lines(sums)
    assert lines == [(pytest.approx(slope, abs=0.05), pytest.approx(offset, abs=0.05))]
    row = {"loss": 1.0, **calibration_numbers(lines)}
    assert lines_of(row) == [list(lines[0])]
    assert lines_of({"loss": 1.0}) == []


def test_always_right_or_wrong_is_no_certainty():
    """Log-odds without an end, or a slope that turns the order around, are kept within bounds."""
    odds = torch.linspace(-20, 20, 1000)
    for right in (torch.ones(1000, dtype=torch.bool), torch.zeros(1000, dtype=torch.bool), odds < 0):
        ((slope, offset),) = fitted_lines(odds_counts({1: Ranked(odds, right)}))
        assert stated_calibration({"calibration": [[slope, offset]]}, "head", "x").lines


def test_what_is_no_number_is_no_choice():
    """A NaN was counted into a bin far out, and a line of its own was fitted to it."""
    odds = torch.full((2000,), math.nan)
    assert odds_counts({1: Ranked(odds, odds > 0)}) == {}


def test_only_places_with_the_targets_likeliest_tokens_are_counted():
    """A sampled token does not say whether the target's first choice was foreseen, nor does what comes after it."""
    counter = HitCounter(torch.zeros(1, 4, dtype=torch.bool))
    everywhere, logits = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[2.0, 1.0, 0.0]]).expand(4, 3)
    labels, greedy = torch.tensor([0, 2, 1, -1]), torch.tensor([True, False, True, True])
    counter.count(1, everywhere, logits, labels, greedy)
    ranked = counter.ranked[1]
    assert ranked.right.tolist() == [True, False, False, False, True, False, False, False, False]
    assert ranked.log_odds[:3].tolist() == pytest.approx(torch.logit(logits[0].softmax(-1)).tolist(), abs=1e-5)
    counter.count(2, everywhere, logits, labels, torch.tensor([False, True, True, True]))
    assert counter.ranked[2].right.tolist() == [False, True, False, False, False, False]  # the third and fourth place
    counter.count(3, everywhere, logits, labels)
    assert set(counter.ranked) == {1, 2}
