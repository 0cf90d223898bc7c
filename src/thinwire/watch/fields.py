"""The fields of a record, and whether a line is one."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["COUNTED", "FORMAT", "RESERVED", "Record", "record_of"]

FORMAT = 1

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

NUMBER = (int, float)
# By kind, beside "kind" and "step": their types.
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "run": {
        "format": (int,),
        "name": (str, type(None)),
        "thinwire": (str,),
        "unix_seconds": NUMBER,
        "processes": (int,),
        "process_rank": (int,),
    },
    "plan": {"algorithm": (str,), "routes": (list,)},
    "step": {
        "seconds": NUMBER,
        "step_seconds": NUMBER,
        "steps": (int,),
        "skipped_steps": (int, type(None)),
        **dict.fromkeys(COUNTED, NUMBER),
    },
    "norms": {"relative_error": (dict,), "error_norm": (dict,)},
    "log": {"seconds": NUMBER},
}
ROUTE = {
    "label": (str,),
    "matrix_shape": (list, type(None)),
    "matrix_rank": (int, type(None)),
    "gradient_bytes": (int,),
    "message_bytes": (int,),
}
# What the user may not call a number that is logged.
RESERVED = ("kind", "step", "seconds")


def record_of(line: str) -> Record | None:
    """A line's record; None if it is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    kind = record.get("kind")
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    return record if fields is not None and _has(record, fields) and _INSIDE[kind](record) else None


def _has(record: Record, fields: dict[str, tuple[type, ...]]) -> bool:
    return all(name in record and type(record[name]) in types for name, types in fields.items())


def _are_numbers(values: Record) -> bool:
    return all(type(value) in (*NUMBER, type(None)) for value in values.values())


_INSIDE: dict[object, Any] = {
    "run": lambda record: True,
    "plan": lambda record: all(isinstance(each, dict) and _has(each, ROUTE) for each in record["routes"]),
    "step": lambda record: record["steps"] >= 1,
    "norms": lambda record: _are_numbers(record["relative_error"]) and _are_numbers(record["error_norm"]),
    "log": lambda record: _are_numbers({**record, "kind": None}),
}
