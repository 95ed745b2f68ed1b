"""Medusa: which state the heads read, and which trees they give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heads_at_hand import disturbed, every_other, medusa_heads

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.medusa import MedusaDrafter
from specdec_lab.errors import InputError
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.transitions import Transitions
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree

FLAT = {1: 1.0, 512: 1.0}


class Watched(MedusaDrafter):
    """Remembers what it proposed for which text."""

    seen: list[tuple[tuple[int, ...], DraftTree]]

    def propose_batch(self, contexts):
        trees = super().propose_batch(contexts)
        self.seen.extend((tuple(context.tokens), tree) for context, tree in zip(contexts, trees, strict=True))
        return trees


def watched(target: Target, heads: MedusaHeads, **settings) -> Watched:
    drafter = Watched(target, head=heads, verify_ms=FLAT, **settings)
    drafter.seen = []
    return drafter


def decode(
    target: Target, drafter: MedusaDrafter, prompts: list[tuple[int, ...]], tokens: int = 20, batch_size: int = 1
):
    found = {}
    for progress in speculative_decode(
        target, drafter, [Request(prompt, tokens) for prompt in prompts], batch_size=batch_size
    ):
        if progress.generation is not None:
            assert progress.generation.error is None
            found[progress.index] = progress.generation.output_ids
    return [found[index] for index in range(len(prompts))]


@pytest.mark.parametrize("reduced", [False, True])
@torch.inference_mode()
def test_head_h_reads_the_state_before_the_last_token(reduced: bool, tiny_target):
    """TD-02: the state after token t, t + 1 being the root, drafts t + 2 with its first head."""
    target: Target = tiny_target()
    heads = medusa_heads(target, 3, every_other(target) if reduced else None)
    drafter = watched(target, heads, tree=[[0], [0, 0], [0, 0, 0]])
    decode(target, drafter, [tuple(range(5, 17)), (9,)])
    assert len(drafter.seen) > 10
    for text, tree in drafter.seen:
        hidden = target.model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, -2]
        best = heads.logits(hidden, drafter.parts.output).argmax(dim=-1)
        expected = heads.vocabulary.token_ids[best].tolist()
        assert list(tree.tokens[1:]) == expected[: tree.depth]


def test_a_head_that_starts_as_the_identity_repeats_the_targets_own_choice(tiny_target):
    """The first head's first guess is then what the target itself said a token earlier."""
    target: Target = tiny_target()
    heads = MedusaHeads(target.hidden_size, DraftVocabulary.whole(target.vocab_size), heads=2, blocks=1).eval()
    drafter = watched(target, heads, tree=[[0]])
    decode(target, drafter, [tuple(range(5, 17))])
    assert all(tree.tokens[1] == tree.tokens[0] for _, tree in drafter.seen if tree.depth)


def heads_and_pairs(target: Target) -> MedusaHeads:
    heads = medusa_heads(target, vocabulary=every_other(target))
    ids = torch.randint(0, target.vocab_size, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    heads.transitions = Transitions.counted([(ids, [True] * 2000)], heads.vocabulary, 0.8)
    return heads


def heads_that_see_the_root(target: Target) -> MedusaHeads:
    heads = MedusaHeads(target.hidden_size, every_other(target), heads=3, blocks=1, sees_root=True)
    return disturbed(heads)


MAKERS = [medusa_heads, heads_and_pairs, heads_that_see_the_root]


def children(target: Target, drafter: MedusaDrafter, text: tuple[int, ...], depth: int, token: int, count: int):
    """Return the likeliest tokens after a draft, with their chances, from whole laws."""
    heads = drafter.heads
    hidden = target.model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, -2]
    if heads.root is not None:
        root = drafter.parts.embed(torch.tensor(text[-1]))
        hidden = hidden + heads.root @ (root / root.pow(2).mean().sqrt())
    logits = heads.logits(hidden, drafter.parts.output)[depth - 1]
    if heads.transitions is not None:
        logits = logits + heads.transitions.log_factors(torch.tensor([token]))[0]
    best = logits.softmax(dim=-1).topk(count)
    return list(zip(heads.vocabulary.token_ids[best.indices].tolist(), best.values.tolist(), strict=True))


@pytest.mark.parametrize("make", MAKERS)
@torch.inference_mode()
def test_confident_tree_holds_the_likeliest_paths(make: Callable, tiny_target):
    """The ten best of all paths through six choices at each draft, by the product of their chances."""
    target: Target = tiny_target()
    drafter = watched(target, make(target), nodes=10, branches=6)
    decode(target, drafter, [tuple(range(5, 17))], tokens=8)
    for text, tree in drafter.seen:
        most = min(3, max(tree.depths))
        level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
        paths: list[tuple[float, tuple[int, ...]]] = []
        for depth in range(1, most + 1):
            level = [
                (value * chance, (*path, token))
                for value, path in level
                if not path or path[-1] not in target.eos_ids
                for token, chance in children(target, drafter, text, depth, (text[-1:] + path)[-1], 6)
            ]
            paths += level
        assert tree.confidence is not None
        if len(tree) == 11:
            best = sorted((value for value, _ in paths), reverse=True)[:10]
            assert list(tree.confidence[1:]) == pytest.approx(best, rel=1e-3)
    assert any(len(tree) == 11 and max(tree.depths) > 1 for _, tree in drafter.seen)


def test_pairs_are_counted_among_the_weights(tiny_target):
    target: Target = tiny_target()
    heads = heads_and_pairs(target)
    pairs = heads.transitions
    assert pairs is not None
    with_pairs = watched(target, heads).memory_bytes()["draft_weights"]
    heads.transitions = None
    assert with_pairs - watched(target, heads).memory_bytes()["draft_weights"] == pairs.bytes > 12 * len(pairs)


@torch.inference_mode()
def test_ranks_of_a_static_tree_are_those_after_the_draft_before(tiny_target):
    target: Target = tiny_target()
    drafter = watched(target, heads_and_pairs(target), tree=[[0], [1], [0, 1], [1, 0]])
    decode(target, drafter, [tuple(range(5, 17))], tokens=8)
    full = [(text, tree) for text, tree in drafter.seen if len(tree) == 5]
    assert full
    for text, tree in full:
        first = [token for token, _ in children(target, drafter, text, 1, text[-1], 2)]
        second = [[token for token, _ in children(target, drafter, text, 2, token, 2)] for token in first]
        assert list(tree.tokens[1:]) == [*first, second[0][1], second[1][0]]


@pytest.mark.parametrize("make", MAKERS)
def test_rows_of_a_batch_draft_as_alone(make: Callable, tiny_target):
    target: Target = tiny_target()
    prompts = [tuple(range(5, 9)), tuple(range(30, 50)), (7,)]
    seen = []
    for rows in (1, 3):
        drafter = watched(target, make(target))
        decode(target, drafter, prompts, batch_size=rows)
        seen.append(sorted((text, tree.tokens, tree.parents) for text, tree in drafter.seen))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("make", MAKERS)
def test_heads_that_give_no_numbers_draft_what_does_not_matter(make: Callable, tiny_target):
    target: Target = tiny_target()
    heads, prompts = make(target), [(9, 40, 41), tuple(range(5, 30))]
    expected = decode(target, watched(target, heads), prompts)
    with torch.no_grad():
        next(iter(heads.parameters())).fill_(float("nan"))
    assert decode(target, watched(target, heads), prompts) == expected


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "4 deep"),
        ("medusa_7b_64", "no published tree"),
        ("measured", "no measured"),
    ],
)
def test_a_tree_that_the_heads_cannot_draft_is_refused(tree, word: str, tiny_target):
    """TR-01: three heads and a tree of depth four."""
    target: Target = tiny_target()
    with pytest.raises(InputError, match=word):
        MedusaDrafter(target, head=medusa_heads(target, 3), tree=tree)


def test_heads_share_no_weights():
    """A list that repeats one block would train one block."""
    heads = MedusaHeads(8, DraftVocabulary.whole(16), heads=3, blocks=2, own_output=True)
    assert len({parameter.data_ptr() for parameter in heads.parameters()}) == 3 * (2 * 2 + 1)
    assert {name for name, _ in heads.named_parameters()} >= {"0.0.linear.weight", "2.1.linear.bias", "1.2.weight"}
