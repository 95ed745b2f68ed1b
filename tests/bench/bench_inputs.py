"""Prompts of the tests and the file that they come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS = (
    {"question_id": 1, "category": "talk", "turns": ["the one and the other and the one and the", "and then the one"]},
    {"question_id": 2, "category": "sums", "turns": ["1 2 3 1 2 3 1 2 3"]},
    {"question_id": "x3", "category": "talk", "turns": ["he said that she said that he said", "who said that", "so?"]},
    {"question_id": 4, "category": "sums", "turns": ["7 * 7"]},
    {"question_id": 5, "category": "talk", "turns": ["a"]},
)  # fmt: skip


def write_prompts(path: Path, prompts: Sequence[dict[str, Any]]) -> Path:
    """Write a prompts file."""
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    return path
