"""Prompt lookup: what it proposes, what it never proposes, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import decode
from scripted import context_of

from specdec_lab.decode import Request
from specdec_lab.drafters.ngram import NgramDrafter, NgramIndex, copy_from
from specdec_lab.errors import InputError
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree, chain, from_paths, root_only

GetTarget = Callable[..., Target]
EOS = 2


@pytest.fixture
def propose(tiny_target: GetTarget) -> Callable[..., DraftTree]:
    """Return ``(tokens, max_depth, drafter settings) -> tree``; unless told otherwise one chain, to full depth."""
    target = tiny_target()

    def first_tree(tokens: Sequence[int], max_depth: int = 99, **settings: Any) -> DraftTree:
        settings = {"per_match": 99, "min_ngram": 2, "max_ngram": 4, "branches": 1} | settings
        return NgramDrafter(target, **settings).propose(context_of(tokens, max_depth))

    return first_tree


# --- what is proposed -----------------------------------------------------------------------------------------------


def test_copies_what_followed_the_longest_match(propose: Callable[..., DraftTree]):
    text = [9, 4, 5, 6, 30, 31, 32, 8, 5, 6, 40, 41, 7, 4, 5, 6]
    assert propose(text, k=3, max_ngram=3) == chain(6, [30, 31, 32])
    assert propose(text, k=3, max_ngram=2) == chain(6, [40, 41, 7])


def test_the_most_recent_of_equal_matches_comes_first(propose: Callable[..., DraftTree]):
    text = [5, 6, 30, 9, 5, 6, 40, 8, 5, 6]
    assert propose(text, k=1) == chain(6, [40])
    assert propose(text, k=2, branches=2) == DraftTree((6, 40, 8, 30, 9), (-1, 0, 1, 0, 3))


def test_branches_are_distinct_and_share_their_prefix(propose: Callable[..., DraftTree]):
    """Guards TR-07: no continuation is checked twice; what two of them share is one node."""
    text = [5, 6, 30, 9, 5, 6, 30, 9, 5, 6, 30, 8, 5, 6]
    tree = propose(text, k=2, branches=3)
    assert tree == DraftTree((6, 30, 8, 9), (-1, 0, 1, 1))
    assert len(propose(text, k=2, branches=1)) == 3


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        ([7], {}),
        ([7, 8], {}),
        ([7, 7], {}),
        ([0], {"min_ngram": 1}),
        ([7, 8, 9], {"max_ngram": 4, "min_ngram": 4}),
        ([1, 3, 4, 5, 6, 7, 8], {"min_ngram": 1}),
        ([5, 6, 7, 6, 5], {"min_ngram": 2}),
    ],
    ids=["one token", "shorter than n", "two equal", "token 0", "n longer than the text", "no repeat", "reversed"],
)
def test_nothing_to_copy_is_the_root_alone(tokens: list[int], settings: dict[str, int], propose: Callable[..., Any]):
    """Guards ST-07 and TV-04: no match is an empty proposal, not token 0 and not an error."""
    assert propose(tokens, **settings) == root_only(tokens[-1])


def test_all_equal_tokens_do_not_match_the_suffix_with_itself(propose: Callable[..., DraftTree]):
    """Guards ST-07: an earlier occurrence is needed, and one that overlaps the suffix will do."""
    assert propose([5, 5]) == root_only(5)
    assert propose([5, 5], min_ngram=1, k=4) == chain(5, [5, 5, 5, 5])
    assert propose([5, 5, 5], k=4) == chain(5, [5, 5, 5, 5])


def test_a_loop_is_drafted_to_full_depth(propose: Callable[..., DraftTree]):
    """A copy runs on into what it is itself producing: the period repeats."""
    assert propose([9, 1, 3, 4, 1, 3], k=7) == chain(3, [4, 1, 3, 4, 1, 3, 4])


def test_token_0_is_copied_like_any_other(propose: Callable[..., DraftTree]):
    """Guards TV-04: 0 is a token of the text, neither padding nor "nothing"."""
    assert propose([0, 0, 5, 0, 0], k=3) == chain(0, [5, 0, 0])
    assert propose([7, 8, 0, 0, 7, 8], k=2) == chain(8, [0, 0])


def test_a_copy_ends_with_eos(propose: Callable[..., DraftTree]):
    """Guards PF-04: nothing is drafted behind EOS, which a chat's earlier turns hold."""
    assert propose([5, 6, 30, EOS, 31, 5, 6], k=6) == chain(6, [30, EOS])
    assert propose([5, 6, EOS, 31, 5, 6], k=6) == chain(6, [EOS])


@pytest.mark.parametrize("max_depth", [1, 2, 3, 8, 20])
def test_depth_is_that_of_k_and_of_what_is_left(max_depth: int, propose: Callable[..., DraftTree]):
    """Guards ST-05 and SP-08: the requested k is the used k, cut to what could still be committed."""
    text = [*range(10, 30), *range(10, 14)]
    tree = propose(text, max_depth, k=8)
    assert tree == chain(13, range(14, 14 + min(8, max_depth)))


def test_a_longer_match_is_trusted_further(propose: Callable[..., DraftTree]):
    """One matched token gives two drafts, two give four, up to k; each branch has its own match and depth."""
    text = [9, 4, 5, 6, 30, 31, 32, 33, 34, 35, 8, 6, 40, 41, 42, 43, 7, 4, 5, 6]
    options = {"per_match": 2, "min_ngram": 1, "max_ngram": 4}
    assert propose(text, k=8, **options) == chain(6, [30, 31, 32, 33, 34, 35])
    assert propose(text, k=5, **options) == chain(6, [30, 31, 32, 33, 34])
    assert propose(text, k=8, branches=2, **options) == from_paths(6, [[30, 31, 32, 33, 34, 35], [40, 41]])


def test_a_continuation_that_another_contains_takes_no_branch(propose: Callable[..., DraftTree]):
    """Guards TR-07: the shorter of two equal beginnings adds nothing, so the next distinct guess gets its place."""
    text = [4, 5, 6, 30, 31, 32, 33, 34, 7, 6, 40, 41, 3, 6, 30, 31, 8, 4, 5, 6]
    tree = propose(text, k=6, per_match=2, min_ngram=1, max_ngram=3, branches=2)
    assert tree == from_paths(6, [[30, 31, 32, 33, 34, 7], [40, 41]])


def test_size_is_bounded(propose: Callable[..., DraftTree]):
    text = [token for turn in range(12) for token in (5, 6, 30 + turn, 50 + turn, 70 + turn)] + [5, 6]
    assert len(propose(text, k=8, branches=64, occurrences=64, max_nodes=9)) == 9
    assert len(propose(text, k=3, branches=64, occurrences=4, max_nodes=64)) == 1 + 4 * 3
    assert len(propose(text, k=8, max_nodes=4)) == 4


def test_a_long_match_is_found_behind_many_short_ones(propose: Callable[..., DraftTree]):
    """The last token is a common one; the place where three tokens match lies further back than is remembered of it."""
    text = [4, 5, 6, 30, 31, *(token for turn in range(100) for token in (50 + turn % 20, 6)), 4, 5, 6]
    assert propose(text, k=2, min_ngram=1, occurrences=16) == chain(6, [30, 31])


def test_a_depth_that_no_match_reaches_is_refused(tiny_target: GetTarget):
    """Guards SP-08: a larger k that would change nothing is an error, not silence."""
    with pytest.raises(InputError, match=r"^k=20: the longest match allows .* 16 drafts"):
        NgramDrafter(tiny_target(), k=20)
    assert NgramDrafter(tiny_target(), k=16).max_nodes == 33


def test_settings_that_contradict_each_other_are_refused(tiny_target: GetTarget):
    with pytest.raises(InputError, match=r"^min_ngram=5: give at most max_ngram, which is 3"):
        NgramDrafter(tiny_target(), min_ngram=5, max_ngram=3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_agrees_with_a_search_of_the_whole_text(text: list[int], shortest: int, more: int, step: int):
    """Guards PF-01: the incremental index finds what a full rescan finds, however the text came in."""
    index = NgramIndex(shortest, shortest + more, occurrences=1000)
    for end in range(1, len(text), step):
        index.catch_up(text[:end])
    index.catch_up(text)
    found: list[int] = []
    for length in range(shortest + more, shortest - 1, -1):
        suffix = text[len(text) - length :] if length <= len(text) else None
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == suffix and end not in found:
                found.append(end)
    assert [start for _, start in index.matches(text)] == found


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data(), st.integers(0, 30))
def test_a_copy_equals_one_made_token_by_token(text: list[int], data: st.DataObject, count: int):
    start = data.draw(st.integers(0, len(text) - 1))
    grown = list(text)
    for offset in range(count):
        grown.append(grown[start + offset])
    assert copy_from(text, start, count) == tuple(grown[len(text) :])


# --- what it costs --------------------------------------------------------------------------------------------------


class CountingText(list[int]):
    """A token list that counts the tokens read from it."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        got = super().__getitem__(at)
        self.read += len(got) if isinstance(got, list) else 1
        return got


def test_work_per_round_does_not_grow_with_the_text(tiny_target: GetTarget):
    """Guards PF-01: tokens read per round at 16 k tokens are those at 1 k, over nine lengths of n-gram."""
    drafter = NgramDrafter(
        tiny_target(), k=8, per_match=8, max_ngram=10, min_ngram=2, branches=4, max_nodes=64, occurrences=6
    )
    context = context_of([3])
    text = context.tokens = CountingText([3])
    most: dict[int, int] = {}
    for size in (1_000, 4_000, 16_000):
        while len(text) < size:
            if len(text) == size - 50:
                drafter.propose(context)  # catches up
                most[size] = 0
            text.append(3 + (len(text) * len(text) // 7) % 11)
            text.read = 0
            if size in most:
                drafter.propose(context)
                most[size] = max(most[size], text.read)
    assert 0 < most[16_000] <= 1.2 * most[1_000]
    # index and look up two lengths, compare 12 places backwards, copy, root
    assert max(most.values()) <= 2 * (2 + 4) + 12 * 2 * 8 + 12 * 8 + 1


def test_memory_is_bounded(tiny_target: GetTarget):
    """Guards ML-04: two entries per token at most, ``occurrences`` of them per n-gram, and the latest ones."""
    index = NgramIndex(2, 4, occurrences=5)
    text = [7, 8, 9] * 2000
    index.catch_up(text)
    assert sorted(len(starts) for starts in index._starts.values()) == [5] * 6
    assert [start for _, start in index.matches(text)] == [len(text) - 3 * turn for turn in range(1, 6)]


def test_each_sequence_has_an_index_of_its_own(tiny_target: GetTarget):
    """Guards CP-03 and ML-04: what one sequence said is not proposed to another, and the drafter keeps none of it."""
    drafter = NgramDrafter(tiny_target(), per_match=8, min_ngram=2)
    before = set(vars(drafter))
    first, second = context_of([5, 6, 30, 31, 5, 6]), context_of([9, 5, 6])
    assert drafter.propose(first) == chain(6, [30, 31, 5, 6, 30, 31, 5, 6])
    assert drafter.propose(second) == root_only(6)
    assert first.state is not second.state
    assert set(vars(drafter)) == before
    assert drafter.memory_bytes() == {"draft_weights": 0, "draft_kv": 0}


def test_what_followed_most_often_comes_first(propose: Callable[..., DraftTree]):
    """Among equally long matches; a longer one still wins, and among equally frequent ones the most recent."""
    text = [5, 6, 30, 9, 5, 6, 40, 8, 5, 6, 30, 7, 5, 6, 50, 5, 6]
    assert propose(text, k=1, max_ngram=2) == chain(6, [30])
    assert propose(text, k=1, max_ngram=2, branches=3) == from_paths(6, [[30], [50], [40]])
    assert propose([4, 5, 6, 50, *text[:-3], 4, 5, 6], k=1, max_ngram=3) == chain(6, [50])


def test_earlier_sequences_are_looked_up_if_asked_for(tiny_target: GetTarget):
    """Guards SP-08 and ML-04: off by default; with a bound, the oldest sequence is forgotten first."""
    target = tiny_target()
    first = [7, 8, 9, 20, 21, 22, 23, 24]
    for earlier, wanted in ((0, root_only(9)), (100, chain(9, [20, 21, 22]))):
        drafter = NgramDrafter(target, k=3, min_ngram=2, per_match=8, earlier=earlier)
        drafter.propose(context_of(first))
        context = context_of([3, 4, 8, 9])
        assert drafter.propose(context) == wanted
        context.tokens += [30, 31, 8, 9]
        assert drafter.propose(context).tokens[1] == 30, "the sequence's own text is the most recent"
    drafter = NgramDrafter(target, k=3, min_ngram=2, earlier=20)
    for turn in range(200):
        drafter.propose(context_of([turn % 100, 8, 9, turn % 90]))
    assert sum(map(len, drafter._past)) <= 24
    (done, _) = decode(target, drafter, [Request((5, 6, 5, 6), 20)] * 2)
    (plain, _) = decode(target, NgramDrafter(target), [Request((5, 6, 5, 6), 20)] * 2)
    assert done.output_ids == plain.output_ids
