"""Static trees that were published with heads, as paths of ranks."""

from __future__ import annotations

from specdec_lab.config import suggest
from specdec_lab.errors import InputError

PUBLISHED = {
    # 63 nodes, 4 deep, for Medusa's Vicuna-7B heads (arXiv 2401.10774)
    "medusa_7b_63": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 "
        "70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 "
        "200 0000 0001 "
    ),
    # 25 nodes, 5 deep, of EAGLE-1 (arXiv 2401.15077)
    "eagle_25": ("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001 "),
}
"""Each word is a path, each digit a rank: ``02`` is the third choice after the first choice."""


def published_tree(name: str) -> list[list[int]]:
    """Return a published tree as paths of ranks.

    Raises:
        InputError: there is none of that name.
    """
    if name not in PUBLISHED:
        raise InputError("tree", name, f"there is no published tree of that name{suggest(name, PUBLISHED)}")
    return [[int(rank) for rank in path] for path in PUBLISHED[name].split()]
