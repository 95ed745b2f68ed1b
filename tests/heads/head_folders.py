"""Random heads for a small target, their forward, and folders as others write them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, build
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

VOCAB, HIDDEN, LAYERS = 128, 32, 8
FACTS: dict[str, Any] = {"target": {"model": "random-llama-8x32"}, "accuracy_by_rank": [[0.5, 0.1], [0.25, 0.05]]}


@cache
def deep_target() -> Target:
    """Return a Llama of 8 layers, so that the published choice of hidden states exists: 2, 4 and 5."""
    values = {**CONFIGS["llama"].to_dict(), "num_hidden_layers": LAYERS}
    return Target(build(LlamaConfig(**values)), name="deep")


def reduced() -> DraftVocabulary:
    """Return a third of the target's ids; neither its first id nor its offsets are zero."""
    return DraftVocabulary(torch.arange(5, VOCAB, 3), VOCAB)


def layer(**changes: Any) -> LlamaConfig:
    """Return the configuration of a head's layer, with rotary positions that are not the default."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
    }
    return LlamaConfig(**values | changes)


def randomised(head: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a number of its own, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.3, 0.3, generator=generator)
    return head


HEADS: dict[str, Callable[[], nn.Module]] = {
    "medusa tied": lambda: MedusaHeads(HIDDEN, DraftVocabulary.whole(VOCAB), heads=3, blocks=1),
    "medusa tied reduced": lambda: MedusaHeads(HIDDEN, reduced(), heads=2, blocks=2),
    "medusa own": lambda: MedusaHeads(HIDDEN, DraftVocabulary.whole(VOCAB), heads=5, blocks=1, own_output=True),
    "medusa own reduced": lambda: MedusaHeads(HIDDEN, reduced(), heads=2, blocks=2, own_output=True),
    "medusa that sees the root": lambda: MedusaHeads(HIDDEN, reduced(), heads=2, blocks=1, sees_root=True),
    "eagle": lambda: EagleHead(layer(), DraftVocabulary.whole(VOCAB)),
    "eagle biased reduced": lambda: EagleHead(layer(attention_bias=True), reduced(), fc_bias=True),
    "eagle biased whole": lambda: EagleHead(layer(attention_bias=True), DraftVocabulary.whole(VOCAB), fc_bias=True),
    "eagle of two layers": lambda: EagleHead(layer(num_hidden_layers=2), DraftVocabulary.whole(VOCAB)),
    "eagle3": lambda: Eagle3Head(layer(), DraftVocabulary.whole(VOCAB), (2, 4, 5)),
    "eagle3 reduced": lambda: Eagle3Head(layer(head_dim=16), reduced(), (2, 4, 5)),
    "eagle3 other states": lambda: Eagle3Head(layer(), reduced(), (0, 3, 7)),
    "eagle3 biased": lambda: Eagle3Head(layer(attention_bias=True), reduced(), (1, 3, -1)),
    "eagle3 llama3 positions": lambda: Eagle3Head(layer(**LLAMA3), reduced(), (2, 4, 5)),
}

LLAMA3: dict[str, Any] = {
    "rope_theta": 500000.0,
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def kind_of(head: nn.Module) -> Any:
    """Return the name of a head's strategy."""
    return {MedusaHeads: "medusa", EagleHead: "eagle", Eagle3Head: "eagle3"}[type(head)]


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@torch.inference_mode()
def logits(head: nn.Module, target: Target, tokens: int = 7) -> Tensor:
    """Return what a head says to fixed random states and tokens, two steps deep for a recurrent one."""
    weight = next(head.parameters())
    generator = torch.Generator().manual_seed(1)
    if isinstance(head, MedusaHeads):
        states = torch.randn(2, tokens, HIDDEN, generator=generator).to(weight)
        parts = SharedParts(target, head.vocabulary)
        roots = parts.embed(torch.randint(0, VOCAB, (2, tokens), generator=generator))
        begun = states if head.root is None else head.begin(states, roots)
        return head.logits(begun, parts.output.to(weight))
    assert isinstance(head, EagleHead | Eagle3Head)
    states = {at: torch.randn(2, tokens, HIDDEN, generator=generator).to(weight) for at in head.feature_layers}
    ids = torch.randint(0, VOCAB, (2, tokens), generator=generator)
    parts = SharedParts(target, head.vocabulary)
    head.rotation.reserve(tokens, weight)
    rotation = head.rotation.at(torch.arange(tokens).expand(2, -1))
    state = head.begin(states)
    for _ in range(2):
        state = head.step(state, parts.embed(ids).to(weight), rotation, attend)
    return head.logits(state, parts.output.to(weight))


# --- folders ----------------------------------------------------------------------------------------------------------

Tensors = dict[str, Tensor]


def put(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], weights: str) -> Path:
    """Write a folder by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shards(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], pieces: int = 3) -> Path:
    """Write a folder whose weights are spread over several files with an index."""
    names = sorted(tensors)
    place = {name: f"model-{at % pieces + 1:05}-of-{pieces:05}.safetensors" for at, name in enumerate(names)}
    for file in set(place.values()):
        put(folder, {name: tensors[name] for name in names if place[name] == file}, config, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def edit(folder: Path, drop: str | None = None, add: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
    """Take a tensor out of a written folder, put others in, or change fields of its configuration (None removes)."""
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    if drop is not None:
        del tensors[drop]
    save_file({**tensors, **(add or {})}, weights)
    values = json.loads((folder / "config.json").read_text()) | config
    values = {name: value for name, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


class Marker:
    """An object whose pickle creates a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def biting_pickle(path: Path, marker: Path) -> None:
    """Write a pickle that creates ``marker`` when it is opened."""
    path.write_bytes(pickle.dumps({"0.0.linear.weight": Marker(marker)}, protocol=2))
