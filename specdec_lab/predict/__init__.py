"""Projected and predicted speed: what measured acceptance is worth on other machines and other models."""
