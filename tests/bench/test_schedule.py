"""The order of a run."""

from __future__ import annotations

from collections import Counter

from specdec_lab.bench.prompts import Prompt
from specdec_lab.bench.schedule import blocks

PROMPTS = [Prompt(1, "a", ("x", "y")), Prompt(2, "a", ("x",)), Prompt(3, "b", ("x", "y", "z"))]
NAMES = ("autoregressive", "ngram", "other")


def test_every_prompt_turn_and_repeat_is_there_once():
    """None lost, none doubled, whatever the batch size."""
    wanted = Counter(
        (p.question_id, turn, repeat) for p in PROMPTS for turn in range(len(p.turns)) for repeat in (0, 1)
    )
    for batch_size in (1, 2):
        found = blocks(PROMPTS, NAMES, 2, batch_size)
        assert Counter((p.question_id, b.turn, b.repeat) for b in found for p in b.prompts) == wanted


def test_strategies_are_interleaved_in_rotating_order():
    """Guards BM-04: every strategy runs within each block, and each is first, second and third equally often."""
    prompts = [Prompt(number, "a", ("x",)) for number in range(6)]
    orders = [block.order for block in blocks(prompts, NAMES, 1, 1)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    for place in range(3):
        assert Counter(order[place] for order in orders) == dict.fromkeys(NAMES, 2)


def test_a_repeat_starts_with_another_strategy():
    """With as many prompts as strategies, a prompt still meets another order in its next repeat."""
    found = [
        (block.prompts[0].question_id, block.order[0]) for block in blocks(PROMPTS, NAMES, 3, 1) if block.turn == 0
    ]
    assert len(set(found)) == 9


def test_turns_of_a_prompt_come_in_order():
    """A turn continues the baseline's answer to the turn before, so that one has to be there already."""
    seen: dict[tuple[int, int], int] = {}
    for block in blocks(PROMPTS, NAMES, 2, 2):
        for prompt in block.prompts:
            key = (int(prompt.question_id), block.repeat)
            assert seen.get(key, -1) == block.turn - 1
            seen[key] = block.turn
