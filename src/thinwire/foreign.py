"""Files that may come from anywhere: JSON is parsed within bounds, and its values are checked one by one."""

from __future__ import annotations

import json
import reprlib
from typing import Any

__all__ = [
    "LARGEST_NUMBER",
    "LARGEST_WHOLE_NUMBER",
    "LONGEST_SECONDS",
    "MOST_PROCESSES",
    "field_of",
    "list_of",
    "number_of",
    "parsed",
    "text_of",
    "whole_number_of",
]

LARGEST_NUMBER = 1e100  # sums and squares of many such are finite, and can be drawn
LARGEST_WHOLE_NUMBER = 1 << 53  # a float holds every one up to here
LONGEST_SECONDS = 1e10  # three centuries
LONGEST_TEXT = 10_000
MOST_PROCESSES = 1 << 20


def parsed(line: str) -> Any:
    """What a text in JSON says. A lone surrogate, which no file can hold, becomes a question mark.

    Raises:
        ValueError: It is no JSON, or is nested too deeply, or has NaN or an infinity.
    """
    try:
        value = json.loads(line, parse_constant=_refuse)
        if "\\ud" in line or "\\uD" in line:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def field_of(plain: object, name: str) -> object:
    """The value of a name in an object.

    Raises:
        ValueError: It is no object, or has no such name.
    """
    if type(plain) is not dict or name not in plain:
        raise ValueError(f"there is no {name}")
    return plain[name]


def list_of(name: str, value: object, least: int = 0, most: int = LARGEST_WHOLE_NUMBER) -> list[object]:
    """`value`, if it is a list of so many.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not list or not least <= len(value) <= most:
        got = f"one of {len(value)}" if type(value) is list else reprlib.repr(value)
        raise ValueError(f"{name} must be a list of {least} to {most}, got {got}")
    return value


def number_of(
    name: str, value: object, least: float = -LARGEST_NUMBER, most: float = LARGEST_NUMBER
) -> float:
    """`value`, if it is a finite number within the bounds.

    Raises:
        ValueError: It is not.
    """
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {reprlib.repr(value)}")
    return value  # type: ignore[return-value]


def whole_number_of(name: str, value: object, least: int = 0, most: int = LARGEST_WHOLE_NUMBER) -> int:
    """`value`, if it is a whole number within the bounds.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {reprlib.repr(value)}")
    return value


def text_of(name: str, value: object) -> str:
    """`value`, if it is text that is not too long.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not str or len(value) > LONGEST_TEXT:
        raise ValueError(
            f"{name} must be text of at most {LONGEST_TEXT} characters, got {reprlib.repr(value)}"
        )
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}, expected finite numbers")
