"""Files that may come from anywhere: JSON is parsed within bounds, and its values are checked one by one."""

from __future__ import annotations

import json
import reprlib
from typing import Any

MAX_NUMBER = 1e100  # sums and squares of many such are finite, and can be drawn
MAX_WHOLE_NUMBER = 1 << 53  # a float holds every one up to here
MAX_SECONDS = 1e10  # three centuries
MAX_TEXT_LENGTH = 10_000
MAX_PROCESSES = 1 << 20


def parsed(line: str) -> Any:
    """Return what a text in JSON says. A lone surrogate, which no file can hold, becomes a question mark.

    Raises:
        ValueError: It is no JSON, or is nested too deeply, or has NaN or an infinity.
    """
    try:
        value = json.loads(line, parse_constant=_refuse)
        # Only where there may be one: to write all of it again and read that takes as long as the first time.
        if "\\ud" in line or "\\uD" in line:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def field_of(plain: object, name: str) -> object:
    """Return the value of a name in an object.

    Args:
        plain: As read.
        name: Of the field.

    Raises:
        ValueError: It is no object, or has no such name.
    """
    if type(plain) is not dict or name not in plain:
        raise ValueError(f"there is no {name}")
    return plain[name]


def list_of(name: str, value: object, minimum: int = 0, maximum: int = MAX_WHOLE_NUMBER) -> list[object]:
    """Return `value`, if it is a list of so many.

    Args:
        name: What it is called, for the error.
        value: As read.
        minimum: Length, at least.
        maximum: Length, at most.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not list or not minimum <= len(value) <= maximum:
        got = f"one of {len(value)}" if type(value) is list else reprlib.repr(value)
        raise ValueError(f"{name} must be a list of {minimum} to {maximum}, got {got}")
    return value


def number_of(name: str, value: object, minimum: float = -MAX_NUMBER, maximum: float = MAX_NUMBER) -> float:
    """Return `value`, if it is a finite number within the bounds.

    Args:
        name: What it is called, for the error.
        value: As read.
        minimum: At least.
        maximum: At most.

    Raises:
        ValueError: It is not.
    """
    # By type, here and below: to `isinstance` True is a whole number.
    if type(value) not in (int, float) or not minimum <= value <= maximum:  # type: ignore[operator]
        raise ValueError(
            f"{name} must be a number from {minimum:g} to {maximum:g}, got {reprlib.repr(value)}"
        )
    return value  # type: ignore[return-value]


def whole_number_of(name: str, value: object, minimum: int = 0, maximum: int = MAX_WHOLE_NUMBER) -> int:
    """Return `value`, if it is a whole number within the bounds.

    Args:
        name: What it is called, for the error.
        value: As read.
        minimum: At least.
        maximum: At most.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(
            f"{name} must be a whole number from {minimum} to {maximum}, got {reprlib.repr(value)}"
        )
    return value


def text_of(name: str, value: object) -> str:
    """Return `value`, if it is text that is not too long.

    Args:
        name: What it is called, for the error.
        value: As read.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not str or len(value) > MAX_TEXT_LENGTH:
        raise ValueError(
            f"{name} must be text of at most {MAX_TEXT_LENGTH} characters, got {reprlib.repr(value)}"
        )
    return value


def true_or_false_of(name: str, value: object) -> bool:
    """Return `value`, if it is true or false.

    Args:
        name: What it is called, for the error.
        value: As read.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false, got {reprlib.repr(value)}")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}, expected finite numbers")
