"""What must hold whatever is drafted. Each oracle raises AssertionError where the package is wrong.

They use the model alone as the reference and share no code with the package: ``tests/test_mutations.py`` proves that
each of them sees the faults it is there for.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from scipy.stats import chisquare
from scripted import Answers, ScriptedDrafter, random_tree
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specdec_lab.decode import GREEDY, Generation, Request, speculative_decode
from specdec_lab.drafters.base import DraftContext, Drafter, Verification
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree
from specdec_lab.verify import REJECTION, Acceptance

LOGITS_WITHIN = 2e-4
"""Largest difference of two fp32 logits computed in different shapes; the tiny models' logits are of order 1 to 10."""


# --- the reference: the model alone ---------------------------------------------------------------------------------


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Return the logits of one plain forward without a cache, ``[tokens, vocab]``."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def naive_answer(model: PreTrainedModel, prompt: Sequence[int], budget: int, eos: frozenset[int]) -> list[int]:
    """Return prompt and greedy answer of an argmax loop without any cache."""
    text = list(prompt)
    for _ in range(budget):
        text.append(int(plain_logits(model, text)[-1].argmax()))
        if text[-1] in eos:
            break
    return text


def naive_answers(model: PreTrainedModel, requests: Sequence[Request], eos: frozenset[int]) -> Answers:
    """Return the naive answers of requests by prompt; one that two requests share is as long as the longest asks."""
    budgets: dict[tuple[int, ...], int] = {}
    for request in requests:
        budgets[request.prompt_ids] = max(request.max_new_tokens, budgets.get(request.prompt_ids, 0))
    return {prompt: naive_answer(model, prompt, budget, eos) for prompt, budget in budgets.items()}


@torch.inference_mode()
def plain_keys_values(model: PreTrainedModel, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return a fresh forward's keys and values per layer, ``[kv_heads, tokens, head_dim]``."""
    cache = DynamicCache()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=torch.tensor([list(ids)]), use_cache=True, **{name: cache})
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        pairs.append((layer.keys[0], layer.values[0]))
    return pairs


# --- running the package --------------------------------------------------------------------------------------------


def decode(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    sampling: SamplingParams = GREEDY,
    acceptance: Acceptance = REJECTION,
    batch_size: int = 1,
) -> list[Generation]:
    """Decode requests and return their generations in order; streamed tokens must be those of the generation."""
    streamed: dict[int, list[int]] = {index: [] for index in range(len(requests))}
    done: dict[int, Generation] = {}
    for progress in speculative_decode(
        target, drafter, requests, sampling=sampling, acceptance=acceptance, batch_size=batch_size
    ):
        streamed[progress.index].extend(progress.new_tokens)
        if progress.generation is not None:
            assert progress.index not in done, "a request finished twice"
            done[progress.index] = progress.generation
    assert sorted(done) == list(range(len(requests)))
    for index, generation in done.items():
        if generation.error is None:
            assert tuple(streamed[index]) == generation.output_ids, "the stream is not the answer"
            check_counters(generation)
    return [done[index] for index in range(len(requests))]


def check_counters(generation: Generation) -> None:
    """Emitted tokens are accepted drafts and bonus tokens, no round accepts more than its tree is deep (TR-05)."""
    rounds = generation.rounds
    assert len(generation.output_ids) == 1 + sum(item.accepted + item.bonus for item in rounds)
    for item in rounds:
        tree = DraftTree(item.tokens, item.parents, torch.zeros(1))  # siblings that were drawn can be equal
        assert 0 <= item.accepted <= item.proposed == tree.depth
        assert item.bonus in (0, 1)
        assert item.accepted + item.bonus >= 1
        if item.path:
            assert (0, *item.path) == tree.path_to(item.path[-1])
    assert all(item.bonus == 1 for item in rounds[:-1]), "only the last round can end before its bonus token"


def random_requests(seed: int, count: int, lengths: Sequence[int], budgets: Sequence[int]) -> list[Request]:
    """Return requests with random prompts; ids of the special tokens stay out."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(3, 128) for _ in range(rng.choice(lengths))) for _ in range(count)]
    return [Request(prompt, budgets[at % len(budgets)], noise_key=(at,)) for at, prompt in enumerate(prompts)]


# --- oracles --------------------------------------------------------------------------------------------------------


def check_node_logits(target: Target, *, rounds: int = 4, seed: int = 0, nodes: int = 12) -> None:
    """Every node's logits are those of a plain forward of its path, in a ragged batch with an idle row inside.

    Rows 0 and 2 hold sequences, row 1 none; each round a random path is committed, so that the next tree stands on
    gathered slots.
    """
    rng = random.Random(seed)
    draw = lambda _depth=0: rng.randrange(3, target.vocab_size)  # noqa: E731
    texts = {0: [draw() for _ in range(19)], 2: [draw()]}
    target.allocate(3, 96, nodes)
    for row, text in texts.items():
        target.prefill(row, text)
    for _ in range(rounds):
        trees = {row: random_tree(rng, draw(), rng.randint(1, nodes), draw) for row in texts}
        output = target.forward(trees)
        paths: dict[int, tuple[int, ...]] = {}
        for row, tree in trees.items():
            for node in range(len(tree)):
                path = tree.path_to(node)
                ids = [*texts[row], *(tree.tokens[at] for at in path)]
                wrong = (output.row_logits(row)[node] - plain_logits(target.model, ids)[-1]).abs().max().item()
                assert wrong <= LOGITS_WITHIN, f"row {row} node {node} of {tree.parents} is off by {wrong}"
            paths[row] = tree.path_to(rng.randrange(len(tree)))
            texts[row] += [tree.tokens[at] for at in paths[row]]
        target.commit(paths)
        for row, text in texts.items():
            assert target.length(row) == len(text)


def check_committed_rows(target: Target, *, rounds: int = 6, seed: int = 1) -> None:
    """Keys and values after commits are those of a fresh forward of the accepted text (CP-04)."""
    rng = random.Random(seed)
    draw = lambda _depth=0: rng.randrange(3, target.vocab_size)  # noqa: E731
    texts = {0: [draw() for _ in range(5)], 1: [draw() for _ in range(13)]}
    target.allocate(2, 96, 12)
    for row, text in texts.items():
        target.prefill(row, text)
    for _ in range(rounds):
        trees = {row: random_tree(rng, draw(), 12, draw) for row in texts}
        target.forward(trees)
        paths = {row: tree.path_to(rng.randrange(len(tree))) for row, tree in trees.items()}
        target.commit(paths)
        for row, path in paths.items():
            texts[row] += [trees[row].tokens[at] for at in path]
    for row, text in texts.items():
        assert target.length(row) == len(text)
        kept = target.cache.committed(row, len(text))
        for layer, (keys, values) in enumerate(plain_keys_values(target.model, text)):
            assert torch.allclose(kept[layer][0], keys, atol=1e-4), f"keys of row {row}, layer {layer}"
            assert torch.allclose(kept[layer][1], values, atol=1e-4), f"values of row {row}, layer {layer}"


def check_greedy_identity(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    answers: Answers,
    *,
    batch_sizes: Sequence[int] = (1, 3),
) -> list[Generation]:
    """The ids are those of the naive loop, cut at the budget, whatever was drafted and in whatever batch."""
    generations: list[Generation] = []
    for batch_size in batch_sizes:
        for generation in (batch := decode(target, drafter, requests, batch_size=batch_size)):
            prompt, budget = generation.request.prompt_ids, generation.request.max_new_tokens
            wanted = tuple(answers[prompt][len(prompt) : len(prompt) + budget])
            assert generation.error is None, generation.error
            assert generation.output_ids == wanted, f"prompt {prompt}, budget {budget}, batch {batch_size}"
            assert generation.finish_reason == ("eos" if wanted[-1] in target.eos_ids else "length")
        generations += batch
    return generations


def check_full_acceptance(generations: Sequence[Generation]) -> None:
    """Drafts that are the target's own choices are accepted, all of them (CP-01)."""
    assert sum(item.proposed for generation in generations for item in generation.rounds) > 0
    for generation in generations:
        for number, item in enumerate(generation.rounds):
            assert item.accepted == item.proposed, f"round {number}: accepted {item.accepted} of {item.proposed}"


def check_features(target: Target, layers: tuple[int, ...], *, prompt_length: int = 21, seed: int = 2) -> None:
    """The features of all committed positions are the plain forward's hidden states, over any commits and chunks."""
    rng = random.Random(seed)
    draw = lambda _depth=0: rng.randrange(3, target.vocab_size)  # noqa: E731
    prompt = tuple(draw() for _ in range(prompt_length))
    right = naive_answer(target.model, prompt, 24, target.eos_ids)

    def likely_tree(context: DraftContext) -> DraftTree:
        def token(depth: int) -> int:
            at = len(context.tokens) + depth
            return right[at] if at < len(right) and rng.random() < 0.7 else draw()

        return random_tree(rng, context.tokens[-1], 12, token, context.max_depth)

    drafter = ScriptedDrafter(target, likely_tree, feature_layers=layers)
    (generation,) = decode(target, drafter, [Request(prompt, 24)])
    text = [*prompt, *generation.output_ids]
    with torch.inference_mode():
        states = target.model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    seen = 0
    for message in drafter.messages:
        for layer in layers:
            got = message.features[layer][list(message.path)]
            wanted = states[layer][0, seen : seen + len(message.path)]
            assert got.shape == wanted.shape
            assert torch.allclose(got, wanted, atol=1e-4), f"layer {layer} at {seen}"
        seen += len(message.path)
    assert seen > len(prompt) + 8, "too few positions were committed to prove anything"
    check_messages(drafter.messages, text)


def check_messages(messages: Sequence[Verification], text: Sequence[int]) -> None:
    """The messages of one sequence, joined, are its committed text."""
    assert messages[0].is_prompt
    assert not any(message.is_prompt for message in messages[1:])
    joined = [*messages[0].tree.tokens]
    for message in messages:
        joined += message.new_tokens
        assert message.next_token == joined[-1]
    assert joined == list(text[: len(joined)])


def check_law(
    draw: Callable[[int], int | tuple[int, ...]], law: dict[int | tuple[int, ...], float], draws: int
) -> None:
    """Draws follow a law: nothing outside its support, and a chi-square test that a right sampler fails 1 in 10^5."""
    counts = Counter(draw(number) for number in range(draws))
    support = {outcome for outcome, probability in law.items() if probability > 0}
    assert set(counts) <= support, f"drew {set(counts) - support}, which cannot happen"
    outcomes = sorted(support, key=str)
    expected = [draws * law[outcome] for outcome in outcomes]
    assert min(expected) >= 5, "too few draws for a chi-square test"
    result = chisquare([counts[outcome] for outcome in outcomes], expected)
    assert result.pvalue > 1e-5, f"p={result.pvalue:.2g}: {dict(counts)} against {dict(zip(outcomes, expected))}"  # noqa: B905
