"""The oracles can fail: the package is broken on purpose, and a named oracle has to see it.

Each mutation replaces one function by a wrong one of the kinds that other engines have shipped. An oracle that passes
under its mutation proves nothing, and so fails here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracles import (
    check_committed_rows,
    check_features,
    check_full_acceptance,
    check_greedy_identity,
    check_law,
    check_node_logits,
    decode,
    naive_answers,
    random_requests,
)
from scripted import DrawingDrafter, FutureDrafter, PathsDrafter, RandomTreeDrafter
from tiny_models import tiny_model
from torch import Tensor

from specdec_lab import decode as decode_module
from specdec_lab import noise as noise_module
from specdec_lab import target as target_module
from specdec_lab import verify as verify_module
from specdec_lab.audit.strategies import law_error
from specdec_lab.audit.toy import TOY_VOCAB, bigram_model, law_table, successor_table
from specdec_lab.choices import Choices, SequenceRule
from specdec_lab.decode import Request
from specdec_lab.drafters.base import DraftContext
from specdec_lab.noise import Chance
from specdec_lab.sampling import SamplingParams
from specdec_lab.stopping import StopRule
from specdec_lab.target import Target, TreeCache
from specdec_lab.tree import DraftTree
from specdec_lab.verify import Walk, follow

# --- oracles, on small cases ----------------------------------------------------------------------------------------


def node_logits() -> None:
    check_node_logits(Target(tiny_model("llama")), rounds=2)


def windowed_node_logits() -> None:
    check_node_logits(Target(tiny_model("mistral")), rounds=3)


def committed_rows() -> None:
    check_committed_rows(Target(tiny_model("llama")))


def features() -> None:
    check_features(Target(tiny_model("llama")), (1,))


def identity() -> None:
    target = Target(tiny_model("qwen2"))
    requests = random_requests(11, 6, (1, 9), (5, 30))
    answers = naive_answers(target.model, requests, target.eos_ids)
    check_greedy_identity(target, RandomTreeDrafter(target, answers), requests, answers)


def full_acceptance() -> None:
    target = Target(tiny_model("qwen2"))
    requests = random_requests(4, 2, (3,), (30,))
    answers = naive_answers(target.model, requests, target.eos_ids)
    check_full_acceptance(decode(target, FutureDrafter(target, answers, 4), requests))


def bonus() -> None:
    """Drafts 2 and 3 after 1; the target says 9 after 3."""
    target = Target(bigram_model(successor_table([0, 2, 3, 9, 1, *[0] * 11])))
    requests = [Request((4,), 6), Request((4,), 4)]
    answers = naive_answers(target.model, requests, frozenset())
    check_greedy_identity(target, PathsDrafter(target, [[2, 3]]), requests, answers, batch_sizes=(1,))


def stops() -> None:
    target = Target(bigram_model(successor_table([*range(1, TOY_VOCAB), 3]), eos=12))
    requests = [Request((start,), budget) for start in (6, 7, 9, 10) for budget in (2, 3, 30)]
    answers = naive_answers(target.model, requests, target.eos_ids)
    future = {prompt: [*text, 13, 14, 15, 3, 4] for prompt, text in answers.items()}
    check_greedy_identity(target, FutureDrafter(target, future, 4), requests, answers, batch_sizes=(1,))


LAWS = {0: (0.4, 0.35, 0.25), 1: (0.25, 0.3, 0.45), 2: (0.5, 0.25, 0.25)}


def sampled_law() -> None:
    target = Target(bigram_model(law_table(LAWS)))
    requests = [Request((0,), 3, noise_key=(number,)) for number in range(300)]
    paths = PathsDrafter(target, [[0, 1], [0, 2], [1]])
    done = decode(target, paths, requests, sampling=SamplingParams(1.0), batch_size=50)
    law: dict[Any, float] = {
        (first, second): sum(LAWS[0][start] * LAWS[start][first] for start in range(3)) * LAWS[first][second]
        for first in range(3)
        for second in range(3)
    }
    check_law(lambda number: done[number].output_ids[1:], law, len(requests))


def sampled_support() -> None:
    """With top_k=2 and every pair on offer, the third token is never emitted, from whichever row."""
    target = Target(bigram_model(law_table(dict.fromkeys(range(3), (0.4, 0.35, 0.25)))))
    requests = [Request((0,), 9, noise_key=(number,)) for number in range(20)]
    paths = PathsDrafter(target, [[a, b] for a in range(3) for b in range(3)])
    for generation in decode(target, paths, requests, sampling=SamplingParams(1.0, top_k=2), batch_size=10):
        assert set(generation.output_ids) <= {0, 1}, "a token was emitted that top_k cuts off"


def enumerated_law() -> None:
    """The law of four tokens by enumeration, under a repetition penalty and top-k, with drafts two deep."""
    sampling = SamplingParams(1.0, repetition_penalty=3.0)
    make = lambda target: PathsDrafter(target, [[0, 1], [1, 0], [2, 2]])  # noqa: E731
    for seed in range(3):
        assert law_error(make, random.Random(seed), sampling) < 1e-12


def drawn_law() -> None:
    """The law of three tokens by enumeration, with a drawn chain of two."""
    make = lambda target: DrawingDrafter(target, DRAFT_LAWS, (-1, 0, 1))  # noqa: E731
    assert law_error(make, random.Random(3), SamplingParams(1.0), new_tokens=3) < 1e-12


def drawn_tokens() -> None:
    """The first two tokens over many questions, with hashed noise and one drawn draft."""
    target = Target(bigram_model(law_table(dict.fromkeys(range(3), (0.3, 0.3, 0.4)))))
    drafter = DrawingDrafter(target, dict.fromkeys(range(3), (0.1, 0.1, 0.8)), (-1, 0))
    requests = [Request((0,), 3, noise_key=(number,)) for number in range(400)]
    done = decode(target, drafter, requests, sampling=SamplingParams(1.0), batch_size=50)
    check_law(lambda number: done[number].output_ids[1], {0: 0.3, 1: 0.3, 2: 0.4}, len(requests))


def drawn_acceptance() -> None:
    """One drawn draft is accepted with probability sum of min(p, q), here .8 (LC-11)."""
    target = Target(bigram_model(law_table(dict.fromkeys(range(3), (0.5, 0.3, 0.2)))))
    drafter = DrawingDrafter(target, dict.fromkeys(range(3), (0.7, 0.2, 0.1)), (-1, 0))
    requests = [Request((0,), 3, noise_key=(number,)) for number in range(400)]
    done = decode(target, drafter, requests, sampling=SamplingParams(1.0), batch_size=50)
    firsts = [generation.rounds[0].accepted for generation in done]
    assert abs(sum(firsts) / len(firsts) - 0.8) < 0.07


def forbidden_drafts() -> None:
    """A draft that must not be chosen is not offered either (TV-08)."""
    target = Target(bigram_model(law_table(LAWS)))
    sampling = SamplingParams(bad_words=((1,),))
    (done,) = decode(target, PathsDrafter(target, [[0, 1], [1, 2]]), [Request((0,), 6)], sampling=sampling)
    assert all(1 not in item.tokens[1:] for item in done.rounds), "a forbidden token was offered"


DRAFT_LAWS = {0: (0.2, 0.5, 0.3), 1: (0.6, 0.0, 0.4), 2: (0.1, 0.8, 0.1)}


# --- mutations ------------------------------------------------------------------------------------------------------

Choice = Callable[[int], int]


def accepts_the_first_child(tree: DraftTree, token_at: Choice) -> Walk:
    path = [0]
    while tree.children[path[-1]]:
        path.append(tree.children[path[-1]][0])
    return tuple(path), token_at(path[-1])


def accepts_the_deepest_path(tree: DraftTree, token_at: Choice) -> Walk:
    path = tree.path_to(tree.depths.index(tree.depth))
    return path, token_at(path[-1])


def accepts_nothing(tree: DraftTree, token_at: Choice) -> Walk:
    return (0,), token_at(0)


def accepts_one_too_many(tree: DraftTree, token_at: Choice) -> Walk:
    path, token = follow(tree, token_at)
    children = tree.children[path[-1]]
    return ((*path, children[0]), token_at(children[0])) if children else (path, token)


def bonus_from_the_parent(tree: DraftTree, token_at: Choice) -> Walk:
    path, _ = follow(tree, token_at)
    return path, token_at(path[-2] if len(path) > 1 else 0)


def bonus_from_the_root(tree: DraftTree, token_at: Choice) -> Walk:
    return follow(tree, token_at)[0], token_at(0)


def draws_per_branch(tree: DraftTree, token_at: Choice) -> Walk:
    """Tries each child with a choice of its own, so that a token offered more often is taken more often (LC-07)."""
    path, token = follow(tree, token_at)
    for child in tree.children[0]:
        if len(path) == 1 and token_at(child) == tree.tokens[child]:
            return (0, child), token_at(child)
    return path, token


def sees_all(self: DraftTree) -> Tensor:
    return torch.ones(len(self), len(self), dtype=torch.bool)


def sees_all_before(self: DraftTree) -> Tensor:
    return sees_all(self).tril()


_ancestor_mask = DraftTree.ancestor_mask


def sees_no_parent(self: DraftTree) -> Tensor:
    mask = _ancestor_mask(self)
    for node, parent in enumerate(self.parents[1:], start=1):
        mask[node, parent] = False
    return mask


def sees_its_parent_alone(self: DraftTree) -> Tensor:
    mask = torch.eye(len(self), dtype=torch.bool)
    for node, parent in enumerate(self.parents[1:], start=1):
        mask[node, parent] = True
    return mask


def keeps_the_first_slots(self: TreeCache, row: int, start: int, slots: Any) -> None:
    """Rewinds by a count, as if the accepted nodes were a prefix of the tree."""


_gather = TreeCache.gather


def gathers_one_slot_off(self: TreeCache, row: int, start: int, slots: Any) -> None:
    _gather(self, row, start, [slot + 1 for slot in slots])


def gathers_keys_alone(self: TreeCache, row: int, start: int, slots: Any) -> None:
    for buffer in self._keys.values():
        buffer[:, row, :, start : start + len(slots)] = buffer[:, row, :, torch.tensor(slots)]


_commit = Target.commit


def commits_one_too_few(self: Target, paths: Any) -> None:
    _commit(self, paths)
    for row in paths:
        self._lengths[row] -= 1


def commits_the_last_rejected(self: Target, paths: Any) -> None:
    _commit(self, paths)
    for row in paths:
        self._lengths[row] += 1


_masks = Target._masks


def shows_padding(self: Target, starts: Any, blocks: Any, positions: Tensor, visible: int) -> Any:
    """Lets the nodes of a narrow tree see the slots that pad it to the widest."""
    masks = _masks(self, starts, blocks, positions, visible)
    assert isinstance(masks, Tensor)
    for at, (start, block) in enumerate(zip(starts, blocks, strict=True)):
        nodes = 0 if block is None else block.shape[0]
        masks[at, ..., start + nodes : start + positions.shape[1]] = 0
    return masks


def shows_what_earlier_rounds_left(self: Target, starts: Any, blocks: Any, positions: Tensor, visible: int) -> Any:
    """Gives every row the committed length of the longest, as a mask that is not ragged does."""
    return _masks(self, [max(starts)] * len(starts), blocks, positions, visible)


def within_window_by_slot(starts: Any, blocks: Any, positions: Tensor, visible: int, window: int) -> Tensor:
    slots = torch.arange(positions.shape[1])
    queries = torch.stack([start + slots for start in starts])  # [rows, width]
    return queries[:, :, None] - torch.arange(visible)[None, None] < window


_within_window = target_module._within_window


def window_one_too_wide(starts: Any, blocks: Any, positions: Tensor, visible: int, window: int) -> Tensor:
    return _within_window(starts, blocks, positions, visible, window + 1)


_update = TreeCache.update


def writes_one_slot_late(self: TreeCache, key: Tensor, value: Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
    starts = self._starts
    self._starts = [start + 1 if start else start for start in starts]  # a prompt starts at 0
    try:
        return _update(self, key, value, layer_idx, *rest, **more)
    finally:
        self._starts = starts


def constant_noise(vocab: int, seed: int, key: Any, device: Any = "cpu") -> Tensor:
    return torch.full((vocab,), 0.5)


_gumbel_noise = noise_module.gumbel_noise


def noise_without_position(vocab: int, seed: int, key: tuple[object, ...], device: Any = "cpu") -> Tensor:
    return _gumbel_noise(vocab, seed, key[:-1], device)


def noise_with_a_wrong_shape(vocab: int, seed: int, key: tuple[object, ...], device: Any = "cpu") -> Tensor:
    """Normal noise in place of Gumbel noise: the right most likely token, the wrong law."""
    noise = _gumbel_noise(vocab, seed, key, device)
    return (noise - noise.mean()) * 0.3


_scores = Choices.scores


def processes_the_root_alone(self: Choices, node: int) -> Tensor:
    """Honours top-k and penalties for the root's row alone (SP-02)."""
    return _scores(self, node) if node == 0 else self._logits[node].float()


def sees_no_drafts(self: Choices, node: int) -> list[int]:
    """Processes every node with the history of the root (SP-01)."""
    return []


def forgets_what_was_emitted(self: SequenceRule, tokens: Any) -> None:
    """Leaves the history at the prompt (SP-01)."""


def accepts_every_draft(tree: DraftTree, law_at: Callable[[int], Tensor], chance: Chance) -> Walk:
    """A fixed u = 0 (LC-12)."""
    path = tree.path_to(tree.depths.index(tree.depth))
    return path, chance.draw(law_at(path[-1]))


def takes_draws_for_picks(tree: DraftTree, law_at: Callable[[int], Tensor], chance: Chance) -> Walk:
    """Verifies drawn drafts as if they were picked: the law is right, too few are accepted (LC-11)."""
    return follow(tree, lambda node: chance.draw(law_at(node)))


def keeps_the_target_law(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    return target_probs


def draws_with_the_verifiers_noise(self: DraftContext) -> Chance:
    """Takes the very numbers that will accept or reject what they drew."""
    return self.randomness.noise.chance((*self.randomness.key, "accept", len(self.tokens)))


_uniform = noise_module.HashedChance._uniform


def repeats_itself(self: noise_module.HashedChance) -> float:
    """Uses one number for all decisions of a round, so that the residual is drawn with what rejected the draft."""
    self._made = 0
    return _uniform(self)


def drops_nothing(tree: DraftTree, dropped: Callable[[int], bool]) -> DraftTree:
    return tree


def never_stops(self: StopRule, new: Any) -> Any:
    self._length += len(new)
    return len(new), "length" if self._length >= self.budget else None


def looks_at_the_last_token_alone(self: StopRule, new: Any) -> Any:
    """Tests EOS on the block's last token, as many engines did (ST-01)."""
    self._length += len(new)
    if new[-1] in self.eos_ids:
        return len(new), "eos"
    return len(new), "length" if self._length >= self.budget else None


def asks_for_the_limit_first(self: StopRule, new: Any) -> Any:
    """Finds the budget before EOS, and so gives the wrong reason (ST-04)."""
    for count, token in enumerate(new, start=1):
        self._length += 1
        if self._length >= self.budget:
            return count, "length"
        if token in self.eos_ids:
            return count, "length"
    return len(new), None


def features_of_the_first_nodes(self: Any, row: int) -> dict[int, Tensor]:
    """Shifts features by one node, as a cache of predictions in place of the target's states would (CP-08)."""
    own = {layer: states[self.at[row], : self.sizes[row]] for layer, states in self.features.items()}
    return {layer: states.roll(1, dims=0) for layer, states in own.items()}


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    owner: Any
    name: str
    wrong: Any
    oracles: tuple[Callable[[], None], ...]


MUTATIONS = [
    Mutation(verify_module, "follow", accepts_the_first_child, (identity, bonus, sampled_law)),
    Mutation(verify_module, "follow", accepts_the_deepest_path, (identity, sampled_law)),
    Mutation(verify_module, "follow", accepts_nothing, (full_acceptance,)),
    Mutation(verify_module, "follow", accepts_one_too_many, (identity, sampled_law)),
    Mutation(verify_module, "follow", bonus_from_the_parent, (bonus, identity)),
    Mutation(verify_module, "follow", bonus_from_the_root, (bonus, identity)),
    Mutation(verify_module, "follow", draws_per_branch, (sampled_law,)),
    Mutation(DraftTree, "ancestor_mask", sees_all, (node_logits, committed_rows, identity)),
    Mutation(DraftTree, "ancestor_mask", sees_all_before, (node_logits, committed_rows, identity)),
    Mutation(DraftTree, "ancestor_mask", sees_no_parent, (node_logits, committed_rows, full_acceptance)),
    Mutation(DraftTree, "ancestor_mask", sees_its_parent_alone, (node_logits, committed_rows, full_acceptance)),
    Mutation(DraftTree, "depths", property(lambda self: tuple(range(len(self)))), (node_logits, committed_rows)),
    Mutation(DraftTree, "depths", property(lambda self: (0,) * len(self)), (node_logits, committed_rows)),
    Mutation(TreeCache, "gather", keeps_the_first_slots, (node_logits, committed_rows, identity)),
    Mutation(TreeCache, "gather", gathers_one_slot_off, (node_logits, committed_rows, identity)),
    Mutation(TreeCache, "gather", gathers_keys_alone, (node_logits, committed_rows, identity)),
    Mutation(TreeCache, "update", writes_one_slot_late, (node_logits, committed_rows)),
    Mutation(Target, "commit", commits_one_too_few, (node_logits, committed_rows, identity)),
    Mutation(Target, "commit", commits_the_last_rejected, (node_logits, committed_rows, identity)),
    Mutation(Target, "_masks", shows_padding, (node_logits,)),
    Mutation(Target, "_masks", shows_what_earlier_rounds_left, (node_logits,)),
    Mutation(target_module, "_within_window", within_window_by_slot, (windowed_node_logits,)),
    Mutation(target_module, "_within_window", window_one_too_wide, (windowed_node_logits,)),
    Mutation(noise_module, "gumbel_noise", constant_noise, (sampled_law,)),
    Mutation(noise_module, "gumbel_noise", noise_without_position, (sampled_law,)),
    Mutation(noise_module, "gumbel_noise", noise_with_a_wrong_shape, (sampled_law,)),
    Mutation(Choices, "scores", processes_the_root_alone, (sampled_support, enumerated_law)),
    Mutation(Choices, "_drafts", sees_no_drafts, (enumerated_law,)),
    Mutation(SequenceRule, "extend", forgets_what_was_emitted, (enumerated_law,)),
    Mutation(verify_module, "reject", accepts_every_draft, (drawn_law, drawn_acceptance)),
    Mutation(verify_module, "reject", takes_draws_for_picks, (drawn_acceptance,)),
    Mutation(verify_module, "residual", keeps_the_target_law, (drawn_law, drawn_tokens)),
    Mutation(DraftContext, "chance", draws_with_the_verifiers_noise, (drawn_tokens,)),
    Mutation(noise_module.HashedChance, "_uniform", repeats_itself, (drawn_tokens,)),
    Mutation(decode_module, "without", drops_nothing, (forbidden_drafts,)),
    Mutation(StopRule, "take", never_stops, (stops,)),
    Mutation(StopRule, "take", looks_at_the_last_token_alone, (stops,)),
    Mutation(StopRule, "take", asks_for_the_limit_first, (stops,)),
    Mutation(target_module.TargetOutput, "row_features", features_of_the_first_nodes, (features,)),
]

ORACLES = sorted({oracle for mutation in MUTATIONS for oracle in mutation.oracles}, key=lambda oracle: oracle.__name__)
CASES = [(mutation, oracle) for mutation in MUTATIONS for oracle in mutation.oracles]


def _name(value: object) -> str:
    if isinstance(value, Mutation):
        wrong = value.wrong
        return f"{value.name}={getattr(wrong, '__name__', 'slot' if MUTATIONS.index(value) % 2 else 'zero')}"
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("mutation", "oracle"), CASES, ids=_name)
def test_the_oracle_sees_the_fault(mutation: Mutation, oracle: Callable[[], None], monkeypatch):
    """Guards LC-12: patched code fails; an error other than AssertionError would be luck, not the oracle."""
    monkeypatch.setattr(Target, "_check_against_plain_forward", lambda self: None)  # it sees some of these itself
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.wrong)
    with pytest.raises(AssertionError):
        oracle()


@pytest.mark.parametrize("oracle", ORACLES, ids=_name)
def test_the_oracle_passes_on_the_code_as_it_is(oracle: Callable[[], None]):
    oracle()
