"""Measurements behind ``docs/performance.md`` and ``docs/decisions/``: each is a part of ``scripts/measure.py``."""
