"""Checks of single settings: the value comes back, or an error that says what was got and expected."""

from __future__ import annotations

from collections.abc import Hashable
from numbers import Integral, Real

from torch.amp.grad_scaler import GradScaler

from thinwire.errors import ConfigError, ThinwireError

__all__ = ["checked_scaler", "number", "true_or_false", "whole_count", "whole_number"]


def whole_number(name: str, value: object, *, least: int, error: type[ThinwireError] = ConfigError) -> int:
    """`value` as an int, if it is one of at least `least`, NumPy's included (True and False are none)."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise error(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def whole_count(name: str, value: object, *, least: int) -> int:
    """Like `whole_number`, for steps and bytes: floats that are whole, such as 1e3, are taken too."""
    if isinstance(value, Real) and not isinstance(value, Integral) and float(value).is_integer():
        value = int(float(value))
    return whole_number(name, value, least=least)


def number(name: str, value: object, *, least: float) -> float:
    """`value` as an int or a float, if it is a number of at least `least`, NumPy's included."""
    if isinstance(value, Real) and not isinstance(value, bool):
        plain = int(value) if isinstance(value, Integral) else float(value)
        if plain >= least:
            return plain
    raise ConfigError(f"{name} must be a number of at least {least}, got {value!r}")


def true_or_false(name: str, value: object) -> bool:
    """`value` as a bool, if it equals True or False: NumPy's own, 1 and 0 as well."""
    if not isinstance(value, Hashable) or value not in {True, False}:
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def checked_scaler(grad_scaler: object) -> GradScaler | None:
    """The scaler.

    Raises:
        ConfigError: It is none.
    """
    if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
        raise ConfigError(f"grad_scaler must be a torch.amp.GradScaler or None, got {grad_scaler!r}")
    return grad_scaler
