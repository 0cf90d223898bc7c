"""The fields of a record, and whether a line is one."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from thinwire.foreign import (
    LARGEST_WHOLE_NUMBER,
    LONGEST_SECONDS,
    MOST_PROCESSES,
    field_of,
    list_of,
    number_of,
    parsed,
    text_of,
    whole_number_of,
)

__all__ = [
    "COUNTED",
    "FORMAT",
    "LONGEST_LINE_BYTES",
    "RESERVED",
    "Record",
    "checked_record",
    "record_of",
]

FORMAT = 2
LONGEST_LINE_BYTES = 1 << 24

# Of `Stats`, as differences.
COUNTED = (
    "messages",
    "message_bytes",
    "gradient_bytes",
    "arithmetic_seconds",
    "waiting_seconds",
    "exposed_seconds",
)

Record = dict[str, Any]
Check = Callable[[str, Any], Any]


def _or_null(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _numbers_or_null(name: str, values: object) -> dict[str, float | None]:
    """By name; the names are kept once for all records."""
    if type(values) is not dict:
        raise ValueError(f"{name} must be an object")
    check = _or_null(number_of)
    return {
        sys.intern(text_of("a name", key)): check(reprlib.repr(key), value) for key, value in values.items()
    }


def _shape(name: str, value: object) -> list[int]:
    return [whole_number_of(name, each) for each in list_of(name, value, 2, 2)]


def _routes(name: str, values: object) -> list[Record]:
    return [_checked(each, ROUTE) for each in list_of(name, values)]


WHOLE: Check = whole_number_of
AMOUNT: Check = partial(number_of, least=0, most=LARGEST_WHOLE_NUMBER)
SECONDS: Check = partial(number_of, least=0, most=LONGEST_SECONDS)
ROUTE: dict[str, Check] = {
    "label": text_of,
    "matrix_shape": _or_null(_shape),
    "matrix_rank": _or_null(WHOLE),
    "gradient_bytes": WHOLE,
    "message_bytes": WHOLE,
}
# By kind, beside "kind" and "step"; of "log", what the user logged comes to these.
FIELDS: dict[object, dict[str, Check]] = {
    "run": {
        "format": partial(whole_number_of, least=1),
        "name": _or_null(text_of),
        "thinwire": text_of,
        "unix_seconds": number_of,
        "processes": partial(whole_number_of, least=1, most=MOST_PROCESSES),
        "process_rank": WHOLE,
    },
    "plan": {"algorithm": text_of, "routes": _routes},
    "step": {
        "seconds": SECONDS,
        "step_seconds": SECONDS,
        "steps": partial(whole_number_of, least=1),
        "nonfinite_steps": _or_null(WHOLE),
        **{name: SECONDS if name.endswith("_seconds") else AMOUNT for name in COUNTED},
        "compression_ratio": AMOUNT,
    },
    "norms": {"relative_error": _numbers_or_null, "error_norm": _numbers_or_null},
    "log": {"seconds": SECONDS},
}
# Of no file that was written before there were these.
LATER = ("compression_ratio",)
# What the user may not call a number that is logged.
RESERVED = ("kind", "step", "seconds")


def checked_record(line: str) -> Record:
    """A line's record, with the fields that its kind has and no others.

    Raises:
        ValueError: The line is none; says why.
    """
    read = parsed(line)
    kind = field_of(read, "kind")
    fields = FIELDS.get(kind) if type(kind) is str else None
    if fields is None:
        raise ValueError(f"kind must be one of {', '.join(map(str, FIELDS))}")
    if kind == "step" and "skipped_steps" in read:  # what format 1 called it
        read["nonfinite_steps"] = read.pop("skipped_steps")
    record = {"kind": kind, **_checked(read, {"step": WHOLE, **fields})}
    if kind == "log":
        record |= _numbers_or_null("log", {key: read[key] for key in read if key not in RESERVED})
    return record


def record_of(line: str) -> Record | None:
    """A line's record; None if it is not one."""
    try:
        return checked_record(line)
    except ValueError:
        return None


def _checked(read: Any, fields: Mapping[str, Check]) -> Record:
    return {
        name: check(name, field_of(read, name))
        for name, check in fields.items()
        if name not in LATER or name in read
    }
