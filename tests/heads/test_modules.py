"""The heads' forward against independent ones: transformers' own layer, and formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_folders import HIDDEN, LLAMA3, VOCAB, attend, deep_target, layer, randomised, reduced
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specdec_lab.errors import InputError
from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.eagle3 import Eagle3Head, default_feature_layers
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.vocabulary import DraftVocabulary

ROWS, TOKENS, CLOSE = 2, 9, 2e-5

SHAPES: dict[str, dict[str, Any]] = {"grouped": {}, "wide heads": {"head_dim": 16}, "llama3 positions": LLAMA3}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small(head: nn.Module) -> nn.Module:
    """Scale random weights so that float32 rounding stays small."""
    randomised(head)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.sub_(0.3).mul_(0.5)
    return head.eval()


def rotation(head: EagleHead | Eagle3Head, first: int = 3) -> tuple[Tensor, Tensor]:
    head.rotation.reserve(TOKENS + first, torch.empty(0))
    return head.rotation.at(torch.arange(first, first + TOKENS).expand(ROWS, -1))


def stock_layer(config: LlamaConfig, ours: nn.Module, input_size: int) -> LlamaDecoderLayer:
    """Return transformers' layer with our weights, without its input norm, on inputs of another width."""
    config = LlamaConfig(**config.to_dict())
    config._attn_implementation = "eager"
    stock = LlamaDecoderLayer(config, 0)
    stock.input_layernorm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(stock.self_attn, name)
        setattr(stock.self_attn, name, nn.Linear(input_size, old.out_features, bias=old.bias is not None))
    kept = {name: tensor for name, tensor in ours.state_dict().items() if name in stock.state_dict()}
    assert set(stock.state_dict()) - set(kept) <= {"self_attn.o_proj.bias"}
    stock.load_state_dict(kept, strict=False)
    return stock


def stock_positions(config: LlamaConfig, first: int = 3) -> tuple[Tensor, Tensor]:
    return LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(first, first + TOKENS)[None])


def causal() -> Tensor:
    return torch.full((TOKENS, TOKENS), float("-inf")).triu(1).expand(ROWS, 1, -1, -1)


@pytest.mark.parametrize("shape", SHAPES)
def test_eagle_is_a_llama_layer_without_its_first_norm(shape: str):
    """Against transformers' decoder layer: residuals, grouped queries, rotary positions that do not start at 0."""
    config = layer(**SHAPES[shape])
    head = small(EagleHead(config, DraftVocabulary.whole(VOCAB), fc_bias=True))
    assert isinstance(head, EagleHead)
    states, embedded = noise(ROWS, TOKENS, HIDDEN), noise(ROWS, TOKENS, HIDDEN, seed=1)
    stock = stock_layer(config, head.layers[0], HIDDEN)
    with torch.inference_mode():
        ours = head.step(head.begin({-1: states}), embedded, rotation(head), attend)
        fused = torch.cat((embedded, states), dim=-1) @ head.fc.weight.T + head.fc.bias
        theirs = stock(fused, attention_mask=causal(), position_embeddings=stock_positions(config))
    assert (ours - theirs).abs().max() < CLOSE * theirs.abs().max()


def test_layers_of_eagle_beyond_the_first_are_whole_llama_layers():
    """As the published code builds them: only the first one has no norm before its attention."""
    config = layer(num_hidden_layers=2)
    head = small(EagleHead(config, DraftVocabulary.whole(VOCAB)))
    assert isinstance(head, EagleHead)
    states, embedded = noise(ROWS, TOKENS, HIDDEN), noise(ROWS, TOKENS, HIDDEN, seed=1)
    first = stock_layer(config, head.layers[0], HIDDEN)
    second = LlamaDecoderLayer(first.self_attn.config, 1)
    second.load_state_dict(head.layers[1].state_dict())
    more = {"attention_mask": causal(), "position_embeddings": stock_positions(config)}
    seen: list[int] = []

    def watched(index: int, *parts: Tensor) -> Tensor:
        seen.append(index)
        return attend(index, *parts)

    with torch.inference_mode():
        ours = head.step(head.begin({-1: states}), embedded, rotation(head), watched)
        theirs = second(first(torch.cat((embedded, states), dim=-1) @ head.fc.weight.T, **more), **more)
    assert seen == [0, 1]
    assert (ours - theirs).abs().max() < CLOSE * theirs.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_eagle3_layer_against_transformers_attention(shape: str):
    """The residual is the fused state, not its norm; attention reads the normed embedding first, then the state."""
    config = layer(**SHAPES[shape])
    head = small(Eagle3Head(config, reduced(), (2, 5, 4)))
    assert isinstance(head, Eagle3Head)
    states = {at: noise(ROWS, TOKENS, HIDDEN, seed=at) for at in (2, 4, 5)}
    embedded = noise(ROWS, TOKENS, HIDDEN, seed=1)
    stock, mid = stock_layer(config, head.midlayer, 2 * HIDDEN), head.midlayer
    norm = LlamaRMSNorm(HIDDEN, config.rms_norm_eps)

    def normed(weight: Tensor, x: Tensor) -> Tensor:
        norm.weight.data = weight
        return norm(x)

    with torch.inference_mode():
        fused = head.begin(states)
        assert torch.allclose(fused, torch.cat([states[2], states[5], states[4]], -1) @ head.fc.weight.T, atol=1e-5)
        ours = head.step(fused, embedded, rotation(head), attend)
        both = torch.cat((normed(mid.input_layernorm.weight, embedded), normed(mid.hidden_norm.weight, fused)), -1)
        mixed, _ = stock.self_attn(
            hidden_states=both, attention_mask=causal(), position_embeddings=stock_positions(config)
        )
        after = fused + mixed
        theirs = after + stock.mlp(normed(mid.post_attention_layernorm.weight, after))
        assert (ours - theirs).abs().max() < CLOSE * theirs.abs().max()
        drafted = normed(head.norm.weight, theirs) @ head.lm_head.weight.T
        assert torch.allclose(head.logits(ours, torch.empty(0)), drafted, atol=1e-3)


def test_eagle_reads_the_targets_output_layer_at_its_vocabulary():
    """The rows of the shared output layer are those of the ids that can be drafted."""
    target = deep_target()
    head = EagleHead(layer(), reduced())
    parts = SharedParts(target, head.vocabulary)
    states = noise(4, HIDDEN)
    full = states @ target.model.state_dict()["lm_head.weight"].T
    assert torch.allclose(head.logits(states, parts.output), full[:, reduced().token_ids], atol=1e-5)
    assert torch.equal(parts.embed(torch.tensor([7])), target.model.get_input_embeddings()(torch.tensor([7])))


def test_medusa_blocks_are_worked_out_by_hand():
    """Each block is x + SiLU(W x + b), each head with weights of its own; own output layers or the shared one."""
    states, shared = noise(4, HIDDEN), noise(len(reduced()), HIDDEN, seed=1)
    heads = small(MedusaHeads(HIDDEN, reduced(), heads=2, blocks=2, own_output=True))
    assert isinstance(heads, MedusaHeads)
    weights = heads.state_dict()
    with torch.inference_mode():
        said = heads.logits(states, shared)
        for at in range(2):
            x = states
            for block in range(2):
                x = x + F.silu(x @ weights[f"{at}.{block}.linear.weight"].T + weights[f"{at}.{block}.linear.bias"])
            assert torch.allclose(said[:, at], x @ weights[f"{at}.2.weight"].T, atol=1e-4)
            assert torch.allclose(heads.one(at, states, shared), said[:, at], atol=1e-5)
    assert said.shape == (4, 2, len(reduced()))


def test_fresh_medusa_heads_say_what_the_target_says():
    """Blocks start as the identity, so that training starts from the target's own next-token law."""
    states, shared = noise(4, HIDDEN), noise(VOCAB, HIDDEN, seed=1)
    heads = MedusaHeads(HIDDEN, DraftVocabulary.whole(VOCAB), heads=3, blocks=2)
    said = heads.logits(states, shared)
    assert all(torch.allclose(said[:, at], states @ shared.T, atol=1e-5) for at in range(3))
    parameters = [name for name, _ in heads.named_parameters()]
    assert len(parameters) == len(set(parameters)) == 3 * 2 * 2  # no block is another block's


def test_default_states_are_a_low_a_middle_and_a_high_one():
    """As published; a target that is too shallow for them is told to state its own."""
    assert default_feature_layers(32) == (2, 16, 29)
    assert default_feature_layers(36) == (2, 18, 33)
    with pytest.raises(InputError, match=r"layers=.*state them"):
        default_feature_layers(5)
