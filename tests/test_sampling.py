"""The choice of one token: greedy, sampled, with every processor, and the noise behind it."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from case_names import without_addresses
from oracles import check_law
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)

from specdec_lab.audit.toy import bigram_model, law_table
from specdec_lab.choices import Choices, SequenceRule, choices_of_round, greedy_tokens, processed
from specdec_lab.errors import InputError, NonFiniteLogitsError
from specdec_lab.noise import HashedNoise, gumbel_noise
from specdec_lab.sampling import Processing, SamplingParams
from specdec_lab.target import Target, TargetOutput
from specdec_lab.targets.tiny import load_tiny
from specdec_lab.tree import DraftTree, chain, from_paths, root_only

LOGITS = torch.tensor([1.0, 0.2, -0.5, 0.6, -3.0])


def drawn(logits: Tensor, number: int, seed: int = 0, **settings: Any) -> int:
    sampling = SamplingParams(**{"temperature": 1.0, **settings})
    scores = processed(logits[None], torch.zeros(1, 0, dtype=torch.long), sampling.warpers())[0]
    return HashedNoise(seed).target_token(scores, ("question", number, 1))


@pytest.fixture(scope="module")
def toy() -> Target:
    return Target(bigram_model(law_table({0: (0.5, 0.5)}), eos=5))


def choices(
    toy: Target,
    logits: Tensor,
    sampling: SamplingParams,
    *,
    tree: DraftTree | None = None,
    prompt: tuple[int, ...] = (0,),
    key: tuple[object, ...] = (),
    all_at_once: bool = False,
) -> Choices:
    """Return what decoding would ask at the nodes of a tree whose raw logits are ``[nodes, vocab]``."""
    processing = Processing(sampling, toy)
    rule = SequenceRule(processing, prompt, 64, key, torch.device("cpu"))
    tree = tree or DraftTree(tuple(range(len(logits))), tuple(min(node - 1, 0) for node in range(len(logits))))
    output = TargetOutput(logits[None], {}, {4: 0}, {4: len(logits)})
    found = choices_of_round(
        output,
        {4: tree},
        {4: rule},
        {4: len(prompt)},
        processing,
        HashedNoise(sampling.seed),
        all_at_once=all_at_once,
    )
    return found[4]


def law(logits: Tensor) -> dict[Any, float]:
    return dict(enumerate(logits.double().softmax(-1).tolist()))


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 17, 1000, 4099])
def test_ties_break_towards_the_lower_id(vocab: int, dtype: torch.dtype):
    """Guards LC-13: in every row, wherever the tie lies in the vocabulary, and in every dtype."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.rand(1, 12, vocab, generator=generator).to(dtype)
    wanted = []
    for node in range(12):
        tied = torch.randperm(vocab, generator=generator)[:3]
        logits[0, node, tied] = 2.0
        wanted.append(int(tied.min()))
    assert greedy_tokens(logits) == [[[token, 1] for token in wanted]]
    for node in range(12):  # one row at a time, as a plain step asks
        assert greedy_tokens(logits[:, node : node + 1]) == [[[wanted[node], 1]]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("all_at_once", [False, True])
def test_a_choice_that_is_no_number_is_an_error(bad: float, all_at_once: bool, toy: Target):
    """Guards LC-08 and CP-13: NaN never turns into a token, be the choice greedy or sampled."""
    rows = LOGITS.repeat(2, 1)  # [2, 5]
    rows[1] = bad
    for sampling in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.5, top_k=2, top_p=0.9, min_p=0.1)):
        asked = choices(toy, rows, sampling, all_at_once=all_at_once)
        assert asked.token(0) in range(5)
        assert float(asked.law(0).sum()) == pytest.approx(1)
        with pytest.raises(NonFiniteLogitsError, match="NaN or infinite"):
            asked.token(1)
        with pytest.raises(NonFiniteLogitsError, match="NaN or infinite"):
            asked.law(1)


def test_one_nan_among_numbers_is_an_error(toy: Target):
    logits = LOGITS.clone()
    logits[2] = float("nan")
    for sampling in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, top_k=2, top_p=0.5, min_p=0.2)):
        with pytest.raises(NonFiniteLogitsError):
            choices(toy, logits[None], sampling).token(0)


def test_banned_tokens_are_fine():
    """Minus infinity bans a token and is no error while another is left."""
    logits = LOGITS.clone()
    logits[[0, 2]] = float("-inf")
    assert greedy_tokens(logits[None, None]) == [[[3, 1]]]
    assert {drawn(logits, number) for number in range(300)} == {1, 3, 4}


# --- sampled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [2.0, 1.0, 0.5])
def test_draws_follow_the_softmax(temperature: float):
    """Guards LC-12: the law is right over many keys, and over many seeds of one key."""
    logits = torch.tensor([1.0, 0.2, -0.2, 0.6, -0.5])
    wanted = law(logits / temperature)
    check_law(lambda number: drawn(logits, number, temperature=temperature), wanted, 2500)
    check_law(lambda number: drawn(logits, 0, seed=number, temperature=temperature), wanted, 2500)


@pytest.mark.parametrize(
    ("settings", "logits"),
    [
        ({"top_k": 2}, [1.0, None, None, 0.6, None]),
        ({"top_p": 0.8}, [1.0, 0.2, None, 0.6, None]),
        ({"min_p": 0.4}, [1.0, 0.2, None, 0.6, None]),
        ({"min_p": 0.5}, [1.0, None, None, 0.6, None]),
        ({"temperature": 0.5, "top_p": 0.8}, [2.0, None, None, 1.2, None]),
        ({"top_k": 4, "top_p": 0.97, "min_p": 0.3}, [1.0, 0.2, None, 0.6, None]),
        ({"top_k": 99, "top_p": 1.0, "min_p": 0.0}, [1.0, 0.2, -0.5, 0.6, -3.0]),
    ],
    ids=str,
)
def test_each_processor_changes_the_law_as_it_should(settings: dict[str, Any], logits: list[float | None]):
    """Guards SP-02: what is cut off is never drawn, and the rest keeps its proportions."""
    kept = torch.tensor([float("-inf") if value is None else value for value in logits])
    check_law(lambda number: drawn(LOGITS, number, **settings), law(kept), 2000)


GENERATE_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"temperature": 1.7, "top_k": 4, "top_p": 0.9, "min_p": 0.2},
    {"temperature": 0.4, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "temperature": 0.8},
    {"bad_words": ((3,), (1, 4), (2, 2, 7))},
    {"min_new_tokens": 6},
    {"repetition_penalty": 1.3, "bad_words": ((9,), (5, 6)), "min_new_tokens": 4, "temperature": 0.9, "top_k": 6},
    {"temperature": 0, "repetition_penalty": 1.6, "bad_words": ((3,),), "min_new_tokens": 5},
]


class Ban4:
    """A user's processor: token 4 only after an even number of tokens, token 3 never twice in a row."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if ids.shape[1] % 2:
            scores[:, 4] = float("-inf")
        scores[ids[:, -1] == 3, 3] = float("-inf")
        return scores


@pytest.mark.parametrize("settings", GENERATE_SETTINGS, ids=str)
@pytest.mark.parametrize("own", [(), (Ban4(),)], ids=["", "own processor"])
def test_processors_are_those_of_generate_in_its_order(settings: dict[str, Any], own: tuple[Any, ...]):
    """Guards SP-01, SP-02 and SP-05: transformers' own ``generate`` shows the same processed scores at each step."""
    generator = torch.Generator().manual_seed(1)
    target = Target(bigram_model(torch.randn(16, 16, generator=generator) * 2, eos=5))
    sampling = SamplingParams(**{"temperature": 1.0, **settings, "logits_processors": own})
    asked = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **settings}
    if "bad_words" in asked:
        asked["bad_words_ids"] = [list(ids) for ids in asked.pop("bad_words")]
    if sampling.greedy:
        asked = {name: value for name, value in asked.items() if name not in ("temperature", "top_k", "top_p")}
    torch.manual_seed(0)
    prompt = [3, 1, 4]
    output: Any = target.model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 3),
        pad_token_id=0,
        do_sample=not sampling.greedy,
        max_new_tokens=12,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList(own),
        **asked,
    )
    assert len(output.scores) >= 1 + settings.get("min_new_tokens", 0)
    processors = Processing(sampling, target).processors(len(prompt))
    for step, (raw, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        ids = output.sequences[:, : len(prompt) + step]
        assert torch.equal(processed(raw, ids, processors), scores)


@pytest.mark.parametrize("all_at_once", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(1.0, repetition_penalty=1.5, seed=2),
        SamplingParams(0.8, bad_words=((1, 2), (7,)), min_new_tokens=4, top_p=0.9),
        SamplingParams(1.0, logits_processors=(Ban4(),)),
        SamplingParams(1.0, top_k=4),
    ],
    ids=lambda sampling: str({name: value for name, value in sampling.record().items() if value}),
)
def test_each_node_sees_its_own_history(sampling: SamplingParams, all_at_once: bool, toy: Target):
    """Guards SP-01: prompt, emitted tokens and the path to the node, the last sampled token once; at every node."""
    generator = torch.Generator().manual_seed(3)
    prompt = (3, 7, 9, 9)
    tree = from_paths(9, [[1, 1, 1, 1], [1, 2, 5], [4], [5, 4, 3], [7, 2]])
    logits = torch.randn(len(tree), 16, generator=generator) * 2
    asked = choices(toy, logits, sampling, tree=tree, prompt=prompt, key=("q",), all_at_once=all_at_once)
    processors = Processing(sampling, toy).processors(len(prompt))
    for node in reversed(range(len(tree))):
        text = [*prompt, *(tree.tokens[at] for at in tree.path_to(node)[1:])]
        wanted = processors(torch.tensor([text]), logits[node][None].clone())[0]  # type: ignore[arg-type]
        assert torch.equal(asked.scores(node), wanted)
        assert torch.equal(asked.law(node), wanted.double().softmax(-1))
        noise = 0 if sampling.greedy else gumbel_noise(16, sampling.seed, ("q", len(text)))
        assert asked.token(node) == int((wanted + noise).argmax())


def test_history_grows_with_what_is_committed(toy: Target):
    """Guards SP-01: rejected drafts leave no trace, committed tokens count from the next round on."""
    processing = Processing(SamplingParams(repetition_penalty=2.0), toy)
    rule = SequenceRule(processing, (1, 2), 10, (), torch.device("cpu"))
    assert rule.history((7, 7, 7)).tolist() == [[1, 2, 7, 7, 7]]
    assert rule.history(()).tolist() == [[1, 2]]
    rule.extend((3, 4))
    assert rule.history((5,)).tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01, 1e-6])
def test_low_temperatures_converge_to_the_maximum(temperature: float):
    """Guards SP-10: no overflow, no division by zero, and the argmax is drawn ever more often."""
    logits = torch.tensor([0.0, 0.5, 0.2, 0.45])
    draws = [drawn(logits, number, temperature=temperature) for number in range(400)]
    share = draws.count(1) / len(draws)
    wanted = float((logits.double() / temperature).softmax(-1)[1])
    assert share == pytest.approx(wanted, abs=0.1)
    if temperature <= 0.001:
        assert share == 1


def test_temperature_zero_takes_the_greedy_path(toy: Target):
    """Guards SP-10: no noise and no division; the other settings cannot change a maximum and are not applied."""
    sampling = SamplingParams(0.0, top_k=1, top_p=0.1, min_p=1.0)
    assert Processing(sampling, toy).plain_greedy
    asked = choices(toy, LOGITS.repeat(3, 1), sampling)
    assert [asked.token(node) for node in range(3)] == [0, 0, 0]
    assert len(sampling.warpers()) == 0


@pytest.mark.parametrize("all_at_once", [False, True])
def test_the_models_logits_are_never_edited(all_at_once: bool, toy: Target):
    """Guards SP-02: processors work on a copy; drafters and log-probabilities see what the model said."""
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    before = rows.clone()

    def edits(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 3] = float("-inf")
        return scores

    for sampling in (
        SamplingParams(),
        SamplingParams(1.0),
        SamplingParams(0.3, top_k=2, top_p=0.5, min_p=0.5),
        SamplingParams(logits_processors=(edits,), repetition_penalty=2.0, bad_words=((2,),), min_new_tokens=3),
    ):
        asked = choices(toy, rows, sampling, all_at_once=all_at_once)
        for node in range(3):
            asked.token(node)
            asked.law(node)
    assert torch.equal(rows, before)


def test_a_draw_depends_on_its_key_alone():
    """Guards SP-04: the same key gives the same token in any order; each part of the key matters."""
    vocab = torch.zeros(1000)
    first = [drawn(vocab, number) for number in range(50)]
    assert first == [drawn(vocab, number) for number in reversed(range(50))][::-1]
    assert len(set(first)) > 40
    keys = [(), ("a",), ("b",), ("a", 0), ("a", 1), (0,), ("0",), (0, 1), (1, 0), (2, 0, 0), ("a", 0, 0)]
    tokens = [HashedNoise(0).target_token(vocab, key) for key in keys]
    assert len(set(tokens)) >= len(keys) - 1  # two of 1000 may meet
    assert HashedNoise(1).target_token(vocab, ()) != tokens[0]


def test_the_position_is_part_of_the_key(toy: Target):
    """A round's nodes at one depth share noise, nodes at different depths do not; the round itself plays no part."""
    flat, sampling = torch.zeros(21, 500), SamplingParams(1.0)
    deep = choices(toy, flat, sampling, tree=chain(0, range(20)), prompt=(1, 2, 3), key=("q",))
    tokens = [deep.token(node) for node in range(21)]
    assert len(set(tokens)) > 15
    wide = choices(toy, flat, sampling, tree=from_paths(0, [[n] for n in range(20)]), prompt=(7, 8, 9), key=("q",))
    assert [wide.token(node) for node in range(21)] == [tokens[0], *[tokens[1]] * 20]
    later = choices(toy, flat[:1], sampling, tree=root_only(4), prompt=(0,) * 8, key=("q",))
    assert later.token(0) == tokens[5]


# --- noise ----------------------------------------------------------------------------------------------------------


def test_noise_is_gumbel_and_independent_between_keys():
    """Guards LC-12: over tokens of one key and over keys of one token, and neighbours do not go together."""
    table = np.stack([gumbel_noise(1000, 3, ("q", position)).double().numpy() for position in range(400)])
    assert np.isfinite(table).all()
    for sample in (table[0], table[:, 0], table[:, 999], table.ravel()[:: len(table) - 1]):
        assert stats.kstest(sample, "gumbel_r").pvalue > 1e-4
    for left, right in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:]), (table[::2, ::2], table[1::2, 1::2])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.01


def test_the_maximum_of_pure_noise_is_uniform():
    check_law(lambda number: int(gumbel_noise(8, 0, (number,)).argmax()), dict.fromkeys(range(8), 1 / 8), 8000)


def test_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary():
    """Guards TV-01: padded rows of the output layer shift nobody's noise."""
    assert torch.equal(gumbel_noise(10, 1, ("q",)), gumbel_noise(1000, 1, ("q",))[:10])


def test_noise_is_the_stated_hash():
    """Guards SP-04: one seed gives one text in every release and on every device, since the hash is fixed.

    The reference is plain whole numbers: BLAKE2b of the key, then two rounds of MurmurHash3's finaliser.
    """

    def mix(value: int) -> int:
        value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
        value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
        return value ^ value >> 16

    low, high = struct.unpack("<II", hashlib.blake2b(b"(7, 'question', 3)", digest_size=8).digest())
    uniform = [(mix((mix(token ^ low) + high) % 2**32) + 0.5) / 2**32 for token in range(50)]
    wanted = [-math.log(-math.log(share)) for share in uniform]
    assert gumbel_noise(50, 7, ("question", 3)).tolist() == pytest.approx(wanted, rel=1e-6)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: float):
    with pytest.raises(InputError, match=rf"sampling\.{field}=") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"sampling.{field}"


def test_law_tables_are_what_they_say():
    """The scripted models of this suite: logits are a table's row, to the last bit."""
    table = law_table({3: (0.5, 0.3, 0.2)})
    logits = bigram_model(table)(input_ids=torch.tensor([[0, 3, 15]]), use_cache=False).logits[0]
    assert torch.equal(logits, table[[0, 3, 15]])
    assert logits[1].softmax(-1)[:4].tolist() == pytest.approx([0.5, 0.3, 0.2, 0.0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"repetition_penalty": 0.0}, r"sampling\.repetition_penalty=0\.0: .*above 0"),
        ({"repetition_penalty": float("nan")}, r"sampling\.repetition_penalty=nan"),
        ({"min_new_tokens": -1}, r"sampling\.min_new_tokens=-1"),
        ({"bad_words": ("",)}, r"sampling\.bad_words=''"),
        ({"bad_words": ((),)}, r"sampling\.bad_words=\(\)"),
        ({"bad_words": "word"}, r"sampling\.bad_words='word': give a tuple"),
        ({"logits_processors": Ban4()}, r"sampling\.logits_processors=.*give a tuple"),
        ({"logits_processors": ("no function",)}, r"sampling\.logits_processors='no function': .*functions"),
    ],
    ids=without_addresses,
)
def test_processors_out_of_range_are_refused(settings: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        SamplingParams(**settings)


def test_processors_that_cannot_be_honoured_are_refused(toy: Target):
    """Guards SP-05: at set-up and by name, never ignored."""
    stateful = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=5,
        keys=[1, 2, 3],
        sampling_table_size=16,
        sampling_table_seed=0,
        context_history_size=4,
        device=torch.device("cpu"),
    )
    with pytest.raises(InputError, match=r"SynthIDTextWatermarkLogitsProcessor.*earlier calls"):
        SamplingParams(logits_processors=(stateful,))
    twice = SamplingParams(repetition_penalty=1.2, logits_processors=(RepetitionPenaltyLogitsProcessor(1.3),))
    with pytest.raises(InputError, match=r"RepetitionPenaltyLogitsProcessor.*one of this kind already"):
        Processing(twice, toy)
    for word, said in (((99,), "ids run from 0 to 15"), ((5,), "end-of-sequence"), ("word", "no tokenizer")):
        with pytest.raises(InputError, match=rf"sampling\.bad_words=.*{said}"):
            Processing(SamplingParams(bad_words=(word,)), toy)


def test_bad_words_are_forbidden_with_and_without_a_space_before_them():
    """Guards SP-05: a word inside a sentence begins with a space, at the start of an answer it does not."""
    target = load_tiny(device="cpu")
    tokenizer = target.tokenizer
    assert tokenizer is not None
    vocabulary = tokenizer.get_vocab()
    processors = Processing(SamplingParams(bad_words=("t",)), target).processors(1)
    scores = processed(torch.zeros(1, target.vocab_size), torch.tensor([[9]]), processors)[0]
    assert set((scores == float("-inf")).nonzero()[:, 0].tolist()) == {vocabulary["t"], vocabulary["Ġt"]}


def test_forbidden_tokens_are_known_without_logits(toy: Target):
    """Guards TV-08: single bad tokens always, EOS until the answer is long enough."""
    processing = Processing(SamplingParams(bad_words=((3,), (1, 4)), min_new_tokens=2), toy)
    assert [processing.forbidden(length) for length in range(4)] == [{3, 5}, {3, 5}, {3}, {3}]


# --- decisions ------------------------------------------------------------------------------------------------------


def test_decisions_have_their_probability_and_are_independent():
    """Guards LC-12: over keys, and over the decisions of one key, which never share their noise."""
    noise = HashedNoise(3)
    for probability in (0.0, 0.2, 0.9, 1.0):
        for made in (
            [noise.chance(("q", number)).happens(probability) for number in range(2000)],
            (lambda chance: [chance.happens(probability) for _ in range(2000)])(noise.chance(("one",))),
        ):
            assert np.mean(made) == pytest.approx(probability, abs=0.04)
            if probability in (0.0, 1.0):
                assert set(made) == {probability == 1.0}
    chance = noise.chance(("two",))
    pairs = [(chance.happens(0.5), chance.happens(0.5)) for _ in range(4000)]
    check_law(lambda number: pairs[number], {(a, b): 0.25 for a in (False, True) for b in (False, True)}, 4000)  # type: ignore[arg-type, return-value]


def test_draws_follow_a_law_and_never_leave_its_support():
    """Guards LC-08: a token of probability 0 is not drawn, at either end of the law."""
    law = torch.tensor([0.0, 0.3, 0.0, 0.6, 0.1, 0.0], dtype=torch.float64)
    chance = HashedNoise(0).chance(("law",))
    check_law(lambda _: chance.draw(law), {1: 0.3, 3: 0.6, 4: 0.1}, 3000)
    for extreme in (0.0, 1 - 2**-53):
        fixed = HashedNoise(0).chance(("extreme",))
        fixed._uniform = lambda extreme=extreme: extreme  # type: ignore[attr-defined, method-assign]
        assert fixed.draw(law) in (1, 4)
        assert fixed.draw(law * 0.999) in (1, 4)


def test_decisions_share_nothing_with_the_targets_noise():
    """What accepts a draft must not know what the target would have drawn."""
    noise = HashedNoise(0)
    uniforms = np.array([noise.chance(("q", 5, "accept", at))._uniform() for at in range(3000)])  # type: ignore[attr-defined]
    gumbel = np.array([float(gumbel_noise(1, 0, ("q", 5, at))) for at in range(3000)])
    assert abs(np.corrcoef(uniforms, gumbel)[0, 1]) < 0.06
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-4
