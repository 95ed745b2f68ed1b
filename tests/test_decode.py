"""The decode loop end to end: ids, counters, messages, limits and failures, against a loop without any cache."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles import (
    check_full_acceptance,
    check_greedy_identity,
    check_law,
    check_messages,
    decode,
    naive_answer,
    naive_answers,
    plain_logits,
    random_requests,
)
from sample_tokenizers import letters
from scripted import DrawingDrafter, FutureDrafter, PathsDrafter, RandomTreeDrafter, ScriptedDrafter
from tiny_models import tiny_model
from torch import Tensor

from specdec_lab import decode as decode_module
from specdec_lab import target as target_module
from specdec_lab.audit.toy import TOY_VOCAB, bigram_model, law_table, successor_table
from specdec_lab.decode import GREEDY, Generation, Request, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.drafters.ngram import NgramDrafter
from specdec_lab.errors import DrafterError, InputError
from specdec_lab.noise import gumbel_noise
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Exact, Target
from specdec_lab.tree import DraftTree, chain, from_paths, root_only
from specdec_lab.verify import Acceptance, RuleName

GetTarget = Callable[..., Target]

BUDGETS = (1, 2, 3, 4, 5, 6, 30)


def counting_target(eos: int | None = None, **options: Any) -> Target:
    """Return a target that says 5 after 4, 6 after 5 and so on, and 3 after 15."""
    successor = [1, 2, 3, *range(4, TOY_VOCAB), 3]
    return Target(bigram_model(successor_table(successor), eos=eos, **options))


# --- ids against the naive loop -------------------------------------------------------------------------------------


def test_ids_equal_the_naive_loop(architecture: str, exact: Exact, tiny_target: GetTarget):
    """Guards CP-02, CP-04, ST-02, TR-02: random trees, all budgets, batches of 1 and 3 with refills."""
    target = tiny_target(architecture, exact)
    requests = random_requests(11, 10, (1, 3, 9, 20), BUDGETS)
    answers = naive_answers(target.model, requests, target.eos_ids)
    generations = check_greedy_identity(target, RandomTreeDrafter(target, answers), requests, answers)
    scattered = [item for generation in generations for item in generation.rounds if item.path != (*range(1, 13),)]
    assert sum(item.accepted for item in scattered) > 10, "nothing was accepted, so nothing was proved"
    assert len({generation.output_ids[-1] for generation in generations}) > 3, "all answers are alike"


@pytest.mark.parametrize("chunk", [3, 8])
def test_ids_after_a_prompt_of_several_chunks(chunk: int, architecture: str, tiny_target: GetTarget, monkeypatch):
    """Chunk borders within and across the window leave no trace in what is decoded after them."""
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(target_module, "CAUSAL_CHUNK", chunk)
    target = tiny_target(architecture)
    requests = random_requests(5, 3, (17, 24), (12,))
    answers = naive_answers(target.model, requests, target.eos_ids)
    check_greedy_identity(target, RandomTreeDrafter(target, answers, seed=chunk), requests, answers)


def test_two_prompts_in_a_row_equal_each_alone(tiny_target: GetTarget):
    """Guards CP-03, SP-08 and ML: no request leaves anything behind for the next, whatever drafted it."""
    target = tiny_target("gemma3")
    requests = random_requests(3, 4, (1, 6, 21), (9, 14))
    drafter = NgramDrafter(target, min_ngram=1, branches=3)
    together = decode(target, drafter, requests)
    backwards = decode(target, drafter, requests[::-1])[::-1]
    alone = [decode(target, NgramDrafter(target, min_ngram=1, branches=3), [request])[0] for request in requests]
    for generations in (backwards, alone):
        assert [generation.output_ids for generation in generations] == [item.output_ids for item in together]
        assert [rounds_of(generation) for generation in generations] == [rounds_of(item) for item in together]


def rounds_of(generation: Generation) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    return [(item.tokens, item.parents, item.path) for item in generation.rounds]


SHAPES: dict[str, list[list[int]]] = {
    "empty": [],
    "one node": [[0]],
    "depth 1, width 4": [[0], [1], [2], [3]],
    "chain of 4": [[0, 1, 2, 3]],
    "full 3 x 3": [[a, b] for a in (0, 1, 2) for b in (0, 1, 2)],
    "lopsided": [[3], [0, 1, 2, 0, 1], [0, 0]],
}


@pytest.mark.parametrize("paths", SHAPES.values(), ids=SHAPES.keys())
def test_ids_do_not_depend_on_the_shape(paths: list[list[int]]):
    """Guards TR-02 and TV-04: all shapes give the same ids, also for token 0 and with nothing to propose."""
    target = Target(bigram_model(successor_table([0, 2, 3, 1, 1, *[0] * 11])))
    for prompt in ((0,), (4,), (9, 1)):
        wanted = naive_answer(target.model, prompt, 7, frozenset())[len(prompt) :]
        (generation,) = decode(target, PathsDrafter(target, paths), [Request(prompt, 7)])
        assert list(generation.output_ids) == wanted


# --- acceptance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 7])
def test_drafting_the_future_is_accepted_in_full(k: int, architecture: str, exact: Exact):
    """Guards CP-01, CP-02 and CP-08: over 200 tokens no rewind is off by one anywhere."""
    model = tiny_model(architecture, eos_token_id=None)
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    target = Target(model, exact=exact)
    budget = 200 if (k, exact) == (4, "off") else 40
    request = Request((7, 3, 9), budget)
    answers = naive_answers(model, [request], frozenset())
    generations = check_greedy_identity(target, FutureDrafter(target, answers, k), [request], answers, batch_sizes=(1,))
    check_full_acceptance(generations)
    assert len(generations[0].rounds) == -(-(budget - 1) // (k + 1))


@pytest.mark.parametrize("accepted", [0, 2, 3, 4])
def test_cache_lengths_after_each_acceptance(accepted: int):
    """Guards CP-01 and CP-02: with k=4, trimming 4, 2, 1 or 0 rows leaves prompt + emitted - 1 in the cache."""
    target = counting_target()
    lengths: list[tuple[int, int]] = []

    def script(context: DraftContext) -> DraftTree:
        lengths.append((target.length(context.row), len(context.tokens)))
        right = [3 + (context.tokens[-1] - 3 + step) % 13 for step in range(1, 6)]
        return chain(context.tokens[-1], [*right[:accepted], *[1] * (4 - accepted)][: context.max_depth])

    (generation,) = decode(target, ScriptedDrafter(target, script), [Request((4, 5), 21)])
    assert list(generation.output_ids) == [3 + (3 + step) % 13 for step in range(21)]
    assert all(cached == committed - 1 for cached, committed in lengths)
    assert {item.accepted for item in generation.rounds[:-1]} == {accepted}


def test_the_bonus_is_not_the_parents_token_again():
    """Guards LC-04: drafts 1, 2, 3 are all accepted and the target says 9 after 3."""
    target = Target(bigram_model(successor_table([0, 2, 3, 9, 1, *[0] * 11])))
    for paths in ([[1, 2, 3]], [[8, 1], [1, 2, 3], [1, 3]]):
        # the prompt ends in 4, so the first token is 1; then 2, 3, 9
        (generation,) = decode(target, PathsDrafter(target, [path[1:] for path in paths]), [Request((4,), 4)])
        assert generation.output_ids == (1, 2, 3, 9)
        assert generation.rounds[0].accepted == 2 or len(paths) > 1


def test_equal_logits_break_alike_in_both_paths():
    """Guards LC-13: of two tokens with the same logit the lower id wins, in a plain step, a chain and a tree."""
    table = torch.zeros(TOY_VOCAB, TOY_VOCAB)
    for token in range(TOY_VOCAB):
        table[token, [(token * 5 + 3) % 16, (token * 7 + 2) % 16, (token * 3 + 9) % 16]] = 4.0
    target = Target(bigram_model(table))
    requests = [Request((token,), 12) for token in range(TOY_VOCAB)]
    answers = naive_answers(target.model, requests, frozenset())
    for drafter in (
        AutoregressiveDrafter(target),
        FutureDrafter(target, answers, 5),
        PathsDrafter(target, [[a, b] for a in range(7) for b in range(7)]),
    ):
        check_greedy_identity(target, drafter, requests, answers, batch_sizes=(1, 5))


# --- stops and budgets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "accepted", "bonus"),
    [((10,), 1, 0), ((9,), 2, 0), ((7,), 4, 0), ((6,), 4, 1), ((11,), None, None)],
    ids=["first of the block", "middle", "last", "as bonus", "first token"],
)
def test_eos_anywhere_in_a_block_ends_the_answer(prompt: tuple[int], accepted: int | None, bonus: int | None):
    """Guards ST-01 and BM-02: with EOS = 12 and four right drafts, nothing past EOS is emitted, kept or counted."""
    target = counting_target(eos=12)
    future = FutureDrafter(target, {prompt: [*prompt, *range(prompt[0] + 1, 16), 3, 4, 5, 6]}, k=4)
    generations = decode(target, future, [Request(prompt, 50)] * 2)
    for generation in generations:
        assert generation.output_ids == tuple(range(prompt[0] + 1, 13))
        assert generation.finish_reason == "eos"
        if accepted is None:
            assert generation.rounds == ()
        else:
            (only,) = generation.rounds
            assert (only.accepted, only.bonus, only.proposed) == (accepted, bonus, 4)


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets_are_exact(budget: int):
    """Guards ST-02 and ST-05: exactly the budget, the same prefix as a plain loop, and no draft that cannot be used."""
    target = counting_target()
    wanted = tuple(3 + (2 + step) % 13 for step in range(budget))
    scripts: list[Callable[[DraftContext], DraftTree]] = [
        lambda context: chain(
            context.tokens[-1],
            [3 + (context.tokens[-1] - 3 + step) % 13 for step in range(1, 1 + min(8, context.max_depth))],
        ),
        lambda context: from_paths(context.tokens[-1], [[1], [2] * context.max_depth]),
        lambda context: root_only(context.tokens[-1]),
    ]
    for script in scripts:
        drafter = ScriptedDrafter(target, script)
        (generation,) = decode(target, drafter, [Request((4,), budget)])
        assert generation.output_ids == wanted
        assert generation.finish_reason == "length"
        assert all(depth >= 1 for depth in drafter.depths)
        done = [
            1 + sum(item.accepted + item.bonus for item in generation.rounds[:at]) for at in range(len(drafter.depths))
        ]
        assert drafter.depths == [budget - emitted - 1 for emitted in done]


def test_no_draft_is_asked_for_with_one_token_left():
    """Guards ST-05 and PF-04: the last token is a plain step, and a batch of such rows asks for nothing at all."""
    target = counting_target()
    asked: list[int] = []

    class Counting(PathsDrafter):
        def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
            asked.append(len(contexts))
            return super().propose_batch(contexts)

    decode(target, Counting(target, [[1]]), [Request((4,), 2)] * 3, batch_size=3)
    assert asked == []
    decode(target, Counting(target, [[1]]), [Request((4,), 2), Request((4,), 3)], batch_size=2)
    assert asked == [1]


def test_a_stop_string_across_rounds_and_drafts():
    """Guards ST-04: the stop comes before the limit, wherever blocks begin and end; a stop past the limit is none."""
    target = counting_target()
    target.tokenizer = letters()
    output = tuple(3 + (2 + step) % 13 for step in range(20))
    spelled = [str(target.tokenizer.decode([token])) for token in output]
    assert len(set(spelled)) == 13
    whole, answers = "".join(spelled), {(4,): [4, *output]}
    for first in range(1, 9):
        stop = "".join(spelled[first : first + 3])
        ends = first + 3
        for k in (1, 2, 5):
            future = FutureDrafter(target, answers, k)
            (generation,) = decode(target, future, [Request((4,), 20, stop=(stop, "never"))])
            assert generation.output_ids == output[:ends]
            assert generation.finish_reason == "stop"
            assert generation.text == whole[:first]
            (generation,) = decode(target, future, [Request((4,), ends - 1, stop=(stop,))])
            assert generation.output_ids == output[: ends - 1]
            assert generation.finish_reason == "length"
            assert generation.text == whole[: ends - 1]


@pytest.mark.parametrize("prompt_length", [1, 27, 30, 31])
def test_up_to_the_last_position(prompt_length: int):
    """Guards CP-11 and ST-05: with 32 positions there are 32 tokens in all, the same with and without drafts."""
    target = counting_target(positions=32)
    prompt = tuple(3 + at % 13 for at in range(prompt_length))
    answers = {prompt: [3 + at % 13 for at in range(60)]}
    for drafter in (AutoregressiveDrafter(target), FutureDrafter(target, answers, 8), NgramDrafter(target)):
        (generation,) = decode(target, drafter, [Request(prompt, 50)])
        assert generation.output_ids == tuple(3 + at % 13 for at in range(prompt_length, 32))
        assert generation.finish_reason == "length"


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_up_to_the_last_position_of_a_real_model(architecture: str):
    """Guards CP-11: GPT-2 has a table of positions, and a draft beyond it would index out of range."""
    limit = {"llama": "max_position_embeddings", "gpt2": "n_positions"}[architecture]
    target = Target(tiny_model(architecture, **{limit: 24}))
    requests = random_requests(2, 4, (9, 17, 23), (64,))
    answers = naive_answers(
        target.model, [Request(item.prompt_ids, 24 - len(item.prompt_ids)) for item in requests], target.eos_ids
    )
    check_greedy_identity(target, RandomTreeDrafter(target, answers), requests, answers)


# --- log-probabilities and messages ---------------------------------------------------------------------------------


def test_log_probabilities_equal_a_scoring_pass(architecture: str, tiny_target: GetTarget):
    """Guards SP-07: of accepted drafts, of bonus tokens and of the first token alike."""
    target = tiny_target(architecture)
    requests = [Request(item.prompt_ids, 14, logprobs=True) for item in random_requests(8, 3, (2, 12), (1,))]
    answers = naive_answers(target.model, requests, target.eos_ids)
    for drafter in (
        AutoregressiveDrafter(target),
        RandomTreeDrafter(target, answers),
        FutureDrafter(target, answers, 4),
    ):
        for sampling in (GREEDY, SamplingParams(temperature=0.7, top_k=3, seed=1)):
            for generation in decode(target, drafter, requests, sampling=sampling, batch_size=2):
                text = [*generation.request.prompt_ids, *generation.output_ids]
                scores = plain_logits(target.model, text).log_softmax(-1)
                start = len(generation.request.prompt_ids)
                wanted = [scores[at - 1, text[at]].item() for at in range(start, len(text))]
                assert generation.logprobs == pytest.approx(wanted, abs=1e-5)


def test_log_probabilities_only_where_asked(tiny_target: GetTarget):
    target = tiny_target()
    with_and_without = [Request((5, 6), 4, logprobs=True), Request((5, 6), 4)]
    first, second = decode(target, AutoregressiveDrafter(target), with_and_without, batch_size=2)
    assert first.logprobs is not None
    assert second.logprobs is None
    assert first.output_ids == second.output_ids


def test_messages_tell_the_whole_text(tiny_target: GetTarget):
    """Guards CP-08: every committed token reaches the drafter once, in order, also those of rounds without drafts."""
    target = tiny_target("qwen2")
    requests = random_requests(4, 5, (1, 9), (20,))
    answers = naive_answers(target.model, requests, target.eos_ids)
    growing = RandomTreeDrafter(target, answers, seed=3)

    def script(context: DraftContext) -> DraftTree:
        message = context.verification
        assert message.sequence_id == context.sequence_id
        assert message.next_token == context.tokens[-1]
        assert message.logits.shape[0] == (1 if message.is_prompt else len(message.tree))
        assert context.tokens[: context.prompt_length] == list(requests[context.sequence_id].prompt_ids)
        return root_only(context.tokens[-1]) if len(context.tokens) % 3 == 0 else growing.propose(context)

    drafter = ScriptedDrafter(target, script)
    for index, generation in enumerate(decode(target, drafter, requests, batch_size=3)):
        messages = [message for message in drafter.messages if message.sequence_id == index]
        check_messages(messages, [*generation.request.prompt_ids, *generation.output_ids])


def test_message_logits_are_those_of_the_tree(tiny_target: GetTarget):
    """What a window of guesses is refreshed from: row i is the target's raw answer to node i, accepted or not."""
    target = tiny_target("gemma3")
    drafter = ScriptedDrafter(
        target, lambda context: from_paths(context.tokens[-1], [path[: context.max_depth] for path in ([5, 6], [7])])
    )
    decode(target, drafter, [Request((9, 8, 7), 6)])
    text = [9, 8, 7]
    for message in drafter.messages:
        if not message.is_prompt:
            for node in range(len(message.tree)):
                ids = [*text, *(message.tree.tokens[at] for at in message.tree.path_to(node)[1:])]
                assert torch.allclose(message.logits[node], plain_logits(target.model, ids)[-1], atol=2e-4)
        text += message.new_tokens


def test_state_lives_as_long_as_its_sequence(tiny_target: GetTarget):
    """Guards CP-03, ML-04 and SP-08: what a drafter remembers of a sequence is gone when the sequence is."""
    target = tiny_target()

    class Memory:
        pass

    alive: list[weakref.ref[Memory]] = []
    fresh: list[int] = []

    def script(context: DraftContext) -> DraftTree:
        if context.state is None:
            assert context.verification.is_prompt
            context.state = Memory()
            alive.append(weakref.ref(context.state))
            fresh.append(context.sequence_id)
        assert sum(memory() is not None for memory in alive) <= 2
        return root_only(context.tokens[-1])

    requests = random_requests(6, 6, (2, 5), (3, 6, 9))
    decode(target, ScriptedDrafter(target, script), requests, batch_size=2)
    gc.collect()
    assert sorted(fresh) == list(range(6))
    assert not any(memory() for memory in alive)


def test_nothing_of_the_callers_is_changed(tiny_target: GetTarget):
    """Guards SP-08: no setting is left on the model, its configuration or the requests."""
    target = tiny_target("qwen2")
    requests = random_requests(6, 3, (4,), (5,))
    before = copy.deepcopy((target.model.config.to_dict(), target.model.generation_config.to_dict(), requests))  # type: ignore[union-attr]
    attributes = set(vars(target.model))
    decode(target, NgramDrafter(target), requests, sampling=SamplingParams(0.7, top_k=3), batch_size=2)
    after = (target.model.config.to_dict(), target.model.generation_config.to_dict(), requests)  # type: ignore[union-attr]
    assert after == before
    assert set(vars(target.model)) == attributes


def test_no_model_or_tokenizer_is_copied_per_request(monkeypatch):
    """Guards PF-02: a deep copy of either, however indirect, would raise here."""
    target = counting_target()
    target.tokenizer = letters()

    def refuse(self: Any, _memo: Any) -> None:
        raise AssertionError(f"{type(self).__name__} was copied")

    for owner in (type(target.tokenizer), type(target.model)):
        monkeypatch.setattr(owner, "__deepcopy__", refuse, raising=False)
    requests = [Request((4,), 5, stop=("z",)), Request((5,), 5)]
    decode(target, NgramDrafter(target), requests, sampling=SamplingParams(0.7, top_k=3), batch_size=2)


# --- sampling -------------------------------------------------------------------------------------------------------

LAWS = {0: (0.4, 0.35, 0.25), 1: (0.25, 0.3, 0.45), 2: (0.5, 0.25, 0.25)}


@pytest.mark.parametrize("paths", SHAPES.values(), ids=SHAPES.keys())
def test_the_law_of_two_tokens_for_every_shape(paths: list[list[int]]):
    """Guards LC-03, LC-07 and LC-12: root, draft and bonus rows all draw from the target's law, and independently."""
    target = Target(bigram_model(law_table(LAWS)))
    requests = [Request((0,), 3, noise_key=(number,)) for number in range(300)]
    generations = decode(
        target, PathsDrafter(target, paths), requests, sampling=SamplingParams(temperature=1.0), batch_size=50
    )
    law: dict[Any, float] = {
        (first, second): sum(LAWS[0][start] * LAWS[start][first] for start in range(3)) * LAWS[first][second]
        for first in range(3)
        for second in range(3)
    }
    check_law(lambda number: generations[number].output_ids[1:], law, len(requests))
    drafted = sum(item.accepted for generation in generations for item in generation.rounds)
    assert (drafted > 40) == bool(paths)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 2}, {0: {0, 1}, 1: {1, 2}, 2: {0, 1}}),
        ({"top_p": 0.6}, {0: {0, 1}, 1: {1, 2}, 2: {0, 1}}),
        ({"min_p": 0.6}, {0: {0, 1, 2}, 1: {1, 2}, 2: {0, 1}}),
        ({"temperature": 0.2, "top_p": 0.7}, None),
    ],
    ids=str,
)
def test_processors_bind_drafts_and_bonus_alike(settings: dict[str, Any], allowed: dict[int, set[int]] | None):
    """Guards SP-02: with every pair of tokens on offer, what a processor cuts off is never emitted from any row."""
    laws = {**LAWS, 2: (0.45, 0.35, 0.2)}
    target = Target(bigram_model(law_table(laws)))
    sampling = SamplingParams(**{"temperature": 1.0, **settings})
    requests = [Request((number % 3,), 9, noise_key=(number,)) for number in range(60)]
    everything = PathsDrafter(target, [[a, b] for a in range(3) for b in range(3)])
    plain = decode(target, AutoregressiveDrafter(target), requests, sampling=sampling, batch_size=20)
    offered = decode(target, everything, requests, sampling=sampling, batch_size=20)
    assert [item.output_ids for item in offered] == [item.output_ids for item in plain]
    assert {item.accepted for generation in offered for item in generation.rounds[:-1]} == {2}
    if allowed is None:
        return
    seen: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for generation in offered:
        text = [*generation.request.prompt_ids, *generation.output_ids]
        for before, after in pairwise(text):
            seen[before].add(after)
    assert seen == allowed


@pytest.mark.parametrize("temperature", [0.01, 1e-6, 0.0])
def test_low_temperatures_give_the_greedy_text(temperature: float):
    """Guards SP-10: whatever is drafted, and T = 0 is the greedy path itself."""
    target = Target(bigram_model(law_table(LAWS)))
    requests = [Request((number % 3,), 9, noise_key=(number,)) for number in range(6)]
    answers = naive_answers(target.model, requests, frozenset())
    for paths in SHAPES.values():
        for generation in decode(
            target, PathsDrafter(target, paths), requests, sampling=SamplingParams(temperature), batch_size=3
        ):
            assert [*generation.request.prompt_ids, *generation.output_ids] == answers[generation.request.prompt_ids]


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0, top_p=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_row_of_nan_fails_alone(batch_size: int, sampling: SamplingParams):
    """Guards CP-13 and LC-08: neighbours go on, and the next request in that row is clean."""
    target = counting_target()

    def nan_after_9(_module: Any, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
        return logits.masked_fill(inputs[0][..., 9:10] > 0.5, float("nan"))

    target.model.get_output_embeddings().register_forward_hook(nan_after_9)  # type: ignore[union-attr]
    prompts = [(7,), (10,), (9,), (3,), (10, 11), (11,), (12,), (10,)]
    requests = [Request(prompt, 4) for prompt in prompts]
    for paths in ([], [[8, 9, 10]], [[5], [8, 9]]):
        generations = decode(target, PathsDrafter(target, paths), requests, sampling=sampling, batch_size=batch_size)
        for prompt, generation in zip(prompts, generations, strict=True):
            if prompt in ((7,), (9,)):
                assert generation.error is not None
                assert "NaN" in generation.error
                assert generation.output_ids == ()
                assert generation.finish_reason is None
            else:
                assert generation.error is None
                assert generation.output_ids == tuple(3 + (prompt[-1] - 2 + step) % 13 for step in range(4))


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_a_row_of_nan_fails_alone_under_every_rule(rule: RuleName):
    """Guards LC-08: a law that is NaN ends the row, be the rule one that asks for laws; others go on."""
    target = three_token_target()

    def nan_after_2(_module: Any, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
        return logits.masked_fill(inputs[0][..., 2:3] > 0.5, float("nan"))

    target.model.get_output_embeddings().register_forward_hook(nan_after_2)  # type: ignore[union-attr]
    requests = [Request((0,), 6, noise_key=(number,)) for number in range(40)]
    drafter = DrawingDrafter(target, DRAFT_LAWS, (-1, 0, 0))
    failed = 0
    for generation in decode(target, drafter, requests, sampling=EVEN, acceptance=Acceptance(rule), batch_size=3):
        if generation.error is None:
            assert 2 not in generation.output_ids[:-1]
        else:
            assert "NaN" in generation.error
            failed += 1
    assert 0 < failed < len(requests)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0, seed=3)])
def test_a_draft_without_finite_states_costs_a_round_and_no_answer(sampling: SamplingParams):
    """Guards LC-08: plain decoding would not have met that token, so a strategy that proposes it must not fail.

    Its keys and values stand in masked slots, where they would reach every later round too.
    """
    target = Target(tiny_model("llama", tie_word_embeddings=False))
    embedding = target.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    requests = [Request((5, 6, 7 + number), 12, noise_key=(number,)) for number in range(3)]
    plain = decode(target, AutoregressiveDrafter(target), requests, sampling=sampling)
    poisonous = next(
        token for token in range(20, target.vocab_size) if not any(token in one.output_ids for one in plain)
    )
    with torch.no_grad():
        embedding[poisonous] = float("nan")
    drafter = PathsDrafter(target, [[poisonous, 3], [4]])
    for batch_size in (1, 3):
        for one, wanted in zip(
            decode(target, drafter, requests, sampling=sampling, batch_size=batch_size), plain, strict=True
        ):
            assert one.error is None
            assert one.output_ids == wanted.output_ids
            assert sum(item.accepted + item.bonus for item in one.rounds) == len(one.output_ids) - 1
            assert {len(item.tokens) for item in one.rounds} == {1}
            assert one.time_seconds.total > 0


def test_a_nan_draft_law_is_the_strategys_fault():
    """Guards LC-08: it is named, and never reaches the target's law."""
    target = three_token_target()

    class Broken(DrawingDrafter):
        def propose(self, context: DraftContext) -> DraftTree:
            tree = super().propose(context)
            law = torch.full((len(tree), target.vocab_size), float("nan"))
            return DraftTree(tree.tokens, tree.parents, law)

    with pytest.raises(DrafterError, match="Broken: draft_probs of node 0 is no law"):
        decode(target, Broken(target, DRAFT_LAWS, (-1, 0)), [Request((0,), 6)], sampling=EVEN)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_nan_in_keys_and_values_stays_in_its_row(batch_size: int, exact: Exact):
    """Guards CP-13: a prompt whose token embeds to NaN poisons the cache of its row, which is then wiped."""
    model = tiny_model("qwen2", eos_token_id=None)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    with torch.no_grad():
        embedding[100] = float("nan")
        model.get_output_embeddings().weight[100] = 0.0  # type: ignore[union-attr]
    target = Target(model, exact=exact)
    good = [Request((7, 3, 9 + at), 12) for at in range(6)]
    answers = naive_answers(model, good, target.eos_ids)
    bad = Request((5, 100, 6, *[8] * 20), 12)
    requests = [good[0], bad, *good[1:4], bad, *good[4:]]
    generations = decode(target, RandomTreeDrafter(target, answers, max_nodes=6), requests, batch_size=batch_size)
    assert [generation.error is not None for generation in generations] == [request is bad for request in requests]
    for request, generation in zip(requests, generations, strict=True):
        if request is not bad:
            assert [*request.prompt_ids, *generation.output_ids] == answers[request.prompt_ids]


def test_requests_that_cannot_run_fail_alone():
    """An empty or too long prompt and an id outside the vocabulary end in a sentence each; the others go on."""
    target = counting_target(positions=32)
    prompts = [(4,), (), tuple([5] * 32), (6,), (5, 99), (-1,), tuple([5] * 40), (7,)]
    generations = decode(target, NgramDrafter(target), [Request(prompt, 5) for prompt in prompts], batch_size=2)
    errors = [generation.error for generation in generations]
    assert [error is None for error in errors] == [True, False, False, True, False, False, False, True]
    assert "no tokens" in str(errors[1])
    assert "32 positions" in str(errors[2])
    assert str(errors[4]) == "prompt_ids=99: token ids run from 0 to 15"
    assert str(errors[5]).startswith("prompt_ids=-1")
    assert generations[-1].output_ids == (8, 9, 10, 11, 12)


@pytest.mark.parametrize(
    ("propose", "complaint"),
    [
        (lambda context: chain(context.tokens[-1], [1] * (context.max_depth + 1)), "at depth 10"),
        (lambda context: from_paths(context.tokens[-1], [[token] for token in range(8)]), "9 nodes"),
        (lambda context: root_only(context.tokens[-1] + 1), "rooted its tree at 6, not at 5"),
        (lambda context: root_only(context.tokens[-2]), "rooted its tree at 4, not at 5"),
        (lambda context: chain(context.tokens[-1], [TOY_VOCAB]), "token 16; the target's ids end at 15"),
    ],
    ids=["too deep", "too large", "wrong root", "last root again", "no such token"],
)
def test_a_drafter_that_breaks_its_promise_is_named(propose: Callable[[DraftContext], DraftTree], complaint: str):
    """Guards TR-01, TV-02 and CP-02: a strategy's fault is an error that names it, and no wrong answer."""
    target = counting_target()
    drafter = ScriptedDrafter(target, propose, max_nodes=8 if complaint == "9 nodes" else 16)
    with pytest.raises(DrafterError, match=f"ScriptedDrafter .*{complaint}"):
        decode(target, drafter, [Request((4,), 11)])
    (generation,) = decode(target, AutoregressiveDrafter(target), [Request((4,), 2)])
    assert generation.output_ids == (5, 6)


# --- drawn drafts, processors, lossy acceptance ----------------------------------------------------------------------

DRAFT_LAWS = {0: (0.7, 0.2, 0.1), 1: (0.2, 0.2, 0.6), 2: (0.3, 0.3, 0.4)}
EVEN = SamplingParams(1.0)


def three_token_target(law: Sequence[float] = (0.5, 0.3, 0.2)) -> Target:
    return Target(bigram_model(law_table(dict.fromkeys(range(3), law))))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_drawn_draft_without_its_law_is_refused(rule: RuleName):
    """Guards LC-11: it would be taken for a picked one, and far too few would be accepted, without an error."""
    target = three_token_target()

    class Forgetful(DrawingDrafter):
        def propose(self, context: DraftContext) -> DraftTree:
            tree = super().propose(context)
            return DraftTree(tree.tokens, tree.parents)

    drafter = Forgetful(target, DRAFT_LAWS, (-1, 0))
    with pytest.raises(DrafterError, match=f"Forgetful: .*acceptance={rule} needs the draft_probs"):
        decode(target, drafter, [Request((0,), 5)], sampling=EVEN, acceptance=Acceptance(rule))
    decode(target, drafter, [Request((0,), 5)])  # greedy needs no law
    decode(target, drafter, [Request((0,), 5)], sampling=EVEN, acceptance=Acceptance("coupled"))


def test_a_law_under_coupled_acceptance_is_refused():
    """Guards LC-11: coupled acceptance would ignore it."""
    target = three_token_target()
    with pytest.raises(DrafterError, match="DrawingDrafter: acceptance=coupled takes no draft_probs"):
        decode(
            target,
            DrawingDrafter(target, DRAFT_LAWS, (-1, 0)),
            [Request((0,), 5)],
            sampling=EVEN,
            acceptance=Acceptance("coupled"),
        )


def test_a_law_that_cannot_be_true_is_refused():
    """Guards LC-08: a draft of probability 0 never reaches a division."""
    target = three_token_target()

    def propose(context: DraftContext) -> DraftTree:
        law = torch.zeros(2, target.vocab_size)
        law[:, 0] = 1
        return DraftTree((context.tokens[-1], 1), (-1, 0), law)

    with pytest.raises(DrafterError, match="ScriptedDrafter: token 1 under node 0 has draft probability 0"):
        decode(target, ScriptedDrafter(target, propose), [Request((0,), 5)], sampling=EVEN)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("without_replacement", [False, True])
def test_drawn_drafts_follow_the_law_in_batches(rule: RuleName, without_replacement: bool):
    """Guards LC-01 and SP-04: over many questions, with hashed noise; one seed gives one text, another another."""
    target = three_token_target()
    drafter = DrawingDrafter(target, DRAFT_LAWS, (-1, 0, 0, 1), without_replacement=without_replacement)
    requests = [Request((0,), 4, noise_key=(number,)) for number in range(300)]

    def answers(seed: int, batch_size: int) -> list[tuple[int, ...]]:
        sampling = SamplingParams(1.0, seed=seed)
        done = decode(target, drafter, requests, sampling=sampling, acceptance=Acceptance(rule), batch_size=batch_size)
        return [generation.output_ids for generation in done]

    found = answers(0, 50)
    law = (0.5, 0.3, 0.2)
    check_law(lambda n: found[n][1:3], {(a, b): law[a] * law[b] for a in range(3) for b in range(3)}, len(requests))
    check_law(lambda n: found[n][3], dict(enumerate(law)), len(requests))
    assert answers(0, 7) == found
    assert answers(1, 50) != found


def test_greedy_decoding_with_drawn_drafts_is_greedy():
    """Guards SP-10: at temperature 0 the draft's law plays no part."""
    target = counting_target()
    flat = {token: [1 / TOY_VOCAB] * TOY_VOCAB for token in range(TOY_VOCAB)}
    (done,) = decode(target, DrawingDrafter(target, flat, (-1, 0, 0, 0, 1)), [Request((4,), 12)])
    assert done.output_ids == tuple(3 + (2 + step) % 13 for step in range(12))


def test_typical_acceptance_is_counted_for_what_it_changes():
    """Drafts that plain decoding would not have emitted there are counted, per round, and nothing else is."""
    target = three_token_target()
    requests = [Request((0,), 25, noise_key=(number,)) for number in range(6)]
    done = decode(
        target, PathsDrafter(target, [[0, 0]]), requests, sampling=EVEN, acceptance=Acceptance("typical"), batch_size=2
    )
    for generation in done:
        assert all(item.accepted == item.proposed for item in generation.rounds), "p=.5 is above the bar"
        position = 2
        for item in generation.rounds:
            own = [
                int(gumbel_noise(3, 0, (*generation.request.noise_key, position + at)).add(LOG_LAW).argmax())
                for at in range(2)
            ]
            assert item.altered == sum(token != 0 for token in own[: item.accepted])
            position += item.accepted + item.bonus
    shares = [item.altered for generation in done for item in generation.rounds if item.altered is not None]
    assert sum(shares) > 0
    (plain,) = decode(target, PathsDrafter(target, [[0, 0]]), requests[:1], sampling=EVEN)
    assert all(item.altered is None for item in plain.rounds)
    (greedy,) = decode(target, PathsDrafter(target, [[0, 1]]), requests[:1], acceptance=Acceptance("typical"))
    assert set(greedy.output_ids) == {0}
    assert sum(item.altered or 0 for item in greedy.rounds) == 0


LOG_LAW = torch.tensor([0.5, 0.3, 0.2]).log()


def test_forbidden_drafts_are_not_offered():
    """Guards TV-08: cut before the forbidden id, in every branch; EOS only until the answer is long enough."""
    target = Target(bigram_model(law_table(dict.fromkeys(range(4), (0.4, 0.3, 0.2, 0.1))), eos=3))
    paths = [[0, 1, 2], [2, 0, 3], [3], [1, 1]]
    sampling = SamplingParams(1.0, bad_words=((1,),), min_new_tokens=4, seed=3)
    (done,) = decode(target, PathsDrafter(target, paths), [Request((0,), 12)], sampling=sampling)
    (plain,) = decode(target, AutoregressiveDrafter(target), [Request((0,), 12)], sampling=sampling)
    assert done.output_ids == plain.output_ids
    offered = [DraftTree(item.tokens, item.parents) for item in done.rounds]
    assert offered[0].tokens[1:] == (0, 2, 0)
    emitted = 1
    for item, tree in zip(done.rounds, offered, strict=True):
        for node in range(1, len(tree)):
            assert tree.tokens[node] != 1
            assert tree.tokens[node] != 3 or emitted + tree.depths[node] - 1 >= 4
        emitted += item.accepted + item.bonus


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_hold_from_the_first_token_on(temperature: float):
    """Guards SP-05: the prefill's token and every token of rounds; EOS is favoured and yet comes late."""
    target = Target(bigram_model(law_table(dict.fromkeys(range(3), (0.05, 0.15, 0.8))), eos=2))
    requests = [Request((0,), 12, noise_key=(number,)) for number in range(20)]
    sampling = SamplingParams(temperature, min_new_tokens=6, bad_words=((1, 1, 1),))
    for generation in decode(target, PathsDrafter(target, [[1, 1, 1], [2]]), requests, sampling=sampling, batch_size=3):
        assert generation.finish_reason == "eos"
        assert len(generation.output_ids) >= 7
        assert 2 not in generation.output_ids[:6]
        assert "1, 1, 1" not in str(generation.output_ids)


@pytest.mark.parametrize("batch_nodes", [1, 6, 40])
def test_a_budget_of_nodes_for_the_whole_batch(batch_nodes: int, tiny_target: GetTarget):
    """Picked trees are cut to the budget's share of each row, drawn ones never; the text is the same."""
    target = tiny_target("llama")
    requests = random_requests(7, 6, (3, 9), (12, 25))
    answers = naive_answers(target.model, requests, target.eos_ids)
    drafter = RandomTreeDrafter(target, answers, max_nodes=12)
    for event in speculative_decode(target, drafter, requests, batch_size=3, batch_nodes=batch_nodes):
        if event.generation is not None:
            prompt = event.generation.request.prompt_ids
            wanted = answers[prompt][len(prompt) : len(prompt) + event.generation.request.max_new_tokens]
            assert event.generation.output_ids == tuple(wanted)
            assert max(len(item.tokens) for item in event.generation.rounds) <= max(1, batch_nodes)
            if event.index < 3:
                assert len(event.generation.rounds[0].tokens) <= max(1, batch_nodes // 3)
    three = three_token_target()
    drawn = DrawingDrafter(three, DRAFT_LAWS, (-1, 0, 1, 2))
    (*_, last) = speculative_decode(three, drawn, [Request((0,), 9)], sampling=EVEN, batch_nodes=1)
    assert last.generation is not None
    assert len(last.generation.rounds[0].tokens) == 4


@pytest.mark.parametrize("rule", ["rejection", "typical"])
@pytest.mark.parametrize("drawn", [False, True])
def test_off_the_cpu_all_nodes_are_processed_at_once(rule: RuleName, drawn: bool, monkeypatch: pytest.MonkeyPatch):
    """Guards SP-01: the way that accelerators take gives the same texts, under every kind of processor and rule.

    Rules that ask for whole laws take them after a prefill of several tokens too, which leaves one row of logits.
    """
    target = three_token_target()
    requests = [Request((0, 1, 0), 20, noise_key=(number,)) for number in range(5)]
    sampling = SamplingParams(0.9, top_k=2, repetition_penalty=1.3, bad_words=((0, 0, 0),))
    drafter = PathsDrafter(target, [[0, 1, 2], [1, 1], [2]])
    if drawn:
        drafter = DrawingDrafter(target, DRAFT_LAWS, (-1, 0, 1, 2))
    options = {"sampling": sampling, "batch_size": 2, "acceptance": Acceptance(rule)}
    visited = decode(target, drafter, requests, **options)
    of_round = decode_module.choices_of_round
    monkeypatch.setattr(
        decode_module, "choices_of_round", lambda *given, **named: of_round(*given, **{**named, "all_at_once": True})
    )
    at_once = decode(target, drafter, requests, **options)
    assert all(one.error is None for one in visited)
    assert [one.output_ids for one in at_once] == [one.output_ids for one in visited]
    assert [one.rounds[0].path for one in at_once] == [one.rounds[0].path for one in visited]


def test_a_drafter_must_answer_for_every_row():
    target = counting_target()

    class Forgetful(PathsDrafter):
        def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
            return super().propose_batch(contexts)[:-1]

    with pytest.raises(ValueError, match="shorter"):
        decode(target, Forgetful(target, [[1]]), [Request((4,), 5)] * 2, batch_size=2)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_no_rows_is_refused(batch_size: int):
    target = counting_target()
    with pytest.raises(InputError, match="batch_size="):
        decode(target, AutoregressiveDrafter(target), [Request((4,), 5)], batch_size=batch_size)


def test_two_decodes_cannot_share_a_cache():
    """Taking turns between two streams over one target would mix their texts without a word."""
    target = counting_target()
    first = speculative_decode(target, AutoregressiveDrafter(target), [Request((4,), 5)])
    assert next(first).new_tokens == (5,)
    second = speculative_decode(target, AutoregressiveDrafter(target), [Request((9,), 5)])
    assert next(second).new_tokens == (10,)
    with pytest.raises(RuntimeError, match="another decode"):
        next(first)
    assert next(second).new_tokens == (11,)


def test_an_abandoned_stream_leaves_a_clean_target():
    target = counting_target()
    stream = speculative_decode(target, NgramDrafter(target), [Request((4,), 50)] * 3, batch_size=2)
    for _ in range(3):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    (generation,) = decode(target, NgramDrafter(target), [Request((9,), 3)])
    assert generation.output_ids == (10, 11, 12)


def test_no_requests_no_events():
    target = counting_target()
    assert list(speculative_decode(target, AutoregressiveDrafter(target), [])) == []


def test_more_rows_than_requests():
    target = counting_target()
    generations = decode(target, NgramDrafter(target), [Request((4,), 5), Request((5,), 5)], batch_size=7)
    assert [generation.output_ids[0] for generation in generations] == [5, 6]


def test_tokens_are_streamed_round_by_round():
    """Each event carries what one request has just gained, and the last one the finished answer."""
    target = counting_target()
    future = FutureDrafter(target, {(4,): [4, *range(5, 16)], (5,): [5, *range(6, 16)]}, k=2)
    events = list(speculative_decode(target, future, [Request((4,), 7), Request((5,), 4)], batch_size=2))
    assert [(event.index, event.new_tokens) for event in events] == [
        (0, (5,)),
        (1, (6,)),
        (0, (6, 7, 8)),
        (1, (7, 8, 9)),
        (0, (9, 10, 11)),
    ]
    assert [event.generation is not None for event in events] == [False, False, False, True, True]


def test_the_same_prompt_twice_in_a_batch_is_two_sequences():
    target = counting_target()
    ids: set[tuple[int, int]] = set()

    class Watching(AutoregressiveDrafter):
        def propose(self, context: DraftContext) -> DraftTree:
            ids.add((context.sequence_id, context.row))
            return super().propose(context)

    drafter: Drafter = Watching(target)
    generations = decode(target, drafter, [Request((4,), 5)] * 4, batch_size=2)
    assert {generation.output_ids for generation in generations} == {(5, 6, 7, 8, 9)}
    assert {sequence for sequence, _ in ids} == {0, 1, 2, 3}
    assert {row for _, row in ids} == {0, 1}
