"""Moved."""

from commands import become, stand_ins

__all__ = ["become", "stand_ins"]
