"""What a trained head states about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_lab.heads.formats.files import BLOCK


def facts_within(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a head states about itself, of its whole ``config.json``.

    It is part of what was given, so that whoever changes it changes that. Heads keep it in this package's block, a
    draft model at the top.
    """
    return config.get(BLOCK, config).setdefault("facts", {})


def training_tokens(facts: Mapping[str, Any]) -> int | None:
    """Return the labels that a head was trained on, each as often as it was seen, those of heads it began at included.

    Args:
        facts: from the head's folder; ``{}`` for a checkpoint from elsewhere.

    Returns:
        ``None`` if the facts do not say.
    """
    trained, origin = facts.get("trained_on"), facts.get("started_from")
    own = trained.get("labels") if isinstance(trained, Mapping) else None
    if not isinstance(own, int | float):
        return None
    before = training_tokens(origin) if isinstance(origin, Mapping) else 0
    return None if before is None else int(own) + before


def training_seeds(facts: Mapping[str, Any]) -> set[int]:
    """Return the seeds that a head was trained with, those of heads it began at included.

    Args:
        facts: as for ``training_tokens``.
    """
    training, origin = facts.get("training"), facts.get("started_from")
    own = training.get("seed") if isinstance(training, Mapping) else None
    before = training_seeds(origin) if isinstance(origin, Mapping) else set()
    return before | ({own} if isinstance(own, int) else set())
