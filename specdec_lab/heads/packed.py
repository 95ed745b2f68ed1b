"""Matrices in the order in which a CPU's matrix units read them: the same products, read in half the time.

One token's forward reads every weight once, and torch turns a plain bfloat16 matrix into oneDNN's blocked order at
every product. What only drafts is turned once instead (``docs/decisions/0021-packed.md``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_AT_ONCE = 8
"""Rows of a product that the order is chosen for; others give the same."""


class PackedLinear(nn.Module):
    """A linear layer for inference whose matrix is held in blocked order, and in no other.

    Args:
        weight: bfloat16 on a CPU, ``[out, in]``; see ``can_pack``.
        bias: ``[out]``, of the same dtype.

    Attributes:
        blocked: the matrix as oneDNN reads it.
    """

    blocked: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_AT_ONCE)
        self.register_buffer("blocked", blocked, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The plain matrix, ``[out, in]``, made anew for those who look at it: its dtype, its rows, a file."""
        return self.blocked.to_dense()

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.blocked.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out]`` of bfloat16 ``[..., in]``.

        Raises:
            RuntimeError: an input that a gradient is to reach; it would end here without a word.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("a packed layer has no gradient; train the plain one")
        return torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write the plain matrix, so that what is saved is what was loaded."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def linear(x: Tensor, weight: Tensor | PackedLinear) -> Tensor:
    """Return ``[..., out]`` of ``[..., in]`` through a matrix ``[out, in]`` of the same dtype, packed or plain."""
    return weight(x) if isinstance(weight, PackedLinear) else F.linear(x, weight)


def can_pack(weight: Tensor) -> bool:
    """Return whether packing a matrix pays here: bfloat16 on a CPU that oneDNN multiplies it on."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.numel() > 0 and _has_packed()


def packed(weight: Tensor) -> Tensor | PackedLinear:
    """Return a matrix packed, or itself where that does not pay."""
    return PackedLinear(weight) if can_pack(weight) else weight


def pack_linears(module: nn.Module, keep: Iterable[Tensor] = ()) -> None:
    """Replace the linear layers within a module that will not be trained, where that pays.

    A matrix that is read in another place too, as a tied embedding, stays what it is: it would be held twice.

    Args:
        keep: weights of others, whose storage this module may share.
    """
    shared = {weight.data_ptr() for weight in keep}
    places = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if type(child) is nn.Linear
    ]
    uses = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    uses.update(id(child.weight) for _, _, child in places)  # so that a layer at two places counts twice
    names = [(parent, name) for parent, name, child in places if uses[id(child.weight)] == 2]
    places.clear()  # a plain matrix goes as soon as its packed one is there
    for parent, name in names:
        child = parent._modules[name]
        assert isinstance(child, nn.Linear)
        if can_pack(child.weight) and child.weight.data_ptr() not in shared:
            setattr(parent, name, PackedLinear(child.weight, child.bias))


def packed_bytes(module: nn.Module) -> int:
    """Return the bytes of all packed matrices within a module; they are none of its parameters."""
    return sum(part.nbytes for part in module.modules() if isinstance(part, PackedLinear))


@cache
def _has_packed() -> bool:
    """Return whether this torch has the two operators, which it keeps for its compiler, and they do what is thought."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.arange(6, dtype=torch.bfloat16).view(3, 2)
        found = PackedLinear(weight)(torch.eye(2, dtype=torch.bfloat16))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(found, weight.t())
