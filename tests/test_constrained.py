"""Owned: constrained-resource tests (being written)."""
