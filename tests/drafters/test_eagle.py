"""EAGLE: the head's cache, its inputs and its trees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heads_at_hand import eagle3_head, eagle_head, every_other, two_layer_eagle_head

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.distill.batch import Batch, Example, collate
from specdec_lab.distill.context import TextContext
from specdec_lab.distill.learners.recurrent import Eagle3Learner
from specdec_lab.distill.unrolled import unrolled
from specdec_lab.drafters.eagle import EagleDrafter
from specdec_lab.errors import InputError, NoRoomError
from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.eagle3 import Eagle3Head, default_feature_layers
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree

FLAT = {1: 1.0, 512: 1.0}
"""Costs under which every node pays."""

HEADS = [eagle_head, two_layer_eagle_head, eagle3_head]


def decode(
    target: Target, drafter: EagleDrafter, prompts: list[tuple[int, ...]], tokens: int = 24, batch_size: int = 1
):
    requests = [Request(prompt, tokens) for prompt in prompts]
    finished = {}
    for progress in speculative_decode(target, drafter, requests, batch_size=batch_size):
        if progress.generation is not None:
            assert progress.generation.error is None
            finished[progress.index] = progress.generation
    return [finished[index] for index in range(len(prompts))]


class Watched(EagleDrafter):
    """Remembers what it proposed for which text."""

    seen: list[tuple[tuple[int, ...], DraftTree]]
    draftable: list[list[int]]

    def propose_batch(self, contexts):
        trees = super().propose_batch(contexts)
        self.seen.extend((tuple(context.tokens), tree) for context, tree in zip(contexts, trees, strict=True))
        self.draftable.extend(context.state.token_ids for context in contexts)
        return trees


def watched(target: Target, head, **settings) -> Watched:
    drafter = Watched(target, head=head, verify_ms=FLAT, **settings)
    drafter.seen, drafter.draftable = [], []
    return drafter


def features_of(target: Target, ids: torch.Tensor, layers) -> dict[int, torch.Tensor]:
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    return {layer: states[layer].detach() for layer in layers}


def chain_by_training_code(
    target: Target, head: EagleHead | Eagle3Head, text: tuple[int, ...], depth: int
) -> list[int]:
    """Return the greedy chain after a text, each token by a whole run of the unrolled head as training runs it."""
    drafted: list[int] = []
    drafter = EagleDrafter(target, head=head, verify_ms=FLAT)
    for step in range(depth):
        # position t of step i has seen the states up to t and the tokens up to t + 1 + i
        tokens = (*text, *drafted, 0)
        example = Example("x", tokens, (False,) * len(tokens))
        batch = collate([example])
        features = features_of(target, torch.tensor([text]), head.feature_layers)
        wide = {
            layer: torch.cat((state, state.new_zeros(1, len(tokens) - len(text), state.shape[-1])), dim=1)
            for layer, state in features.items()
        }
        batch = Batch(batch.ids, batch.supervised, batch.lengths, wide, batch.keys)
        states = list(unrolled(head, drafter.parts, batch, step + 1))[-1]
        state = states[0, len(text) - 2]  # the last one is not known when drafting
        logits, token_ids = head.logits(state, drafter.parts.output), head.vocabulary.token_ids
        if head.context_vocab:
            context = TextContext(torch.tensor([text]), torch.tensor([len(text)]), head.vocabulary, drafter.parts)
            logits, token_ids = context.widened(logits, head, state), torch.cat((token_ids, context.token_ids))
        drafted.append(int(token_ids[logits.argmax()]))
    return drafted


@pytest.mark.parametrize("make", HEADS)
@pytest.mark.parametrize("vocabulary", ["whole", "reduced", "context"])
@torch.inference_mode()
def test_drafts_are_those_that_training_simulates(make: Callable, vocabulary: str, tiny_target):
    """TD-16 and CP-08: a head that is fed one thing in training and another in decoding.

    The chain that the engine drafts in every round, with its cache, is the one that the training code gives for the
    same text from scratch.
    """
    target: Target = tiny_target()
    head = make(target, None if vocabulary == "whole" else every_other(target))
    head.context_vocab = vocabulary == "context"
    drafter = watched(target, head, depth=4, width=1, branches=1, min_probability=0.0)
    decode(target, drafter, [tuple(range(5, 17)), (9, 40, 41), tuple(range(11, 127, 3))], tokens=14)
    assert len(drafter.seen) > 8
    for text, tree in drafter.seen:
        assert tree.is_chain
        if tree.depth:
            assert list(tree.tokens[1:]) == chain_by_training_code(target, head, text, tree.depth)


@pytest.mark.parametrize("make", HEADS)
def test_the_cache_is_kept_while_it_is_large_enough(make: Callable, tiny_target):
    """A request must not wait for a new cache, and the bytes that a run states are those of its largest one.

    What an earlier sequence left there, a NaN too, does not reach the next one.
    """
    target: Target = tiny_target()
    drafter = watched(target, make(target), depth=3)
    (alone,) = decode(target, drafter, [tuple(range(20, 31))], tokens=12)
    drafter.allocate(2, 200)
    held, address = drafter.memory_bytes()["draft_kv"], drafter.cache.address
    with torch.inference_mode():
        for keys, values in drafter.cache.committed(0, 90).values():
            keys.fill_(float("nan"))
            values.fill_(float("nan"))
    drafter.seen.clear()
    (again,) = decode(target, drafter, [tuple(range(20, 31))], tokens=12)
    assert (drafter.memory_bytes()["draft_kv"], drafter.cache.address) == (held, address)
    assert again.output_ids == alone.output_ids
    assert [one.tokens for one in again.rounds] == [one.tokens for one in alone.rounds]
    with pytest.raises(NoRoomError, match=r"a cache of 1 rows of \d+ tokens takes"):
        drafter.allocate(1, 10**12)


@pytest.mark.parametrize("make", HEADS)
def test_cache_holds_true_features_whatever_was_accepted(make: Callable, tiny_target):
    """CP-08: predicted features left in the cache lower the acceptance without a trace in the text."""
    target: Target = tiny_target()
    head = make(target)
    drafter = watched(target, head, depth=3)
    prompt = tuple(range(20, 31))
    (generation,) = decode(target, drafter, [prompt], tokens=20)
    text = drafter.seen[-1][0]
    kept = drafter.cache.committed(0, len(text) - 1)[0]
    fresh = watched(target, head, depth=3)
    (again,) = decode(target, fresh, [text], tokens=4)  # the whole text as a prompt: no round before
    expected = fresh.cache.committed(0, len(text) - 1)[0]
    assert generation.output_ids[: len(text) - len(prompt)] == text[len(prompt) :]
    assert again.output_ids
    for found, wanted in zip(kept, expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("make", HEADS)
def test_what_a_text_holds_can_be_drafted_in_it(make: Callable, tiny_target):
    """A reduced vocabulary lacks what is worth copying; another row's text, and a text before, must not lend theirs."""
    target: Target = tiny_target()
    head, prompts = make(target, every_other(target)).bfloat16(), [tuple(range(5, 127, 3)), (9, 40, 41)]
    head.context_vocab = True
    drafter = watched(target, head, min_probability=0.0, branches=64, nodes=300)
    before = drafter.memory_bytes()["draft_weights"]
    decode(target, drafter, [*prompts, prompts[1]], batch_size=2)
    odd = [{token for token in tree.tokens[1:] if token % 2} for _, tree in drafter.seen]
    assert any(len(text) > 40 and said for (text, _), said in zip(drafter.seen, odd, strict=True))
    for (text, _), said, draftable in zip(drafter.seen, odd, drafter.draftable, strict=True):
        assert said <= set(text)
        assert set(draftable) == {
            *head.vocabulary.token_ids.tolist(),
            *text,
        }  # what was said later, and the first token
        assert len(draftable) == len(set(draftable))
    assert drafter.memory_bytes()["draft_weights"] > before


@pytest.mark.parametrize("context", [False, True])
def test_a_head_that_gives_no_numbers_drafts_what_does_not_matter(context: bool, tiny_target):
    """A broken head must not end a batch: what is no number has no chance, whatever the other rows can draft."""
    target: Target = tiny_target()
    head = eagle_head(target, every_other(target))
    head.context_vocab = context
    prompts = [(9, 40, 41), tuple(range(5, 127, 3)), (8, 7)]
    expected = decode(target, watched(target, head), prompts, batch_size=3)
    with torch.no_grad():
        head.fc.weight.fill_(float("nan"))
    found = decode(target, watched(target, head), prompts, batch_size=3)
    assert [one.output_ids for one in found] == [one.output_ids for one in expected]


@pytest.mark.parametrize("make", HEADS)
@pytest.mark.parametrize("context", [False, True])
def test_rows_of_a_batch_draft_as_alone(make: Callable, context: bool, tiny_target):
    target: Target = tiny_target()
    head = make(target, every_other(target) if context else None)
    head.context_vocab = context
    prompts = [tuple(range(5, 9)), tuple(range(30, 110)), (7,), tuple(range(60, 71)), tuple(range(11, 90))]
    alone = watched(target, head)
    together = watched(target, head)
    expected = decode(target, alone, prompts, batch_size=1)
    found = decode(target, together, prompts, batch_size=3)
    assert [one.output_ids for one in found] == [one.output_ids for one in expected]
    assert sorted((text, tree.tokens, tree.parents) for text, tree in together.seen) == sorted(
        (text, tree.tokens, tree.parents) for text, tree in alone.seen
    )


@pytest.mark.parametrize("make", HEADS)
def test_a_long_row_near_its_end_has_room_beside_a_prompt(make: Callable, tiny_target):
    """TR-04: the cache was sized for a row's own feed, and written as wide as the widest beside it."""
    target: Target = tiny_target()
    prompts = [(7, 9), *(tuple(range(20, 80)) for _ in range(6))]
    requests = [Request(prompt, 100 if at == 0 else 9) for at, prompt in enumerate(prompts)]
    drafter = watched(target, make(target))
    finished = [p.generation for p in speculative_decode(target, drafter, requests, batch_size=2) if p.generation]
    assert len(finished) == len(prompts)
    assert all(generation.error is None for generation in finished)


@pytest.mark.parametrize("layers", [[99, 0, 1], [1, 1, 2], [1, -3], []])
def test_states_that_a_target_lacks_or_that_are_doubled_are_refused(layers: list[int], tiny_target):
    """TD-13."""
    target: Target = tiny_target()  # three layers, so that -3 is 1
    with pytest.raises(InputError) as error:
        Eagle3Learner(target, torch.zeros(target.vocab_size), layers=layers)
    assert error.value.field == "layers"


def test_dynamic_tree_keeps_the_best_candidates_closed_under_ancestors(tiny_target):
    """TR-08: a node whose parent was pruned."""
    target: Target = tiny_target()
    head = eagle_head(target)
    few = watched(target, head, nodes=6, depth=4, width=3, branches=3, min_probability=0.0)
    many = watched(target, head, nodes=64, depth=4, width=3, branches=3, min_probability=0.0)
    prompt = tuple(range(40, 52))
    decode(target, few, [prompt], tokens=8)
    decode(target, many, [prompt], tokens=8)
    all_of = dict(many.seen)
    compared = 0
    for text, tree in few.seen:
        if text not in all_of or tree.depth == 0:
            continue
        whole = all_of[text]
        assert tree.confidence is not None
        assert whole.confidence is not None
        best = sorted(whole.confidence[1:], reverse=True)[: len(tree) - 1]
        assert sorted(tree.confidence[1:], reverse=True) == pytest.approx(best)
        compared += len(tree) == 7
    assert compared


def test_static_tree_is_offered_as_stated(tiny_target):
    target: Target = tiny_target()
    paths = [[0], [1], [0, 0], [1, 0], [0, 0, 2]]
    drafter = watched(target, eagle_head(target), tree=paths)
    decode(target, drafter, [tuple(range(5, 20))], tokens=12)
    shapes = {
        tree.parents for _, tree in drafter.seen if drafter.target.eos_ids.isdisjoint(tree.tokens) and tree.depth == 3
    }
    assert shapes == {(-1, 0, 0, 1, 2, 3)}


def test_nothing_is_drafted_after_eos(tiny_target):
    target: Target = tiny_target()
    drafter = watched(target, eagle_head(target), nodes=64, branches=8, width=8, min_probability=0.0)
    decode(target, drafter, [tuple(range(5, 20))], tokens=30)
    eos = target.eos_ids
    for _, tree in drafter.seen:
        assert not any(tree.tokens[tree.parents[node]] in eos for node in range(1, len(tree)) if tree.parents[node])


def test_default_layers_of_published_heads():
    """TD-13: picks that coincide in a shallow target are refused, not merged."""
    assert default_feature_layers(32) == (2, 16, 29)
    assert default_feature_layers(7) == (2, 3, 4)
    for depth in (1, 2, 3, 5, 6):
        with pytest.raises(InputError) as error:
            default_feature_layers(depth)
        assert error.value.field == "layers"


def test_no_head_is_shipped_for_a_random_target(tiny_target):
    with pytest.raises(InputError, match="no eagle head comes with the package for llama"):
        EagleDrafter(tiny_target())
