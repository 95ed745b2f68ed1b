"""How fast this machine multiplies matrices: what a training's speed is set against."""

from __future__ import annotations

import time

import torch


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of the best of a few large square matrix products."""
    size, repeats = (8192, 10) if device.type == "cuda" else (1024, 5)
    left = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(1 + repeats):  # the first pays for what a shape needs once; a slow one is never the best
        start = _now(device)
        torch.mm(left, left)
        best = min(best, _now(device) - start)
    return 2 * size**3 / max(best, 1e-9)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
