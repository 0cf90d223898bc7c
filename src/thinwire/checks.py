"""Checks of single settings: return the value, or raise an error that says what was got and expected."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterable
from numbers import Integral, Real

from thinwire.errors import ConfigError, ThinwireError

PROCESSES_PER_CORE = 8
MAX_SHOWN_LENGTH = 100


def shown(value: object) -> str:
    """Return how an error shows a value: its repr, or its type if the repr is long or has several lines."""
    text = repr(value)
    is_short = len(text) <= MAX_SHOWN_LENGTH and "\n" not in text
    return text if is_short else f"an object of type {type(value).__name__}"


def listed(values: Iterable[object], most: int = 8) -> str:
    """Return at most so many values as text, and how many more there are."""
    texts = list(map(str, values))
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def whole_number(name: str, value: object, *, minimum: int, error: type[ThinwireError] = ConfigError) -> int:
    """Return a value as an int, if it is an integer of at least `minimum`.

    NumPy's integers are accepted; True and False are not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise error(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return int(value)


def whole_count(name: str, value: object, *, minimum: int) -> int:
    """Return a count of steps or bytes as an int: like `whole_number`, but 1e3 is accepted, too."""
    if isinstance(value, Real) and not isinstance(value, Integral) and float(value).is_integer():
        value = int(float(value))
    return whole_number(name, value, minimum=minimum)


def processes_here(name: str, value: object, *, minimum: int) -> int:
    """Return how many processes to start: like `whole_number`, but at most what the machine can run."""
    count, most = whole_number(name, value, minimum=minimum), PROCESSES_PER_CORE * cores()
    if count > most:
        raise ConfigError(
            f"{name} must be at most {most} here, {PROCESSES_PER_CORE} for each core, got {count}; "
            "start fewer"
        )
    return count


def cores() -> int:
    """Return how many of this machine's cores this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def number(name: str, value: object, *, minimum: float) -> float:
    """Return a value as an int or a float, if it is a number of at least `minimum`, NumPy's included."""
    if isinstance(value, Real) and not isinstance(value, bool):
        plain = int(value) if isinstance(value, Integral) else float(value)
        if plain >= minimum:
            return plain
    raise ConfigError(f"{name} must be a number of at least {minimum}, got {value!r}")


def positive(name: str, value: object) -> float:
    """Return a value as a float, if it is a finite number above 0."""
    if isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf:
        return float(value)
    raise ConfigError(f"{name} must be above 0 and finite, got {value!r}")


def true_or_false(name: str, value: object) -> bool:
    """Return a value as a bool, if it equals True or False, including NumPy's bools, 1 and 0."""
    if not isinstance(value, Hashable) or value not in {True, False}:
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return bool(value)
