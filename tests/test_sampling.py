"""The choice of one token: greedy, sampled, with every processor, and the noise behind it."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from oracles import check_law
from scipy import stats
from tiny_models import bigram_model, law_table
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_lab.errors import InputError, NonFiniteLogitsError
from specdec_lab.sampling import SamplingParams, TokenChooser, greedy_tokens, gumbel_noise, sampled_token
from specdec_lab.target import TargetOutput

LOGITS = torch.tensor([1.0, 0.2, -0.5, 0.6, -3.0])


def drawn(logits: Tensor, number: int, seed: int = 0, **settings: Any) -> int:
    sampling = SamplingParams(**{"temperature": 1.0, **settings})
    return sampled_token(logits, [0], sampling.processors(), seed, ("question", number, 1))


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
    assert greedy_tokens(logits)[0] == [wanted]
    for node in range(12):  # one row at a time, as a plain step asks
        assert greedy_tokens(logits[:, node : node + 1])[0] == [[wanted[node]]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_choice_that_is_no_number_is_an_error(bad: float):
    """Guards LC-08 and CP-13: NaN never turns into a token, be the choice greedy or sampled."""
    rows = LOGITS.repeat(2, 1)[None]  # [1, 2, 5]
    rows[0, 1] = bad
    output = TargetOutput(rows, {}, {4: 0}, {4: 2})
    for sampling in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.5, top_k=2, top_p=0.9, min_p=0.1)):
        token_at = TokenChooser(sampling).round(output)[4]
        assert token_at(0, [0], ()) in range(5)
        with pytest.raises(NonFiniteLogitsError, match="NaN or infinite"):
            token_at(1, [0], ())


def test_one_nan_among_numbers_is_an_error():
    logits = LOGITS.clone()
    logits[2] = float("nan")
    for sampling in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, top_k=2, top_p=0.5, min_p=0.2)):
        token_at = TokenChooser(sampling).round(TargetOutput(logits[None, None], {}, {0: 0}, {0: 1}))[0]
        with pytest.raises(NonFiniteLogitsError):
            token_at(0, [0], ())


def test_banned_tokens_are_fine():
    """Minus infinity bans a token and is no error while another is left."""
    logits = LOGITS.clone()
    logits[[0, 2]] = float("-inf")
    assert greedy_tokens(logits[None, None])[0] == [[3]]
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


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"temperature": 1.7, "top_k": 4, "top_p": 0.9, "min_p": 0.2},
        {"temperature": 0.4, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_processors_are_those_of_generate_in_its_order(settings: dict[str, Any]):
    """Guards SP-02: transformers' own ``generate`` shows the same processed scores at each of its steps."""
    generator = torch.Generator().manual_seed(1)
    model = bigram_model(torch.randn(16, 16, generator=generator) * 2)
    asked = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **settings}
    torch.manual_seed(0)
    output: Any = model.generate(  # type: ignore[operator]
        torch.tensor([[3]]),
        attention_mask=torch.ones(1, 1),
        do_sample=True,
        max_new_tokens=12,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **asked,
    )
    processors: Any = SamplingParams(**{"temperature": 1.0, **settings}).processors()
    assert len(output.scores) == 12
    for raw, scores in zip(output.logits, output.scores, strict=True):
        assert torch.allclose(processors(torch.zeros(1, 1), raw.clone()), scores)


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


def test_temperature_zero_takes_the_greedy_path():
    """Guards SP-10: no noise and no division; the other settings cannot change a maximum and are not applied."""
    chooser = TokenChooser(SamplingParams(0.0, top_k=1, top_p=0.1, min_p=1.0))
    assert not chooser.samples
    token_at = chooser.round(TargetOutput(LOGITS.repeat(3, 1)[None], {}, {0: 0}, {0: 3}))[0]
    assert [token_at(node, [], (node,)) for node in range(3)] == [0, 0, 0]
    assert len(SamplingParams(0.0).processors()) == 0


def test_the_models_logits_are_never_edited():
    """Guards SP-02: processors work on a copy; drafters and log-probabilities see what the model said."""
    rows = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    output = TargetOutput(rows, {}, {0: 0}, {0: 3})
    for sampling in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.3, top_k=2, top_p=0.5, min_p=0.5)):
        for node in range(3):
            TokenChooser(sampling).round(output)[0](node, [1, 2], ("q",))
    assert torch.equal(rows, before)


def test_a_draw_depends_on_its_key_alone():
    """Guards SP-04: the same key gives the same token in any order; each part of the key matters."""
    vocab = torch.zeros(1000)
    first = [drawn(vocab, number) for number in range(50)]
    assert first == [drawn(vocab, number) for number in reversed(range(50))][::-1]
    assert len(set(first)) > 40
    none = LogitsProcessorList()
    keys = [(), ("a",), ("b",), ("a", 0), ("a", 1), (0,), ("0",), (0, 1), (1, 0), (2, 0, 0), ("a", 0, 0)]
    tokens = [sampled_token(vocab, [], none, 0, key) for key in keys]
    assert len(set(tokens)) >= len(keys) - 1  # two of 1000 may meet
    assert sampled_token(vocab, [], none, 1, ()) != tokens[0]


def test_the_position_is_part_of_the_key():
    """A round's nodes at one depth share noise, nodes at different depths do not."""
    flat = torch.zeros(1, 1, 500)
    token_at = TokenChooser(SamplingParams(1.0)).round(TargetOutput(flat, {}, {0: 0}, {0: 1}))[0]
    assert token_at(0, [1, 2, 3], ("q",)) == token_at(0, [7, 8, 9], ("q",))
    assert len({token_at(0, [0] * length, ("q",)) for length in range(1, 21)}) > 15


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
