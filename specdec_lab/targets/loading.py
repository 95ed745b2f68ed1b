"""What the target loaders share: cheap checks before anything large is read, then one strict way to load weights.

Nothing here runs code from a checkpoint: weights come from safetensors or GGUF, and ``trust_remote_code`` is handed to
every loader of transformers, for the configuration and the tokenizer too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec_lab.attention import PACKED_ATTENTION
from specdec_lab.errors import InputError, UnsupportedModelError, one_line
from specdec_lab.target import Exact, Target, refuse_unsupported
from specdec_lab.targets.adapter import check_adapter, merged

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

Attention = Literal["auto", "packed", "sdpa", "eager"]

DeviceMap = str | dict[str, int | str]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ATTENTION = {"packed": PACKED_ATTENTION, "sdpa": "sdpa", "eager": "eager"}

PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class ModelSource:
    """Where a model's configuration, tokenizer and weights come from.

    Attributes:
        location: hub id or local folder.
        gguf_file: name of the GGUF file in that folder, if the model is one.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: whether code that lies beside the weights may run.
    """

    location: str
    gguf_file: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that every ``from_pretrained`` gets."""
        optional = {"gguf_file": self.gguf_file, "revision": self.revision}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"trust_remote_code": self.trust_remote_code, **given}

    @property
    def shown(self) -> str:
        """The source as the user would write it."""
        return str(Path(self.location) / self.gguf_file) if self.gguf_file else self.location


# --- settings, checked without reading anything -----------------------------------------------------------------------


def choose_device(device: str) -> torch.device:
    """Return the device that a setting names; ``auto`` is the first CUDA device, or else the CPU.

    Raises:
        InputError: a device that torch does not know or this machine does not have.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = device.partition(":")
    index = int(number) if number.isdecimal() else None
    if kind not in {"cpu", "cuda"} or (number and (index is None or kind != "cuda")):
        raise InputError("target.device", device, "use auto, cpu, cuda or cuda:N")
    if kind == "cuda" and (index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise InputError(
            "target.device", device, f"torch {torch.__version__} sees {found} CUDA devices; use cpu or auto"
        )
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a setting names; ``auto`` is bfloat16 where the device computes in it, or else float32.

    Raises:
        InputError: an unknown name.
    """
    if dtype == "auto":
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise InputError("target.dtype", dtype, f"use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 in hardware, so that it is no slower than float32."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch cannot tell
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return False


def choose_placement(
    device: str, device_map: DeviceMap | None, tp_plan: str | None
) -> tuple[torch.device, dict[str, Any]]:
    """Return the device that decides the dtype, and the placement arguments of ``from_pretrained``.

    Raises:
        InputError: an unknown device, or a device beside ``device_map`` or ``tp_plan``, which choose it themselves.
    """
    placed = {"device_map": device_map, "tp_plan": tp_plan}
    given = {name: value for name, value in placed.items() if value is not None}
    if given and device != "auto":
        raise InputError("target.device", device, f"leave it at auto: {' and '.join(given)} says where the model goes")
    if len(given) > 1:
        raise InputError("target.tp_plan", tp_plan, "give either tp_plan or device_map, not both")
    chosen = choose_device(device)
    if not given and chosen.type != "cpu":
        given["device_map"] = {"": str(chosen)}
    return chosen, given


def check_attention(attention: str) -> None:
    """Refuse an attention function that is unknown or takes no tree mask.

    Raises:
        InputError: with the names to use.
    """
    if "flash" in attention:
        raise InputError("target.attention", attention, "flash attention takes no tree mask; use auto, sdpa or eager")
    if attention != "auto" and attention not in ATTENTION:
        raise InputError("target.attention", attention, f"use auto, {', '.join(ATTENTION)}")


# --- the source, checked without opening weights ----------------------------------------------------------------------


def find_source(model: str, revision: str | None = None, trust_remote_code: bool = False) -> ModelSource:
    """Tell a hub id, a local folder and a GGUF file apart, and refuse what must not or cannot be opened.

    Raises:
        InputError: nothing is there, or a folder has weights as pickles, an adapter alone, or none at all.
    """
    try:
        return _find_source(model, Path(model).expanduser(), revision, trust_remote_code)
    except (OSError, RuntimeError) as error:  # no permission, a name that is too long, the home of nobody
        raise InputError("target.model", model, f"it cannot be opened ({one_line(error)}); check the path") from error


def _find_source(model: str, path: Path, revision: str | None, trust_remote_code: bool) -> ModelSource:
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError("target.model", model, "there is no such GGUF file; check the path")
        _refuse_revision(model, revision)
        return ModelSource(str(path.parent), path.name, None, trust_remote_code)
    if path.is_dir():
        _refuse_revision(model, revision)
        _check_folder(model, path)
        return ModelSource(str(path), None, None, trust_remote_code)
    if path.exists():
        raise InputError("target.model", model, "this is a file; give a hub id, a model folder or a .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise InputError("target.model", model, "there is no such folder; check the path")
    return ModelSource(model, None, revision, trust_remote_code)


def _refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise InputError(
            "target.revision", revision, f"only a hub id has revisions, and {model} is on disk; leave it null"
        )


def _check_folder(model: str, folder: Path) -> None:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" not in names and ggufs:
        raise InputError("target.model", model, f"the folder has no config.json; name the file: {folder / ggufs[0]}")
    if "adapter_config.json" in names:
        raise InputError("target.model", model, "the folder holds an adapter; merge it into its model and save that")
    if "config.json" not in names:
        raise InputError(
            "target.model", model, "the folder has no config.json; give a folder that save_pretrained wrote"
        )
    safe = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if Path(name).suffix in PICKLED_SUFFIXES]
    if not safe and pickles:
        raise InputError("target.model", model, f"{pickles[0]} is a pickle, {_NO_PICKLE}")
    if not safe:
        raise InputError("target.model", model, "the folder has no *.safetensors weights; copy them there")
    for index in (name for name in names if name.endswith(".safetensors.index.json")):
        _check_shards(model, folder / index)


def _check_shards(model: str, index: Path) -> None:
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            "target.model", model, f"{index.name} is damaged ({one_line(error)}); copy it again"
        ) from error
    for shard in shards:
        if not shard.endswith(".safetensors"):
            raise InputError("target.model", model, f"{index.name} names {shard}, which is a pickle, {_NO_PICKLE}")
        if not (index.parent / shard).is_file():
            raise InputError("target.model", model, f"{index.name} names {shard}, which is missing; copy it there")


_NO_PICKLE = "which can run code when it is opened; convert it to safetensors (save_pretrained writes them) first"


def read_config(source: ModelSource) -> Any:
    """Read a model's configuration and refuse what no tree verifier can drive, before any weight is read.

    Raises:
        InputError: there is no configuration, it cannot be read, or it needs code from the checkpoint.
        UnsupportedModelError: by the kind of model: encoder-decoder, state-space, no causal LM.
    """
    try:
        config = AutoConfig.from_pretrained(source.location, **source.arguments())
    except Exception as error:
        raise _load_error(source, "configuration", error) from error
    if config.is_encoder_decoder:
        reason = f"{config.model_type} is an encoder-decoder; use a decoder-only causal LM"
        raise UnsupportedModelError(f"target.model={source.shown!r} is not supported: {reason}")
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and not str(weights).endswith((".safetensors", ".safetensors.index.json")):
        raise InputError("target.model", source.shown, f"its config names {weights}, which is a pickle, {_NO_PICKLE}")
    return config


def build_skeleton(source: ModelSource, config: Any) -> PreTrainedModel:
    """Build the model without memory for its weights, to ask it what it is and needs.

    Raises:
        InputError: the configuration is of no causal LM, or is inconsistent.
        UnsupportedModelError: see ``specdec_lab.target.refuse_unsupported``.
    """
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(
                config, trust_remote_code=source.trust_remote_code, attn_implementation="eager"
            )
    except Exception as error:
        raise _load_error(source, "model", error) from error
    refuse_unsupported(skeleton)
    return skeleton


def choose_attention(attention: str, skeleton: PreTrainedModel) -> str:
    """Return the name of the attention function to load a model with.

    ``auto`` is the packed function wherever it computes the same as the model's own, else stock sdpa, else eager.

    Raises:
        InputError: a function that leaves out part of this model's attention.
    """
    check_attention(attention)
    soft_capped = getattr(skeleton.config.get_text_config(), "attn_logit_softcapping", None) is not None
    fitting = ["eager"]
    if skeleton._supports_sdpa and not soft_capped:
        fitting.insert(0, "sdpa")
        if skeleton._supports_attention_backend:
            fitting.insert(0, "packed")
    if attention == "auto":
        return ATTENTION[fitting[0]]
    if attention not in fitting:
        remedy = f"{skeleton.config.model_type} needs more than this attention computes; use auto or {fitting[0]}"
        raise InputError("target.attention", attention, remedy)
    return ATTENTION[attention]


def _of_tokenizer(path: Path) -> bool:
    return path.name.startswith(("tokenizer", "vocab")) or path.suffix in (".model", ".tiktoken")


def load_tokenizer(source: ModelSource, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load a tokenizer and check that the model has a row for each of its ids.

    Args:
        source: where it lies.
        vocab_size: rows of the model's embedding; more than the tokenizer has is usual padding.

    Raises:
        InputError: there is none, it cannot be read, it needs code from the checkpoint, or it is of another model.
    """
    folder = Path(source.location)
    if folder.is_dir() and source.gguf_file is None and not any(map(_of_tokenizer, folder.iterdir())):
        remedy = "it holds no tokenizer; give the folder of a causal LM, with its tokenizer's files"
        raise InputError("target.model", source.shown, remedy)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments())
    except Exception as error:
        raise _load_error(source, "tokenizer", error) from error
    # Special tokens that were added later, for padding say, often have no row, and are never fed.
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    largest = max((index for index in tokenizer.get_vocab().values() if index not in special), default=0)
    if largest >= vocab_size:
        remedy = (
            f"its tokenizer has ids up to {largest}, the model only {vocab_size} rows; use the model's own tokenizer"
        )
        raise InputError("target.model", source.shown, remedy)
    return tokenizer


# --- weights, and the whole -------------------------------------------------------------------------------------------


def load_weights(
    source: ModelSource, config: Any, *, dtype: torch.dtype, attention: str, placement: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Load a model strictly: every weight comes from the file.

    Args:
        source: where the weights lie; safetensors, or a GGUF file, which is dequantised.
        config: the source's configuration.
        dtype: dtype of the weights and of the computation.
        attention: name of a registered attention function.
        placement: ``device_map`` or ``tp_plan`` of ``from_pretrained``; nothing leaves the model on the CPU.

    Raises:
        InputError: a damaged or incomplete file, a missing backend, too little memory: whatever stops the loading.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
            **source.arguments(),
            **(placement or {}),
        )
    except Exception as error:
        raise _load_error(source, "weights", error) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])  # tied weights are not in it
    if missing:
        remedy = f"the file lacks {len(missing)} weights, such as {missing[0]}; copy the whole checkpoint again"
        raise InputError("target.model", source.shown, remedy)
    return model.eval()


def load_target(
    source: ModelSource,
    *,
    name: str,
    dtype: torch.dtype,
    attention: str,
    placement: Mapping[str, Any],
    exact: Exact,
    adapter: str | None = None,
) -> Target:
    """Load configuration, tokenizer and weights, in this order, so that what can be refused is refused early.

    Args:
        source: where they lie.
        name: how results call the target.
        dtype: dtype of the weights and of the computation.
        attention: a name of ``ATTENTION``, or ``auto``.
        placement: ``device_map`` or ``tp_plan`` of ``from_pretrained``.
        exact: see ``specdec_lab.target.Target``.
        adapter: folder of a LoRA adapter, which is merged into the weights; the target's name tells.

    Raises:
        InputError: a file that cannot be used.
        UnsupportedModelError: a model that no tree of drafts can be verified on.
    """
    check_adapter(adapter)
    config = read_config(source)
    function = choose_attention(attention, build_skeleton(source, config))
    tokenizer = load_tokenizer(source, config.get_text_config().vocab_size)
    model = load_weights(source, config, dtype=dtype, attention=function, placement=placement)
    if adapter is not None:
        model, name = merged(model, adapter), f"{name}+{Path(adapter).name}"
    return Target(model, tokenizer, name=name, exact=exact)


def load_draft(
    target: Target,
    model: str,
    dtype: str,
    device: str,
    attention: str,
    revision: str | None,
    trust_remote_code: bool,
) -> Target:
    """Load a draft model for a target: a second ``Target`` with the same tokenizer.

    Args:
        target: whose tokenizer, dtype and device are the draft's too, unless told otherwise.
        model: hub id, folder or ``.gguf`` file.
        dtype: ``auto`` for the target's, or a name.
        device: ``auto`` for the target's, or a name.
        attention: as for the target.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that comes with the draft.

    Raises:
        InputError: nothing usable is there, or the draft's ids are not those of the target; with bare field names.
        UnsupportedModelError: a model that cannot run on a tree cache.
    """
    try:
        chosen_device = target.device if device == "auto" else choose_device(device)
        chosen_dtype = target.dtype if dtype == "auto" else choose_dtype(dtype, chosen_device)
        check_attention(attention)
        source = find_source(model, revision, trust_remote_code)
        config = read_config(source)
        function = choose_attention(attention, build_skeleton(source, config))
        if target.tokenizer is not None:
            refuse_other_tokenizer(target.tokenizer, load_tokenizer(source, config.get_text_config().vocab_size), model)
        elif config.get_text_config().vocab_size != target.vocab_size:
            rows = config.get_text_config().vocab_size
            remedy = f"it has {rows} ids and the target {target.vocab_size}, and no tokenizer tells what they mean"
            raise InputError("target.model", model, remedy)
        placement = {} if chosen_device.type == "cpu" else {"device_map": str(chosen_device)}
        weights = load_weights(source, config, dtype=chosen_dtype, attention=function, placement=placement)
    except InputError as error:  # the checks name the target's fields
        remedy = error.remedy.replace("target.", "its own ")
        raise InputError(error.field.removeprefix("target."), error.value, remedy) from error
    return Target(weights, target.tokenizer, name=model)


def refuse_other_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, model: str) -> None:
    """Compare two tokenizers by content: every id that the target's text can hold must mean the same to the draft.

    Raises:
        InputError: names the first ids that differ.
    """
    ours, theirs = ({index: token for token, index in one.get_vocab().items()} for one in (target, draft))
    differ = [index for index in sorted(ours) if ours[index] != theirs.get(index)]
    if differ:
        shown = ", ".join(f"{index} is {ours[index]!r} there {theirs.get(index)!r}" for index in differ[:3])
        remedy = f"its tokenizer is not the target's: id {shown}; use a draft of the target's family"
        raise InputError("target.model", model, remedy)


# --- words ------------------------------------------------------------------------------------------------------------


def _load_error(source: ModelSource, part: str, error: Exception) -> InputError:
    if "trust_remote_code" in str(error):
        remedy = f"its {part} is code of its own, which is not run; set target.trust_remote_code=true if you trust it"
    elif not Path(source.location).exists():
        remedy = f"no such folder, and no {part} from the hub ({one_line(error)}); download it or give a folder"
    else:
        remedy = f"its {part} cannot be loaded ({one_line(error)}); mend or replace the checkpoint"
    return InputError("target.model", source.shown, remedy)
