"""What training data and heads state about where they come from: hashes of contents, never of live objects."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of a tokenizer's vocabulary and special tokens, in hex.

    Two tokenizers with one fingerprint give each id the same meaning. Calls that pad or cut texts change a tokenizer's
    state, and not this.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    special = sorted(tokenizer.all_special_ids)
    roles = {name: str(getattr(tokenizer, name)) for name in ("bos_token", "eos_token", "pad_token")}
    return _sha256_of_json({"vocabulary": vocabulary, "special": special, "roles": roles})


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of a tokenizer's chat template, in hex; a tokenizer without one has a hash too."""
    return _sha256_of_json(tokenizer.chat_template)


def bytes_sha256(data: bytes) -> str:
    """Return the sha256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_json(value: object) -> str:
    return bytes_sha256(json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode())
