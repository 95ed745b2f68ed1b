"""Tokenizers built in code, whose tokens cut characters and words in awkward places."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
AWKWARD = ("EN", "D ", "ND", " END", "stop", "\n\n", "é", "a\u0301", "😀", "😀E", "日本", "\ufffd", "x\ufffd")
PARTIAL = (b"\xf0\x9f", b"\x98\x80", b"\xe6\x97", b"\xa5\xe6", b"\xa5E", b"N\xf0", b"\xc3", b"\xa9\xa9", b"\xbdx")


def byte_level(
    *, template: str | None = None, writes_bos: bool = False, has_bos: bool = True
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer like GPT-2's: one token per byte, and some that hold several or parts of them.

    Args:
        template: its chat template.
        writes_bos: whether encoding a text with special tokens puts ``<s>`` before it.
        has_bos: whether there is a BOS token at all.
    """
    entries = [bytes([byte]) for byte in range(256)] + [text.encode() for text in AWKWARD] + list(PARTIAL)
    names = {}
    for entry in entries:
        names.setdefault("".join(_BYTE_NAMES[byte] for byte in entry), len(names))
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, template, writes_bos, has_bos)


def byte_fallback(*, template: str | None = None, writes_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: words with a leading space, dropped at the start, and bytes for the rest."""
    words = ["▁", "▁Hello", "▁world", "lo", "▁END", "E", "N", "D", "EN", "▁▁", "!", "日", "\n"]
    names = {name: at for at, name in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + words)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(tokenizer, template, writes_bos, has_bos=True)


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 60 tokens, each one, two or three letters, so that any ids make a readable text."""
    names = [*"abcdefghijklmnopqrstuvwxyz", "ab", "cd", "efg", "hi", "jk", "lm", "nop", "qr", "st", "uv", "wx", "yz"]
    names += [name.upper() for name in names[:18]]
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, None, writes_bos=False, has_bos=True)


def _wrapped(tokenizer: Tokenizer, template: str | None, writes_bos: bool, has_bos: bool) -> PreTrainedTokenizerFast:
    special = {"eos_token": EOS, "pad_token": PAD} | ({"bos_token": BOS} if has_bos else {})
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    if writes_bos:
        start = processors.TemplateProcessing(
            single=f"{BOS} $A {EOS}", special_tokens=[(BOS, wrapped.bos_token_id), (EOS, wrapped.eos_token_id)]
        )
        wrapped.backend_tokenizer.post_processor = start
    wrapped.chat_template = template
    return wrapped


def _byte_names() -> dict[int, str]:
    """Return GPT-2's printable name of each byte: itself where it is printable, else the next free letter from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


_BYTE_NAMES = _byte_names()
