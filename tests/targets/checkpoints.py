"""Checkpoints that a test can break: folders as save_pretrained writes them, a small GGUF file, pickles that bite."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, LlamaFileType, TokenType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec_lab.targets.tiny import CHAT_TEMPLATE, MERGES, SPECIALS, build_model, build_tokenizer

WEIGHTS = "model.safetensors"


def save_tiny(folder: Path) -> PreTrainedModel:
    """Write the tiny Llama with its tokenizer, and return it."""
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def save_random(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Write a random model of any causal LM configuration, with the tiny target's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; ``None`` removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def edit_weights(folder: Path, drop: str | None = None, put: Mapping[str, torch.Tensor] | None = None) -> None:
    """Take one tensor out of a checkpoint's weights, or put others in."""
    weights = load_file(folder / WEIGHTS)
    if drop is not None:
        del weights[drop]
    save_file({**weights, **(put or {})}, folder / WEIGHTS, metadata={"format": "pt"})


class Marker:
    """An object whose pickle creates a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def write_biting_pickle(path: Path, marker: Path) -> None:
    """Write a pickle that creates ``marker`` when it is opened."""
    path.write_bytes(pickle.dumps({"model.embed_tokens.weight": Marker(marker)}))


def write_gguf(path: Path) -> None:
    """Write a small Llama with a byte-level tokenizer as a GGUF file."""
    alphabet = [token for token, _ in sorted(build_tokenizer().get_vocab().items(), key=lambda entry: entry[1])]
    hidden, inner, heads, kv_heads = 64, 128, 4, 2
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(alphabet))
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(alphabet)
    writer.add_token_types([TokenType.CONTROL if token in SPECIALS else TokenType.NORMAL for token in alphabet])
    writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in MERGES.split()])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(alphabet), hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden * kv_heads // heads, hidden),
        "blk.0.attn_v": (hidden * kv_heads // heads, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.1, shape).astype(np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
