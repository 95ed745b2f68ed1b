"""Trainable draft heads and the formats that they are stored in."""
