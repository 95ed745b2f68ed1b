"""The tree cache on real (tiny) models: against the model's own forward, for every family and both exact modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import (
    LOGITS_WITHIN,
    check_committed_rows,
    check_features,
    check_node_logits,
    naive_answer,
    plain_keys_values,
    plain_logits,
)
from scripted import FutureDrafter
from tiny_models import ARCHITECTURES, EOS, POSITIONS, WINDOW, build, tiny_model
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specdec_lab import target as target_module
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.errors import NoRoomError, UnsupportedModelError
from specdec_lab.target import Exact, Target, free_bytes
from specdec_lab.tree import DraftTree, chain, root_only

GetTarget = Callable[..., Target]

TEXT = [7, 91, 33, 4, 58, 120, 11, 64, 29, 83, 5, 46, 99, 17, 70, 38, 102, 9, 54, 77, 21, 66]
"""More than twice the window."""


# --- logits, keys and values ----------------------------------------------------------------------------------------


def test_node_logits_equal_a_plain_forward_of_the_path(architecture: str, exact: Exact, tiny_target: GetTarget):
    """Guards CP-02, CP-04, CP-10, CP-14: positions, masks and window of every node, in a ragged batch."""
    check_node_logits(tiny_target(architecture, exact), seed=ARCHITECTURES.index(architecture))


def test_committed_rows_equal_a_fresh_forward(architecture: str, exact: Exact, tiny_target: GetTarget):
    """Guards CP-04: what stays in the cache after scattered commits is the accepted text and nothing else."""
    check_committed_rows(tiny_target(architecture, exact))


@pytest.mark.parametrize("chunk", [1, 3, WINDOW, 16])
def test_chunked_prefill_equals_one_forward(architecture: str, chunk: int, tiny_target: GetTarget, monkeypatch):
    """A prompt longer than a chunk, with chunk borders within, at and across the window, ends in the same cache."""
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(target_module, "CAUSAL_CHUNK", chunk)
    target = tiny_target(architecture)
    target.allocate(1, len(TEXT), 1)
    logits = target.prefill(0, TEXT).row_logits(0)
    assert logits.shape == (1, target.vocab_size)
    assert (logits[0] - plain_logits(target.model, TEXT)[-1]).abs().max() <= LOGITS_WITHIN
    kept = target.cache.committed(0, len(TEXT))
    for layer, (keys, values) in enumerate(plain_keys_values(target.model, TEXT)):
        assert torch.allclose(kept[layer][0], keys, atol=1e-4)
        assert torch.allclose(kept[layer][1], values, atol=1e-4)


@pytest.mark.parametrize("architecture", ["mistral", "llama"])
def test_a_prompt_longer_than_a_real_chunk(architecture: str, exact: Exact, monkeypatch):
    """The constants themselves: 520 tokens are two masked chunks, one without a mask, or one of each kind."""
    text = [3 + (at * 37) % 120 for at in range(520)]
    target = Target(tiny_model(architecture, max_position_embeddings=1024), exact=exact)
    wanted, wanted_next = (plain_logits(target.model, ids)[-1] for ids in (text, [*text, 5, 6]))
    for causal_chunk in (target_module.CAUSAL_CHUNK, 300):
        monkeypatch.setattr(target_module, "CAUSAL_CHUNK", causal_chunk)
        target.allocate(1, len(text) + 1, 2)
        assert (target.prefill(0, text).row_logits(0)[0] - wanted).abs().max() < LOGITS_WITHIN
        logits = target.forward({0: chain(5, [6])}).row_logits(0)
        assert (logits[1] - wanted_next).abs().max() < LOGITS_WITHIN


@pytest.mark.parametrize("chunk", [4, 512])
def test_features_equal_hidden_states_of_a_plain_forward(
    architecture: str, chunk: int, exact: Exact, tiny_target: GetTarget, monkeypatch
):
    """Guards CP-08: a drafter gets the target's true features of every committed token, prompt included."""
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(target_module, "CAUSAL_CHUNK", chunk)
    check_features(tiny_target(architecture, exact), (0, 1, -1))


def test_no_features_unless_asked(tiny_target: GetTarget):
    target = tiny_target()
    target.allocate(1, 8, 4)
    assert target.prefill(0, TEXT[:4]).features == {}
    assert target.forward({0: chain(5, [6])}).row_features(0) == {}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_functions(attention: str, exact: Exact, tiny_target: GetTarget):
    """Stock sdpa and eager get masks that are not repeated for the groups, also after a switch at run time."""
    for architecture in ("llama", "qwen2"):
        model = tiny_model(architecture)
        model.set_attn_implementation(attention)
        target = Target(model, exact=exact)
        check_node_logits(target, rounds=2)
        target.set_attention("specdec_packed")
        check_node_logits(target, rounds=2)
        target.set_attention(attention)
        check_node_logits(target, rounds=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, architecture: str, exact: Exact):
    """Guards CP-13: masks have the compute dtype's own minimum, so half precision neither overflows nor is off."""
    model = tiny_model(architecture).to(dtype)  # type: ignore[arg-type]
    target = Target(model, exact=exact)
    assert target.dtype == dtype
    target.allocate(2, 32, 5)
    target.prefill(0, TEXT)
    target.prefill(1, TEXT[:2])
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 2))
    output = target.forward({0: tree, 1: root_only(9)})
    for node in range(len(tree)):
        ids = [*TEXT, *(tree.tokens[at] for at in tree.path_to(node))]
        wanted = plain_logits(model, ids)[-1].float()
        off = (output.row_logits(0)[node].float() - wanted).abs().max()
        assert off <= 0.05 * wanted.abs().max()
    assert output.row_logits(1).isfinite().all()


def test_models_that_cannot_leave_logits_out(tiny_target: GetTarget, monkeypatch):
    """A model without ``logits_to_keep`` computes all rows; the prompt's message still holds the last one alone."""
    target = tiny_target("llama")
    assert target._can_keep_logits
    target.allocate(1, 32, 1)
    wanted = target.prefill(0, TEXT).row_logits(0)
    target.reset(0)
    monkeypatch.setattr(target, "_can_keep_logits", False)
    got = target.prefill(0, TEXT).row_logits(0)
    assert got.shape == wanted.shape == (1, target.vocab_size)
    assert torch.allclose(got, wanted, atol=1e-5)


# --- trees of every shape -------------------------------------------------------------------------------------------

SHAPES = {
    "one node": (-1,),
    "depth 1, width 4": (-1, 0, 0, 0, 0),
    "chain of 4": (-1, 0, 1, 2, 3),
    "full 3 x 3": (-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3),
    "lopsided": (-1, 0, 0, 2, 3, 4, 0, 6),
    "wide, depth first": (-1, 0, 1, 0, 3, 0, 5, 0, 7),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_tree_shapes(shape: tuple[int, ...], exact: Exact, tiny_target: GetTarget):
    """Guards TR-02 and TR-04: no shape is a special case, in logits or in the path that is kept."""
    tree = DraftTree(tuple(range(10, 10 + len(shape))), shape)
    target = tiny_target("gemma3", exact)
    target.allocate(1, 32, len(tree))
    for leaf in range(len(tree)):
        target.reset(0)
        target.prefill(0, TEXT[:9])
        logits = target.forward({0: tree}).row_logits(0)
        assert logits.shape[0] == len(tree)
        path = tree.path_to(leaf)
        ids = [*TEXT[:9], *(tree.tokens[node] for node in path)]
        assert (logits[leaf] - plain_logits(target.model, ids)[-1]).abs().max() <= LOGITS_WITHIN
        target.commit({0: path})
        after = target.forward({0: root_only(99)}).row_logits(0)[0]
        assert (after - plain_logits(target.model, [*ids, 99])[-1]).abs().max() <= LOGITS_WITHIN


def test_wide_then_narrow_then_no_draft(exact: Exact, tiny_target: GetTarget):
    """Guards CP-10 and ML-02: no mask of an earlier, wider round survives into a narrower one."""
    target = tiny_target("qwen2", exact)
    target.allocate(1, 32, 13)
    text = list(TEXT[:10])
    target.prefill(0, text)
    wide = DraftTree(tuple(range(20, 33)), SHAPES["full 3 x 3"])
    for tree in (wide, chain(40, [41, 42]), root_only(50), wide, root_only(51)):
        logits = target.forward({0: tree}).row_logits(0)
        for node in range(len(tree)):
            ids = [*text, *(tree.tokens[at] for at in tree.path_to(node))]
            assert (logits[node] - plain_logits(target.model, ids)[-1]).abs().max() <= LOGITS_WITHIN
        target.commit({0: (0,)})
        text.append(tree.tokens[0])
        assert target.length(0) == len(text)


# --- rows of a batch ------------------------------------------------------------------------------------------------


def test_a_row_that_sits_a_forward_out_keeps_its_cache(architecture: str, exact: Exact, tiny_target: GetTarget):
    """A batch in which only rows 0 and 2 get a tree leaves row 1 as it was, even when it is longer than both."""
    target = tiny_target(architecture, exact)
    target.allocate(3, 24, 4)
    for row, text in enumerate((TEXT[:3], TEXT, TEXT[5:12])):
        target.prefill(row, text)
    target.forward({0: chain(9, [8, 7]), 2: root_only(6)})
    target.commit({0: (0, 1, 2), 2: (0,)})
    assert target.length(1) == len(TEXT)
    logits = target.forward({1: root_only(44)}).row_logits(1)[0]
    assert (logits - plain_logits(target.model, [*TEXT, 44])[-1]).abs().max() <= LOGITS_WITHIN


def test_rows_of_a_batch_do_not_see_each_other(exact: Exact, tiny_target: GetTarget):
    """A row's logits are the same whatever its neighbours hold."""
    target = tiny_target("qwen2", exact)
    got: list[Tensor] = []
    for neighbour in (TEXT[:2], TEXT[3:20]):
        target.allocate(2, 32, 8)
        target.prefill(0, neighbour)
        target.prefill(1, TEXT[:6])
        got.append(target.forward({0: chain(3, range(4, 4 + len(neighbour) % 7)), 1: chain(9, [8, 7])}).row_logits(1))
    assert torch.allclose(got[0], got[1], atol=LOGITS_WITHIN)


def test_a_second_forward_forgets_the_first(tiny_target: GetTarget):
    """Guards CP-05: a tree that is never committed leaves no trace, and neither does an interrupted round."""
    target = tiny_target("gemma3")
    target.allocate(1, 16, 6)
    target.prefill(0, TEXT[:9])
    before = [tensor.clone() for pair in target.cache.committed(0, 9).values() for tensor in pair]
    target.forward({0: chain(50, [51, 52, 53, 54])})
    logits = target.forward({0: chain(60, [61])}).row_logits(0)
    assert (logits[1] - plain_logits(target.model, [*TEXT[:9], 60, 61])[-1]).abs().max() <= LOGITS_WITHIN
    after = [tensor for pair in target.cache.committed(0, 9).values() for tensor in pair]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert target.length(0) == 9


@pytest.mark.parametrize("path", [(1,), (0, 2), (0, 1, 2, 3, 4), (0, 3, 1), (0, 0), (0, -1)], ids=str)
def test_only_a_path_from_the_root_can_be_committed(path: tuple[int, ...], tiny_target: GetTarget):
    """Guards CP-05: what is kept is named node by node and checked; nothing is inferred from a count."""
    target = tiny_target()
    target.allocate(1, 16, 5)
    target.prefill(0, TEXT[:4])
    target.forward({0: DraftTree((1, 2, 3, 4, 5), (-1, 0, 1, 0, 3))})
    with pytest.raises(ValueError, match="no pending path"):
        target.commit({0: path})
    target.commit({0: (0, 3, 4)})
    assert target.length(0) == 7


def test_nothing_is_pending_after_commit_or_reset(tiny_target: GetTarget):
    target = tiny_target()
    target.allocate(1, 16, 5)
    target.prefill(0, TEXT[:4])
    target.forward({0: chain(1, [2])})
    target.commit({0: (0,)})
    with pytest.raises(ValueError, match="no pending path"):
        target.commit({0: (0,)})
    target.forward({0: chain(1, [2])})
    target.reset(0)
    with pytest.raises(ValueError, match="no pending path"):
        target.commit({0: (0,)})
    assert target.length(0) == 0


# --- room and allocation --------------------------------------------------------------------------------------------


def test_room_is_counted_for_the_widest_tree_of_a_batch():
    """A short tree beside a wide one is padded to its width, so a nearly full row has to have that room too."""
    target = Target(tiny_model("llama"))
    target.allocate(2, 10, 4)
    target.prefill(0, TEXT[:12])
    target.prefill(1, TEXT[:3])
    target.forward({0: chain(1, [2])})
    with pytest.raises(NoRoomError, match="row 0 holds 12 tokens"):
        target.forward({0: root_only(1), 1: chain(1, [2, 3, 4])})


def test_a_prompt_that_does_not_fit_is_refused():
    target = Target(tiny_model("llama"))
    target.allocate(1, 4, 1)
    with pytest.raises(NoRoomError, match="6 tokens"):
        target.prefill(0, TEXT[:6])
    with pytest.raises(NoRoomError, match="no tokens"):
        target.prefill(0, [])
    target.prefill(0, TEXT[:3])
    with pytest.raises(RuntimeError, match="reset it"):
        target.prefill(0, TEXT[:3])


def test_length_is_kept_by_the_framework_not_read_from_a_layer(tiny_target: GetTarget):
    """Guards CP-07: layer 0 of the Gemma-3-like model is windowed, and the length goes on past the window."""
    target = tiny_target("gemma3")
    target.allocate(1, 32, 1)
    target.prefill(0, TEXT)
    assert target.length(0) == len(TEXT) > 2 * WINDOW
    target.forward({0: root_only(5)})
    target.commit({0: (0,)})
    assert target.length(0) == len(TEXT) + 1


def test_buffers_are_kept_while_they_are_large_enough(exact: Exact):
    target = Target(tiny_model("llama"), exact=exact)
    target.allocate(2, 40, 8)
    address, held = target.cache.address, target.kv_bytes
    target.prefill(1, TEXT)
    for rows, tokens, nodes in ((1, 5, 1), (2, 40, 8), (2, 30, 18)):
        target.allocate(rows, tokens, nodes)
        assert target.cache.address == address
        assert target.length(1) == 0
    target.allocate(3, 40, 8)
    assert target.kv_bytes > held
    layers, heads, head_dim = 3, 2, 8
    assert target.kv_bytes == 2 * layers * 3 * heads * target.cache.capacity * head_dim * 4


@pytest.mark.parametrize("nodes", [1, 8, 9, 32, 33, 70])
def test_fixed_shape_pads_queries_and_keys(nodes: int, tiny_target: GetTarget):
    """Every forward has one of a few shapes: 8, 16, 32, 64 ... queries, and a multiple of 512 slots."""
    target = tiny_target("llama", "fixed_shape")
    target.allocate(1, 10, nodes)
    shapes: list[tuple[int, int]] = []

    def remember(_module: Any, _arguments: Any, given: dict[str, Any]) -> None:
        shapes.append((given["input_ids"].shape[1], given["attention_mask"].shape[3]))

    handle = target.model.register_forward_pre_hook(remember, with_kwargs=True)
    try:
        target.prefill(0, TEXT[:5])
        target.forward({0: chain(3, range(3, 2 + nodes))})
    finally:
        handle.remove()
    padded = {1: 8, 8: 8, 9: 16, 32: 32, 33: 64, 70: 96}[nodes]
    assert shapes == [(8, 512), (padded, 512)]


# --- what no row may catch from another -----------------------------------------------------------------------------


def test_padding_does_not_run_a_token_of_its_own(exact: Exact):
    """Guards CP-13: the embedding of token 0 is NaN here, as an untrained pad row can be; no text holds it."""
    model = tiny_model("llama")
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    with torch.no_grad():
        embedding[0] = float("nan")
    target = Target(model, exact=exact)
    target.allocate(3, 24, 6)
    target.prefill(0, TEXT[:5])
    target.prefill(2, TEXT[:9])
    for _ in range(2):
        output = target.forward({0: chain(9, [8, 7, 6, 5, 4]), 2: root_only(3)})
        assert output.row_logits(0).isfinite().all()
        assert output.row_logits(2).isfinite().all()
        target.commit({0: (0,), 2: (0,)})
    target.prefill(1, TEXT[:2])
    output = target.forward({1: root_only(9), 2: root_only(3)})
    assert output.row_logits(1).isfinite().all()


def test_a_cleared_row_holds_no_nan(tiny_target: GetTarget):
    """Guards CP-13: a masked slot still enters the sum with weight 0, and 0 times NaN is NaN."""
    target = tiny_target()
    target.allocate(2, 24, 8)
    for keys, values in target.cache.committed(0, target.cache.capacity).values():
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    target.reset(0, clear=True)
    target.prefill(0, TEXT[:3])
    target.prefill(1, TEXT[:20])
    assert target.forward({0: root_only(5), 1: root_only(5)}).row_logits(0).isfinite().all()


def test_a_row_can_be_cleared_whichever_mode_made_the_buffers():
    """PyTorch forbids in-place edits of tensors made in inference mode outside of it."""
    with torch.inference_mode():
        target = Target(tiny_model("llama"))
        target.allocate(1, 8, 1)
        target.prefill(0, TEXT[:3])
    target.reset(0, clear=True)
    target.prefill(0, TEXT[:3])
    target.reset(0, clear=True)


# --- what it says of the model --------------------------------------------------------------------------------------


def test_says_what_the_model_is(tiny_target: GetTarget):
    target = tiny_target()
    assert target.vocab_size == 128
    assert target.max_length == POSITIONS
    assert target.eos_ids == {EOS}
    assert target.weight_bytes == 4 * target.parameter_count
    assert target.dtype == torch.float32
    assert target.device.type == "cpu"
    target.synchronize()


def test_ends_of_text_are_gathered_from_every_place_that_names_one():
    """Guards ST-01: chat models end turns with another token than texts, and say so in different files."""
    model = tiny_model("llama", eos_token_id=[5, 6])
    model.generation_config.eos_token_id = [6, 7]  # type: ignore[union-attr]
    assert Target(model).eos_ids == {5, 6, 7}
    model = tiny_model("llama", eos_token_id=None)
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    assert Target(model).eos_ids == frozenset()


def test_a_longrope_model_ends_where_its_keys_would_turn():
    """Guards CP-11: past the original length all keys get other angles, which cached ones cannot follow."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {**_sizes("llama"), "original_max_position_embeddings": 24}
    model = build(AutoConfig.for_model("phi3", **sizes, rope_parameters=rope))
    target = Target(model)
    assert model.config.max_position_embeddings == POSITIONS
    assert target.max_length == 24
    prompt = tuple(TEXT[:15])
    wanted = naive_answer(model, prompt, 9, target.eos_ids)[len(prompt) :]
    drafter = FutureDrafter(target, {prompt: [*prompt, *wanted]}, k=6)
    *_, last = speculative_decode(target, drafter, [Request(prompt, 50)])
    assert last.generation is not None
    assert list(last.generation.output_ids) == wanted


# --- what is refused ------------------------------------------------------------------------------------------------


def _sizes(architecture: str) -> dict[str, Any]:
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keep += ("num_key_value_heads", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    config = tiny_model(architecture).config
    return {name: getattr(config, name) for name in keep}


def _model(kind: str, attention: str, changes: dict[str, Any]) -> PreTrainedModel:
    return build(AutoConfig.for_model(kind, **{**_sizes("llama"), **changes}), attention=attention)


MIXED = ["sliding_attention", "full_attention", "full_attention"]

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "mamba": ("mamba", "eager", {}, "state-space"),
    "hybrid convolution": ("lfm2", "eager", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    "chunked attention": ("llama4_text", "eager", {"head_dim": 8}, "chunked_attention"),
    "position bias (ALiBi)": ("bloom", "eager", {}, "bloom"),
    "looks both ways": ("bert", "eager", {}, "off by"),
    "window by slot": (
        "gpt_neo",
        "eager",
        {"num_layers": 2, "num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "by cache slot",
    ),
    "soft cap under packed attention": ("gemma2", "specdec_packed", {"head_dim": 8}, "no softcap"),
    "sinks under packed attention": ("gpt_oss", "specdec_packed", {"head_dim": 8, "num_local_experts": 4}, "no s_aux"),
}


@pytest.mark.parametrize(("kind", "attention", "changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_models_that_cannot_be_verified_are_refused(kind: str, attention: str, changes: dict[str, Any], reason: str):
    """What a tree mask cannot drive is refused at set-up, by name and with the reason, and never answered wrongly."""
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        Target(_model(kind, attention, changes))
    assert kind in str(caught.value)
    assert "\n" not in str(caught.value)


def test_encoder_decoder_models_are_refused():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Target(AutoModelForSeq2SeqLM.from_config(config).eval())


@pytest.mark.parametrize(
    ("implementation", "reason"), [("flash_attention_2", "takes no tree mask"), ("sdpa", "leaves out")]
)
def test_attention_that_drops_a_mask_or_a_cap_is_refused(implementation: str, reason: str):
    """Both would run, and be silently wrong: flash attention takes no 4-D mask, and old sdpa paths no soft cap."""
    model = tiny_model("gemma2")
    model.config._attn_implementation = implementation
    with pytest.raises(UnsupportedModelError, match=reason):
        Target(model)


@pytest.mark.parametrize("fault", ["forgets the mask", "sees siblings", "rounds away"])
def test_the_check_at_set_up_sees_a_broken_attention(fault: str):
    """An attention function that ignores or bends the mask cannot get past the constructor, whoever registered it."""

    def broken(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        if mask is not None and mask.dtype != torch.bool and query.shape[2] > 1:
            if fault == "forgets the mask":
                mask = torch.zeros_like(mask)
            elif fault == "sees siblings":
                mask = mask.clone()
                mask[..., -query.shape[2] :] = torch.zeros(query.shape[2], query.shape[2]).masked_fill(
                    ~torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril(), torch.finfo(mask.dtype).min
                )
            else:
                value = value.half().float() * 1.02
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("broken_for_a_test", broken)
    AttentionMaskInterface.register("broken_for_a_test", sdpa_mask)
    model = tiny_model("llama")
    model.set_attn_implementation("broken_for_a_test")
    with pytest.raises(UnsupportedModelError, match="more than rounding explains"):
        Target(model)


def test_a_model_whose_own_logits_are_nan_is_told_so():
    """Damaged weights are no matter of masks: the sentence points at them."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match="NaN or infinite; check dtype and weights"):
        Target(model)


def test_latent_attention_runs_packed():
    """DeepSeek's keys are expanded between cache and attention, so the cache's groups are not the attention's."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    sizes |= {"moe_intermediate_size": 16, "num_key_value_heads": 4}
    check_node_logits(Target(_model("deepseek_v3", "specdec_packed", sizes)), rounds=2)


@pytest.mark.parametrize("vocab", [2, 3, 4, 8, 157, 314])
def test_any_vocabulary_passes_the_check_at_set_up(vocab: int):
    """The check's own tree had two siblings of one token at some sizes, which no tree may have."""
    assert Target(tiny_model("llama", vocab_size=vocab)).vocab_size == vocab


def test_free_memory_counts_what_the_allocator_holds(monkeypatch: pytest.MonkeyPatch):
    """A cache that grows has just given its old buffers back, to PyTorch and not to the device."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    assert free_bytes(torch.device("cuda:0")) == 65


def test_the_check_leaves_the_global_random_state_alone():
    torch.manual_seed(3)
    wanted = torch.rand(1)
    model = tiny_model("llama")
    torch.manual_seed(3)
    Target(model)
    assert torch.equal(torch.rand(1), wanted)
