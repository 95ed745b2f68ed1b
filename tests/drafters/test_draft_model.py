"""A draft model: full acceptance of its own target's text, its cache, its limits, and whose tokens it may draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import check_full_acceptance, check_greedy_identity, decode, naive_answers, random_requests
from strategies_at_hand import disturbed_copy
from tiny_models import tiny_model

from specdec_lab.audit.toy import bigram_model, law_table
from specdec_lab.cost import best_chain_length, chain_speedup, expected_emitted
from specdec_lab.decode import Request
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.draft_model import DraftModelDrafter
from specdec_lab.errors import InputError
from specdec_lab.heads.shipped import shipped_folder
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target
from specdec_lab.targets.tiny import load_tiny
from specdec_lab.verify import Acceptance, RuleName

GetTarget = Callable[..., Target]


@pytest.fixture
def itself(tmp_path: Path) -> Callable[..., DraftModelDrafter]:
    """Return ``(target, settings) -> a drafter whose model is the target itself``; a chain, unless settings say so.

    Random models are sure of nothing, so nothing is left out for being unlikely.
    """
    plain = {"k": 4, "branches": 1, "width": 1, "nodes": None, "min_probability": 0.0}

    def make(target: Target, amount: float = 0.0, **settings: Any) -> DraftModelDrafter:
        return DraftModelDrafter(target, model=str(disturbed_copy(target, tmp_path, amount)), **{**plain, **settings})

    return make


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("k", [1, 4])
def test_the_target_as_its_own_draft_is_always_right(
    k: int, batch_size: int, architecture: str, tiny_target: GetTarget, itself: Callable[..., DraftModelDrafter]
):
    """Guards CP-01, CP-02 and CP-08: over 100 tokens, in ragged batches, nothing is ever rejected."""
    target = tiny_target(architecture)
    generations = decode(
        target, itself(target, k=k), random_requests(3, 5, (1, 9, 20), (100, 17)), batch_size=batch_size
    )
    check_full_acceptance(generations)


@pytest.mark.parametrize(
    "settings", [{"branches": 3}, {"branches": 2, "min_probability": 0.02}, {"draft_cost": 0.2}], ids=str
)
def test_trees_and_adaptive_depths_keep_the_text(
    settings: dict[str, Any], tiny_target: GetTarget, itself: Callable[..., DraftModelDrafter]
):
    target = tiny_target("qwen2")
    requests = random_requests(11, 8, (1, 3, 20), (1, 2, 3, 30))
    answers = naive_answers(target.model, requests, target.eos_ids)
    generations = check_greedy_identity(target, itself(target, 0.1, **settings), requests, answers)
    depths = {item.proposed for generation in generations for item in generation.rounds}
    assert len(depths) > 1


def test_the_draft_caches_committed_tokens_alone(tiny_target: GetTarget, itself: Callable[..., DraftModelDrafter]):
    """Guards CP-01 and CP-08: after each draft its cache holds the text that the target has committed, and no draft."""
    target = tiny_target()
    drafter = itself(target, 0.15, k=4, branches=2)
    seen: list[tuple[int, int]] = []
    propose_batch = drafter.propose_batch

    def watched(contexts: Sequence[Any]) -> Any:
        trees = propose_batch(contexts)
        for context in contexts:
            seen.append((drafter.draft.length(context.row), len(context.tokens)))
            kept = drafter.draft.cache.committed(context.row, len(context.tokens))
            with torch.inference_mode():
                fresh = Target(drafter.draft.model)
                fresh.allocate(1, len(context.tokens), 1)
                fresh.prefill(0, context.tokens)
            wanted = fresh.cache.committed(0, len(context.tokens))
            for (keys, values), (other_keys, other_values) in zip(kept.values(), wanted.values(), strict=True):
                assert torch.allclose(keys, other_keys, atol=1e-4)
                assert torch.allclose(values, other_values, atol=1e-4)
        return trees

    drafter.propose_batch = watched  # type: ignore[method-assign]
    decode(target, drafter, random_requests(5, 3, (4, 11), (25,)), batch_size=2)
    assert all(cached == text for cached, text in seen)
    assert len(seen) > 20


def test_no_forward_whose_result_cannot_be_used(tiny_target: GetTarget, itself: Callable[..., DraftModelDrafter]):
    """Guards PF-04: with a budget of 10 and k = 8, one forward per level that can be committed, none at the end."""
    target = tiny_target()
    drafter = itself(target, k=8)
    sizes: list[int] = []
    forward = drafter.draft.forward
    drafter.draft.forward = lambda trees, layers=(): (sizes.append(len(trees)), forward(trees, layers))[1]  # type: ignore[method-assign]
    (generation,) = decode(target, drafter, [Request((5, 6, 7), 10)])
    assert [item.proposed for item in generation.rounds] == [8]
    assert len(sizes) == 8


def test_beyond_the_drafts_last_position_decoding_goes_on_plainly(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Guards CP-11: target 64 positions, draft 32; the same ids, one warning, and nothing offered any more."""
    target = Target(tiny_model("gpt2", n_positions=64))
    shorter = Target(tiny_model("gpt2", n_positions=32))
    drafter = DraftModelDrafter(target, model=str(disturbed_copy(shorter, tmp_path, 0.0)), k=4)
    for length in (20, 31, 32, 33, 40):
        request = Request(tuple(3 + at % 90 for at in range(length)), 20)
        (plain,) = decode(target, AutoregressiveDrafter(target), [request])
        (drafted,) = decode(target, drafter, [request])
        assert drafted.output_ids == plain.output_ids
        beyond = [
            item.proposed for item, at in zip(drafted.rounds, _positions(drafted, length), strict=True) if at > 32
        ]
        assert set(beyond) <= {0}
    assert sum("draft model has 32 positions" in message for message in caplog.messages) == 1


def _positions(generation: Any, prompt: int) -> list[int]:
    """Return how many tokens there were before each round."""
    at, found = prompt + 1, []
    for item in generation.rounds:
        found.append(at)
        at += item.accepted + item.bonus
    return found


# --- sampled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampling_with_the_target_as_draft_accepts_everything(
    rule: RuleName, tiny_target: GetTarget, itself: Callable[..., DraftModelDrafter]
):
    """Guards LC-02 and LC-11: both sides are processed alike, so equal laws accept with probability 1."""
    target = tiny_target("llama")
    sampling = SamplingParams(0.8, top_k=9, repetition_penalty=1.3)
    requests = random_requests(3, 4, (1, 9), (40,))
    generations = decode(
        target, itself(target, k=3), requests, sampling=sampling, acceptance=Acceptance(rule), batch_size=2
    )
    offered = sum(item.proposed for generation in generations for item in generation.rounds)
    accepted = sum(item.accepted for generation in generations for item in generation.rounds)
    assert accepted >= 0.97 * offered  # rounding moves a ratio below 1 now and then


def test_coupled_drafts_of_the_target_itself_are_the_targets_text(
    tiny_target: GetTarget, itself: Callable[..., DraftModelDrafter]
):
    """Guards SP-04: the same law and the same noise give the same token, each time."""
    target = tiny_target("llama")
    generations = decode(
        target,
        itself(target, k=3),
        random_requests(3, 4, (1, 9), (40,)),
        sampling=SamplingParams(1.0, top_p=0.9),
        acceptance=Acceptance("coupled"),
        batch_size=2,
    )
    check_full_acceptance(generations)


def test_rejection_accepts_more_than_coupling_and_coupling_more_than_chance(
    itself: Callable[..., DraftModelDrafter],
):
    """P(match) of the coupling is at least (1 - TV) / (1 + TV), and no rule beats the overlap (arXiv 2408.07978)."""
    law, draft_law = (0.5, 0.3, 0.2), (0.3, 0.3, 0.4)
    target = Target(bigram_model(law_table(dict.fromkeys(range(3), law))))
    other = Target(bigram_model(law_table(dict.fromkeys(range(3), draft_law))))
    drafter = itself(target, k=1)
    drafter.draft = other
    requests = [Request((0,), 3, noise_key=(number,)) for number in range(500)]
    shares = {}
    for rule in ("rejection", "coupled"):
        done = decode(
            target,
            drafter,
            requests,
            sampling=SamplingParams(1.0),
            acceptance=Acceptance(rule),
            batch_size=50,  # type: ignore[arg-type]
        )
        shares[rule] = sum(generation.rounds[0].accepted for generation in done) / len(done)
    tv = 0.2
    assert shares["rejection"] == pytest.approx(1 - tv, abs=0.06)
    assert (1 - tv) / (1 + tv) - 0.06 < shares["coupled"] < 1 - tv + 0.06
    assert shares["coupled"] > sum(p * q for p, q in zip(law, draft_law, strict=True)) + 0.1


# --- whose tokens ---------------------------------------------------------------------------------------------------


def test_a_draft_with_another_tokenizer_is_refused(tmp_path: Path):
    """Guards TV-02: two tokenizers of equal size with swapped ids; the first ids that differ are named."""
    target = load_tiny(device="cpu")
    folder = disturbed_copy(target, tmp_path, 0.0)
    text = (folder / "tokenizer.json").read_text("utf-8")
    swapped = text.replace('"a":', '"was a":').replace('"b":', '"a":').replace('"was a":', '"b":')
    assert swapped != text
    (folder / "tokenizer.json").write_text(swapped, "utf-8")
    with pytest.raises(InputError, match=r"model=.*not the target's: id \d+ is '[ab]' there '[ab]'"):
        DraftModelDrafter(target, model=str(folder))


def test_differently_padded_vocabularies_fit(tmp_path: Path):
    """Guards TV-01: tokenizers are compared, not sizes; ids that only padding has are never drafted."""
    target = load_tiny(device="cpu")
    folder = disturbed_copy(target, tmp_path, 0.05)
    draft = load_tiny(device="cpu")
    draft.model.resize_token_embeddings(target.vocab_size + 64)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight[len(target.tokenizer) :] = 9.0  # type: ignore[index, arg-type]
    draft.model.save_pretrained(folder)
    drafter = DraftModelDrafter(target, model=str(folder), k=3, branches=2)
    assert drafter.draft.vocab_size == target.vocab_size + 64
    requests = [Request((1, 3, 20 + at, 30, 4), 20, noise_key=(at,)) for at in range(4)]
    for sampling in (SamplingParams(), SamplingParams(1.5)):
        for generation in decode(target, drafter, requests, sampling=sampling):
            assert generation.error is None
            drafts = [token for item in generation.rounds for token in item.tokens[1:]]
            assert max(drafts) < len(target.tokenizer)  # type: ignore[arg-type]


def test_without_tokenizers_the_sizes_have_to_agree(tiny_target: GetTarget, tmp_path: Path):
    """Guards TV-02."""
    other = Target(bigram_model(law_table({0: (1.0,)})))
    with pytest.raises(InputError, match="has 16 ids and the target 128"):
        DraftModelDrafter(tiny_target(), model=str(disturbed_copy(other, tmp_path, 0.0)))


def test_a_folder_without_weights_is_one_sentence(tiny_target: GetTarget, tmp_path: Path):
    with pytest.raises(InputError) as refused:
        DraftModelDrafter(tiny_target(), model=str(tmp_path))
    assert refused.value.field == "model"


def test_the_folder_of_a_head_is_named_for_what_it_is():
    """It said that the folder held no tokenizer, after the target had been loaded."""
    head = str(shipped_folder("eagle", "smollm2_135m"))
    settings = {"verify_ms": None, **dict.fromkeys(("k", "branches", "width"), 1)}
    with pytest.raises(InputError, match="a head for the strategy eagle"):
        DraftModelDrafter.check_parameters(model=head, **settings)
    DraftModelDrafter.check_parameters(model=str(shipped_folder("draft_model", "smollm2_135m")), **settings)


def test_memory_is_reported(tiny_target: GetTarget, itself: Callable[..., DraftModelDrafter]):
    """Guards G-11: weights and cache of the draft are in the sum."""
    target = tiny_target()
    drafter = itself(target)
    decode(target, drafter, [Request((5, 6), 5)])
    held = drafter.memory_bytes()
    assert held["draft_weights"] == target.weight_bytes
    assert held["draft_kv"] == drafter.draft.kv_bytes > 0


# --- depth by cost --------------------------------------------------------------------------------------------------


def test_formulas_by_hand():
    assert expected_emitted(0.0, 4) == 1
    assert expected_emitted(1.0, 4) == 5
    assert expected_emitted(0.5, 2) == pytest.approx(1.75)
    assert expected_emitted(0.8, 5) == pytest.approx(sum(0.8**at for at in range(6)))
    assert chain_speedup(0.8, 5, 0.0) == pytest.approx(3.68928)
    assert chain_speedup(0.5, 1, 0.25) == pytest.approx(1.2)
    assert best_chain_length(0.0, 0.1, 8) == 1
    assert best_chain_length(1.0, 0.1, 8) == 8
    assert best_chain_length(0.8, 0.1, 16) == max(
        range(1, 17), key=lambda k: (1 - 0.8 ** (k + 1)) / 0.2 / (0.1 * k + 1)
    )


def test_the_depth_follows_the_acceptance(tiny_target: GetTarget, itself: Callable[..., DraftModelDrafter]):
    """Guards SP-08: what was learnt ends with the sequence, and the given k stays the bound."""
    target = tiny_target()
    drafter = itself(target, k=8, draft_cost=0.1)
    two = decode(target, drafter, [Request((5, 6, 7), 60)] * 2)
    depths = [[item.proposed for item in generation.rounds] for generation in two]
    assert depths[0] == depths[1]
    assert depths[0][0] < max(depths[0]) == 8
    assert drafter.k == 8
