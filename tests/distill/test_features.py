"""Hidden states for training are those of decoding: one function, whole texts or trees, online or from the cache."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import decode, naive_answer
from rich.console import Console
from scripted import ScriptedDrafter, random_tree
from tiny_models import POSITIONS, VOCAB, tiny_model
from torch import Tensor, nn

from specdec_lab.decode import Request
from specdec_lab.distill.batch import Example
from specdec_lab.distill.feature_cache import cache_folder, cache_identity, prepare_cache
from specdec_lab.distill.features import CachedFeatures, FeatureSource, OnlineFeatures
from specdec_lab.drafters.base import DraftContext
from specdec_lab.errors import InputError, NoRoomError
from specdec_lab.target import Exact, Target
from specdec_lab.tree import DraftTree, root_only

GetTarget = Callable[..., Target]

LAYERS = (0, 1, -1)


def texts(*lengths: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    ids = [tuple(rng.randrange(3, VOCAB) for _ in range(length)) for length in lengths]
    return [Example(f"{number}", one, (False, *[True] * (len(one) - 1))) for number, one in enumerate(ids)]


def padded(examples: Sequence[Example], filler: int = 0) -> tuple[Tensor, Tensor]:
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), filler)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
    return ids, torch.tensor([len(example.ids) for example in examples])


def close(got: Tensor, wanted: Tensor, within: float = 1e-5) -> bool:
    return got.shape == wanted.shape and bool(
        (got - wanted).abs().max() <= within * max(1.0, wanted.abs().max().item())
    )


def decoded_features(target: Target, layers: Sequence[int], seed: int = 3) -> tuple[list[int], dict[int, Tensor]]:
    """Decode with random trees and return every committed token with the features that the messages brought."""
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(19))
    right = naive_answer(target.model, prompt, 24, target.eos_ids)

    def tree(context: DraftContext) -> DraftTree:
        def token(depth: int) -> int:
            at = len(context.tokens) + depth
            return right[at] if at < len(right) and rng.random() < 0.7 else rng.randrange(3, VOCAB)

        return random_tree(rng, context.tokens[-1], 10, token, context.max_depth)

    drafter = ScriptedDrafter(target, tree, feature_layers=tuple(layers))
    decode(target, drafter, [Request(prompt, 24)])
    messages = drafter.messages
    joined = {layer: torch.cat([each.features[layer][list(each.path)] for each in messages]) for layer in layers}
    tokens = [*messages[0].tree.tokens]
    for each in messages[1:]:
        tokens += [each.tree.tokens[node] for node in each.path]
    assert len(messages) > 3
    assert any(len(each.path) > 1 for each in messages[1:])
    return tokens, joined


# --- the target's states --------------------------------------------------------------------------------------------


def test_states_are_the_features_of_decoding(architecture: str, exact: Exact, tiny_target: GetTarget):
    """Guards CP-08 and TD-16: a head is trained on what it is given when it drafts, whatever trees led there."""
    target = tiny_target(architecture, exact)
    tokens, wanted = decoded_features(target, LAYERS)
    got = target.states(torch.tensor([tokens]), torch.tensor([len(tokens)]), LAYERS)
    assert got.keys() == wanted.keys()
    for layer in LAYERS:
        assert close(got[layer][0], wanted[layer]), f"layer {layer}"


def test_rows_side_by_side_equal_each_row_alone(architecture: str, tiny_target: GetTarget):
    """Padding does not leak, neither into other rows nor within one; texts are shorter and longer than the window."""
    target = tiny_target(architecture)
    examples = texts(21, 3, 12, 1, 30)
    ids, lengths = padded(examples)
    together = target.states(ids, lengths, LAYERS)
    other = target.states(padded(examples, filler=77)[0], lengths, LAYERS)
    for row, example in enumerate(examples):
        alone = target.states(torch.tensor([example.ids]), torch.tensor([len(example.ids)]), LAYERS)
        for layer in LAYERS:
            assert close(together[layer][row, : len(example.ids)], alone[layer][0])
            assert not together[layer][row, len(example.ids) :].any()
            assert torch.equal(together[layer], other[layer])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_states_with_other_attention_functions(attention: str):
    for architecture in ("llama", "qwen2"):
        model = tiny_model(architecture)
        model.set_attn_implementation(attention)
        target = Target(model)
        ids, lengths = padded(texts(21, 9))
        got = target.states(ids, lengths, LAYERS)
        target.set_attention("specdec_packed")
        wanted = target.states(ids, lengths, LAYERS)
        assert all(close(got[layer], wanted[layer]) for layer in LAYERS)


def test_a_padding_token_that_embeds_to_nan_reaches_no_text():
    """Guards CP-13: a masked key of NaN would still make a NaN score, and a masked value of NaN a NaN sum."""
    for architecture in ("llama", "mistral"):
        model = tiny_model(architecture)
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        with torch.no_grad():
            embedding[0] = float("nan")
        states = Target(model).states(*padded(texts(21, 5)), LAYERS)
        assert all(states[layer].isfinite().all() for layer in LAYERS)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_one_token_in_low_precision(architecture: str):
    target = Target(tiny_model(architecture).to(torch.bfloat16))  # type: ignore[arg-type]
    (states,) = target.states(torch.tensor([[5], [6]]), torch.tensor([1, 1]), [-1]).values()
    assert states.dtype == torch.bfloat16
    assert states.shape == (2, 1, 32)


def test_autograd_can_keep_the_states(tiny_target: GetTarget):
    """A tensor of inference mode would stop the first backward of a training with an error of torch's."""
    states = tiny_target().states(*padded(texts(9, 4)), [-1])[-1]
    head = nn.Linear(32, 7)
    head(states).square().sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.abs().max() > 0
    assert not states.requires_grad


def test_the_output_layer_sees_one_token_per_text(tiny_target: GetTarget):
    """The output layer over all tokens would cost a sixth of the forward and the most memory of all."""
    target = tiny_target()
    seen: list[torch.Size] = []
    layer = target.model.get_output_embeddings()
    assert layer is not None
    hook = layer.register_forward_hook(lambda _, given, __: seen.append(given[0].shape))
    try:
        target.states(*padded(texts(9, 4)), [-1])
    finally:
        hook.remove()
    assert seen == [(2, 1, 32)]


def test_a_sequence_that_is_being_decoded_is_left_alone(tiny_target: GetTarget):
    target = tiny_target("gemma3")
    text = list(texts(12)[0].ids)
    target.allocate(1, 16, 2)
    target.prefill(0, text)
    target.states(*padded(texts(21, 5, seed=4)), [-1])
    assert target.length(0) == len(text)
    got = target.forward({0: root_only(9)}, [-1]).row_features(0)[-1]
    wanted = target.states(torch.tensor([[*text, 9]]), torch.tensor([13]), [-1])[-1][0, -1:]
    assert close(got, wanted)


def test_a_text_without_positions_is_refused(tiny_target: GetTarget):
    with pytest.raises(NoRoomError, match=f"{POSITIONS + 1} tokens"):
        tiny_target().states(*padded(texts(POSITIONS + 1)), [-1])


# --- sources of a batch ---------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tiny_target: GetTarget, tmp_path: Path) -> tuple[Target, list[Example], Path]:
    target, examples = tiny_target("qwen2"), texts(21, 3, 12, 30, 8)
    return target, examples, prepare_cache(target, LAYERS, examples, Console(quiet=True), tmp_path)


def test_both_sources_bring_the_same_batch(cached: tuple[Target, list[Example], Path]):
    """A head trained offline is the head trained online: ids, marks, lengths, keys and states, for any texts."""
    target, examples, folder = cached
    sources: tuple[FeatureSource, ...] = (OnlineFeatures(target, [1, -1]), CachedFeatures(folder, [1, -1]))
    for chosen in ([4, 0, 2], [1], [3, 3]):
        online, offline = (source.batch([examples[at] for at in chosen]) for source in sources)
        assert torch.equal(online.ids, offline.ids)
        assert torch.equal(online.supervised, offline.supervised)
        assert torch.equal(online.lengths, offline.lengths)
        assert online.keys == offline.keys == tuple(str(at) for at in chosen)
        assert list(online.features) == list(offline.features) == [1, -1]
        for layer in (1, -1):
            assert close(offline.features[layer], online.features[layer])
            assert online.features[layer].abs().max() > 0


def test_without_layers_the_target_does_not_run(tiny_target: GetTarget, monkeypatch: pytest.MonkeyPatch):
    def run(*_: Any) -> None:
        raise AssertionError("the target ran")

    target = tiny_target()
    monkeypatch.setattr(target, "states", run)
    batch = OnlineFeatures(target, ()).batch(texts(5, 3))
    assert batch.features == {}
    assert batch.ids.shape == (2, 5)


def test_a_text_with_other_ids_is_not_served(cached: tuple[Target, list[Example], Path]):
    """The key of a text is no proof: after another rendering it names other ids, and old states would be wrong."""
    _, examples, folder = cached
    changed = Example(examples[0].key, (*examples[0].ids[:-1], 3), examples[0].supervised)
    with pytest.raises(InputError, match="does not hold this text"):
        CachedFeatures(folder, [-1]).batch([examples[1], changed])


def test_a_layer_that_was_not_kept_is_refused(cached: tuple[Target, list[Example], Path]):
    with pytest.raises(InputError, match=r"features=\[2\].*holds layers \[0, 1, -1\]"):
        CachedFeatures(cached[2], [2, -1])


def test_no_cache_and_a_torn_shard_are_refused(cached: tuple[Target, list[Example], Path], tmp_path: Path):
    target, _, folder = cached
    with pytest.raises(InputError, match="write the cache first"):
        CachedFeatures(cache_folder(cache_identity(target, [0]), tmp_path), [0])
    (shard,) = folder.glob("shard_*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match="torn"):
        CachedFeatures(folder, [-1])


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.mark), "w")


def test_a_pickle_in_place_of_a_shard_does_not_run(cached: tuple[Target, list[Example], Path], tmp_path: Path):
    """Guards SE-01."""
    _, examples, folder = cached
    (shard,) = folder.glob("shard_*.safetensors")
    trap = pickle.dumps(Trap(tmp_path / "mark"))
    shard.write_bytes(trap + bytes(shard.stat().st_size - len(trap)))
    with pytest.raises(InputError, match="cannot be read"):
        CachedFeatures(folder, [-1]).batch(examples)
    assert not (tmp_path / "mark").exists()
