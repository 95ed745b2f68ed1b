"""A summary entry as flat columns: the names that ``summary.csv`` and trackers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def scalars(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the scalar fields of an entry under dotted names, ``None`` where undefined.

    Parameters, categories and lists are left out; the ends of an interval become ``ci95_low`` and ``ci95_high``.
    """
    for name, value in entry.items():
        if name in ("config", "by_category"):
            continue
        if name == "ci95":
            low, high = value or (None, None)
            yield from ((f"{prefix}ci95_low", low), (f"{prefix}ci95_high", high))
        elif isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}.")
        elif not isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", value
