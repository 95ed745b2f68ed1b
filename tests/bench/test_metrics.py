"""Every number against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_lab.bench import metrics


def row(
    accepted: list[int],
    proposed: list[int] | None = None,
    bonus: list[int] | None = None,
    *,
    decode: float = 1.0,
    prefill: float = 0.5,
    turn: int = 0,
    question_id: int = 0,
    altered: list[int] | None = None,
) -> dict[str, Any]:
    """One successful row whose rounds take equal time; all decode time is spent in verify forwards."""
    proposed = [4] * len(accepted) if proposed is None else proposed
    bonus = [1] * len(accepted) if bonus is None else bonus
    parts = {"prefill": prefill, "draft": 0.0, "verify": decode, "accept": 0.0, "commit": 0.0, "other": 0.0}
    return {
        "strategy": "ngram",
        "question_id": question_id,
        "turn": turn,
        "repeat": 0,
        "status": "ok",
        "output_ids": list(range(1 + sum(accepted) + sum(bonus))),
        "accepted_per_round": accepted,
        "proposed_per_round": proposed,
        "proposed_nodes_per_round": proposed,
        "bonus_per_round": bonus,
        "round_seconds": [decode / max(1, len(accepted))] * len(accepted),
        "time_seconds": {**parts, "total": prefill + decode},
        "decode_elapsed_seconds": decode,
        "altered_per_round": altered,
    }


def test_altered_is_counted_under_lossy_rules_alone():
    """A share of what rounds emitted; without a lossy rule it is not defined, and 0 would be a claim."""
    rows = [row([0, 2, 4], altered=[0, 1, 2]), row([1], altered=[0])]
    assert metrics.altered(rows) == 3
    assert metrics.altered_share(rows) == 3 / 11
    assert metrics.altered([row([1, 2])]) is None
    assert metrics.altered_share([row([1, 2])]) is None
    assert metrics.altered([]) is None
    with pytest.raises(AssertionError, match="altered more"):
        metrics.check_identities(row([1], altered=[2]))


def test_acceptance_says_whether_the_bonus_counts():
    """Guards BM-01: k = 4, rounds accept 0, 2, 4; drafts alone 2.0, with the bonus 3.0, rate 6 / 12 and not 0.6."""
    rows = [row([0, 2, 4])]
    assert metrics.mean_accepted_drafts(rows) == 2.0
    assert metrics.mean_acceptance_length(rows) == 3.0
    assert metrics.acceptance_rate(rows) == 0.5
    assert metrics.emitted(rows) == 9
    assert metrics.output_tokens(rows) == 10


def test_what_a_stop_cut_off_counts_nowhere():
    """Guards BM-02: five drafts and a bonus match, EOS is the third; the round emits 3 tokens, not 6."""
    rows = [row([3], [5], [0])]
    metrics.check_identities(rows[0])
    assert metrics.emitted(rows) == 3
    assert metrics.mean_acceptance_length(rows) == 3.0
    assert metrics.bonus(rows) == 0
    assert metrics.acceptance_rate(rows) == 3 / 5


def test_mean_length_weighs_every_round_of_every_turn():
    """Guards BM-05: 2 prompts x 2 turns with lengths 1, 5, 3, 3: rounds are weighed, not the last turn taken."""
    turns = [row([0]), row([4], turn=1), row([2, 2], question_id=1), row([2], turn=1, question_id=1)]
    assert metrics.mean_acceptance_length(turns) == (1 + 5 + 3 + 3 + 3) / 5
    assert [metrics.mean_acceptance_length([one]) for one in turns] == [1.0, 5.0, 3.0, 3.0]


def test_plain_decoding_has_length_one_and_no_acceptance_rate():
    """Guards BM-01: the baseline offers nothing, so its rate is undefined rather than 0."""
    rows = [row([0, 0, 0], [0, 0, 0])]
    assert metrics.mean_acceptance_length(rows) == 1.0
    assert metrics.acceptance_rate(rows) is None
    assert metrics.acceptance_by_depth(rows) == {"offered": [], "joint": [], "conditional": []}
    assert metrics.accepted_histogram(rows) == [3]


def test_acceptance_by_depth():
    """Four rounds offer depths 3, 2, 1, 0 and accept 3, 1, 0, 0."""
    found = metrics.acceptance_by_depth([row([3, 1], [3, 2]), row([0, 0], [1, 0])])
    assert found["offered"] == [3, 2, 1]
    assert found["joint"] == [2 / 4, 1 / 4, 1 / 4]
    assert found["conditional"] == [2 / 3, 1 / 2, 1 / 1]


def test_depth_that_no_round_could_reach_is_undefined():
    """A depth whose parent nobody accepted has no conditional rate; null, not 0."""
    assert metrics.acceptance_by_depth([row([0], [2])])["conditional"] == [0.0, None]


def test_rates_are_totals_over_totals():
    """9 tokens in 2 s and 1 token in 3 s of decoding are 2 tokens a second; prefill counts end to end only."""
    rows = [row([0, 2, 4], decode=2.0), row([0], decode=3.0)]
    assert metrics.decode_tokens_per_second(rows) == 10 / 5
    assert metrics.end_to_end_tokens_per_second(rows) == 12 / 6
    assert metrics.time_per_output_token_ms(rows) == pytest.approx(
        {
            "p50": (2000 / 9 + 3000) / 2,
            "p95": 2000 / 9 + 0.95 * (3000 - 2000 / 9),
            "p99": 3000 - 0.01 * (3000 - 2000 / 9),
        }
    )
    times = metrics.time_seconds(rows)
    assert times is not None
    assert times["total"] == sum(times[part] for part in metrics.TIME_PARTS) == 6.0


def test_in_a_batch_the_user_waits_for_whole_rounds():
    """Two rows share 2 s of rounds: each bears 1 s for its 4 tokens, and each of their users waited 2 s for them."""
    rows = [row([1, 1], decode=1.0, question_id=n) | {"decode_elapsed_seconds": 2.0} for n in (0, 1)]
    assert metrics.decode_tokens_per_second(rows) == 8 / 2
    assert metrics.time_per_output_token_ms(rows) == {"p50": 250.0, "p95": 250.0, "p99": 250.0}
    assert metrics.user_time_per_output_token_ms(rows) == {"p50": 500.0, "p95": 500.0, "p99": 500.0}
    assert {*metrics.counters(rows)} >= {"time_per_output_token_ms", "user_time_per_output_token_ms"}


def test_an_answer_of_one_token_has_no_decode_rate():
    """The prefill yields it, in no round; every number over rounds is null and none is 0 or NaN."""
    rows = [row([], [], [], decode=0.0)]
    metrics.check_identities(rows[0])
    assert metrics.emitted(rows) == 0
    for number in ("decode_tokens_per_second", "mean_acceptance_length", "round_ms"):
        assert getattr(metrics, number)(rows) is None
    assert metrics.time_per_output_token_ms(rows) is None
    assert metrics.user_time_per_output_token_ms(rows) is None
    assert metrics.end_to_end_tokens_per_second(rows) == 2.0


def test_nothing_is_defined_without_rows():
    """A strategy whose every row failed has counts of 0 and no rates."""
    found = metrics.counters([])
    assert found["rounds"] == 0
    assert [found[name] for name in ("decode_tokens_per_second", "time_seconds", "round_ms")] == [None] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output_ids", [1, 2, 3]),
        ("bonus_per_round", [1, 1]),
        ("bonus_per_round", [1, 1, 2]),
        ("accepted_per_round", [0, 2, 5]),
        ("time_seconds", {**row([0])["time_seconds"], "total": 9.0}),
    ],
)
def test_a_miscounted_row_is_caught(field: str, value: object):
    """Guards BM-01 and BM-02: tokens, rounds and times of a row have to agree with each other."""
    good = row([0, 2, 4])
    metrics.check_identities(good)
    with pytest.raises(AssertionError, match="ngram, question 0"):
        metrics.check_identities({**good, field: value})
