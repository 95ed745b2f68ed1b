"""Medusa: which state the heads read, and which trees they give."""

from __future__ import annotations

import pytest
import torch
from heads_at_hand import every_other, medusa_heads

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.medusa import MedusaDrafter
from specdec_lab.errors import InputError
from specdec_lab.heads.medusa import MedusaHeads
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


def test_confident_tree_holds_the_likeliest_paths(tiny_target):
    target: Target = tiny_target()
    drafter = watched(target, medusa_heads(target), nodes=10, branches=6)
    decode(target, drafter, [tuple(range(5, 17))])
    for _, tree in drafter.seen:
        assert tree.confidence is not None
        assert len(tree) <= 11
        for node in range(1, len(tree)):
            assert tree.confidence[node] <= tree.confidence[tree.parents[node]]
    assert any(len(tree) == 11 for _, tree in drafter.seen)


def test_rows_of_a_batch_draft_as_alone(tiny_target):
    target: Target = tiny_target()
    heads = medusa_heads(target)
    prompts = [tuple(range(5, 9)), tuple(range(30, 50)), (7,)]
    assert decode(target, watched(target, heads), prompts) == decode(
        target, watched(target, heads), prompts, batch_size=3
    )


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
