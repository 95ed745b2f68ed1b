"""Names of test cases."""

from __future__ import annotations

import re


def without_addresses(value: object) -> str:
    """Return a case as text that is the same in every process, whatever objects it holds."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
