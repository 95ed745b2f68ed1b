"""Matrices in the order in which a CPU's matrix units read them: the same products, read in half the time.

One token's forward reads every weight once, and torch turns a plain bfloat16 matrix into oneDNN's blocked order at
every product. What only drafts is turned once instead (``docs/decisions/0021-packed.md``).
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_AT_ONCE = 8
"""Rows of a product that the order is chosen for; others give the same."""


class PackedLinear(nn.Module):
    """A linear layer without gradients whose matrix is held in blocked order, and in no other.

    Args:
        weight: a matrix that ``can_pack``, ``[out, in]``.
        bias: ``[out]``.
    """

    packed: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_AT_ONCE)
        self.register_buffer("packed", blocked, persistent=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.packed.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out]`` of ``[..., in]``."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def linear(x: Tensor, weight: Tensor | PackedLinear) -> Tensor:
    """Return ``[..., out]`` of ``[..., in]`` through a matrix ``[out, in]``, packed or plain."""
    return weight(x) if isinstance(weight, PackedLinear) else F.linear(x, weight)


def can_pack(weight: Tensor) -> bool:
    """Return whether packing a matrix pays here: bfloat16 on a CPU that oneDNN multiplies it on."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.numel() > 0 and _has_packed()


def packed(weight: Tensor) -> Tensor | PackedLinear:
    """Return a matrix packed, or itself where that does not pay."""
    return PackedLinear(weight) if can_pack(weight) else weight


def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers within a module that will not be trained, where that pays.

    A matrix that another of its modules reads too, as a tied embedding, stays what it is: it would be held twice.
    """
    uses = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and uses[id(child.weight)] == 1 and can_pack(child.weight):
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
