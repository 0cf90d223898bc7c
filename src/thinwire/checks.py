"""Checks of single settings: the value comes back, or an error that says what was got and expected."""

from __future__ import annotations

from torch.amp.grad_scaler import GradScaler

from thinwire.errors import ConfigError, ThinwireError

__all__ = ["checked_scaler", "number", "true_or_false", "whole_number"]


def whole_number(name: str, value: object, *, least: int, error: type[ThinwireError] = ConfigError) -> int:
    """`value`, if it is a whole number of at least `least` (True and False are none)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise error(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def number(name: str, value: object, *, least: float) -> float:
    """`value`, if it is a number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ConfigError(f"{name} must be a number of at least {least}, got {value!r}")
    return value


def true_or_false(name: str, value: object) -> bool:
    """`value`, if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return value


def checked_scaler(grad_scaler: object) -> GradScaler | None:
    """The scaler.

    Raises:
        ConfigError: It is none.
    """
    if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
        raise ConfigError(f"grad_scaler must be a torch.amp.GradScaler or None, got {grad_scaler!r}")
    return grad_scaler
