"""Proof that a strategy keeps the target's output law: by enumeration of every outcome, and by comparing texts."""
