"""What every format asks of a checkpoint: all tensors, none too many, of the right shapes, with numbers in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from specdec_lab.errors import listed
from specdec_lab.heads.decoder import Rotation
from specdec_lab.heads.eagle import EagleHead
from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.formats.files import Checkpoint

Head = TypeVar("Head", bound=nn.Module)

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose numbers mean themselves; 8-bit weights need scales, which nothing here knows of."""

DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names that old checkpoints hold although the configuration says it all; they are passed over."""

_ROWS = 8192


def hollow(build: Callable[[], Head]) -> Head:
    """Build a module without memory for its weights, and without drawing random numbers for them."""
    with torch.device("meta"):
        head = build()
    if isinstance(head, EagleHead | Eagle3Head):
        head.rotation = Rotation(head.config)  # it is no weight, so that no checkpoint brings it
    return head


def fill(
    head: nn.Module, names: Mapping[str, str], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a hollow module its weights.

    Args:
        head: what is filled.
        names: the checkpoint's name of each tensor by the module's name.
        checkpoint: where they are read.
        dtype: of the filled module.
        device: of the filled module.

    Raises:
        InputError: a tensor that is missing, left over, of another shape, quantised or not finite.
    """
    wanted = head.state_dict()
    missing = [name for name in wanted if name not in names]
    if missing:
        raise checkpoint.refusal(f"the weights lack {listed(missing, most=3)}; copy the whole checkpoint again")
    unexpected = [stored for name, stored in names.items() if name not in wanted]
    if unexpected:
        raise checkpoint.refusal(f"the weights hold {listed(unexpected, most=3)}, which this head does not have")
    filled: dict[str, Tensor] = {}
    for name, like in wanted.items():
        stored = names[name]
        if checkpoint.shape(stored) != tuple(like.shape):
            remedy = f"{stored} is {list(checkpoint.shape(stored))} and has to be {list(like.shape)}"
            raise checkpoint.refusal(f"{remedy} for this target and config.json")
        filled[name] = _checked(checkpoint, stored).to(device=device, dtype=dtype)
    head.load_state_dict(filled, assign=True)


def _checked(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.tensor(name)
    if tensor.dtype not in WEIGHT_DTYPES:
        raise checkpoint.refusal(f"{name} is {tensor.dtype}; give a head that is not quantised")
    if not tensor.isfinite().all():
        raise checkpoint.refusal(f"{name} holds NaN or infinity; the head is damaged, or its training failed")
    return tensor


def refuse_variant(checkpoint: Checkpoint, names: Sequence[str], variants: Mapping[str, str]) -> None:
    """Refuse tensors that a known variant has, by the variant's name.

    Args:
        names: of the tensors.
        variants: what a tensor means by a part of its name.

    Raises:
        InputError: names the tensor and the variant.
    """
    for part, meaning in variants.items():
        found = next((name for name in names if part in name), None)
        if found is not None:
            raise checkpoint.refusal(f"{found} means {meaning}, which is not supported; use a head without it")


def refuse_other_values(checkpoint: Checkpoint, name: str, expected: Tensor, remedy: str) -> None:
    """Compare a copy of a part of the target with the target's own.

    Raises:
        InputError: they differ by more than the rounding between their dtypes.
    """
    if checkpoint.shape(name) != tuple(expected.shape):
        shapes = f"{list(checkpoint.shape(name))} and the target's {list(expected.shape)}"
        raise checkpoint.refusal(f"its {name} is {shapes}; {remedy}")
    if not same_values(checkpoint.tensor(name), expected):
        raise checkpoint.refusal(f"its {name} differs from the target's; {remedy}")


def same_values(copy: Tensor, original: Tensor) -> bool:
    """Return whether two matrices of one shape are equal, or as equal as their different dtypes allow."""
    if not (copy.is_floating_point() and original.is_floating_point()):
        return False
    exact = copy.dtype == original.dtype
    relative = 0.0 if exact else max(torch.finfo(copy.dtype).eps, torch.finfo(original.dtype).eps)
    absolute = 0.0 if exact else 2.0**-24  # the smallest step of float16
    pairs = zip(copy.split(_ROWS), original.split(_ROWS), strict=True)
    return all(torch.allclose(a.to(b.device).float(), b.float(), rtol=relative, atol=absolute) for a, b in pairs)
