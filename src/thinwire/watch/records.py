"""The records of a watch: what each kind has, and whether a line is one."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Annotated, Any, Literal, TypedDict, cast, get_type_hints

from thinwire.foreign import (
    MAX_PROCESSES,
    MAX_SECONDS,
    MAX_WHOLE_NUMBER,
    field_of,
    list_of,
    number_of,
    parsed,
    text_of,
    true_or_false_of,
    whole_number_of,
)
from thinwire.watch.old_formats import brought_up_to_date

# Of files. A reader takes all earlier ones (`old_formats`) and refuses later ones.
FORMAT = 3
# Also what a reader holds in memory at once of a file that may come from anywhere.
MAX_LINE_BYTES = 1 << 24

# Of `Stats`, as differences.
COUNTED = (
    "messages",
    "message_bytes",
    "gradient_bytes",
    "arithmetic_seconds",
    "waiting_seconds",
    "exposed_seconds",
)

# What the user may not call a number that is logged.
RESERVED = ("kind", "step", "seconds")

Record = dict[str, Any]
Check = Callable[[str, Any], Any]


def _or_null(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _numbers_or_null(name: str, values: object) -> dict[str, float | None]:
    """Return numbers by name.

    Args:
        name: Of the field, for the error.
        values: As read.

    Raises:
        ValueError: They are not that.
    """
    if type(values) is not dict:
        raise ValueError(f"{name} must be an object")
    check = _or_null(number_of)
    return {
        # Each record has the same names: interned, they are kept once for all records.
        sys.intern(text_of("a name", key)): check(reprlib.repr(key), value)
        for key, value in values.items()
    }


def _routes(name: str, values: object) -> list[Record]:
    """Return the routes of a plan.

    Args:
        name: Of the field, for the error.
        values: As read.
    """
    return [_checked(each, RouteRecord) for each in list_of(name, values)]


# A field's type, and the check of what a file has there.
Text = Annotated[str, text_of]
TextOrNull = Annotated["str | None", _or_null(text_of)]
Flag = Annotated[bool, true_or_false_of]
Whole = Annotated[int, whole_number_of]
WholeOrNull = Annotated["int | None", _or_null(whole_number_of)]
Count = Annotated[int, partial(whole_number_of, minimum=1)]
Processes = Annotated[int, partial(whole_number_of, minimum=1, maximum=MAX_PROCESSES)]
Number = Annotated[float, number_of]
Amount = Annotated[float, partial(number_of, minimum=0, maximum=MAX_WHOLE_NUMBER)]
Seconds = Annotated[float, partial(number_of, minimum=0, maximum=MAX_SECONDS)]
Numbers = Annotated["dict[str, float | None]", _numbers_or_null]


class RouteRecord(TypedDict):
    """How a parameter travels; see `thinwire.plan.Route`."""

    label: Text
    detail: Text
    is_compressed: Flag
    gradient_bytes: Whole
    message_bytes: Whole


class RunRecord(TypedDict):
    """The start of training: what trains, and how many."""

    kind: Literal["run"]
    step: Whole
    format: Count
    name: TextOrNull
    thinwire: Text
    unix_seconds: Number
    processes: Processes
    process_rank: Whole


class PlanRecord(TypedDict):
    """How gradients travel from here on."""

    kind: Literal["plan"]
    step: Whole
    algorithm: Text
    routes: Annotated[list[RouteRecord], _routes]


class _OfLaterVersions(TypedDict, total=False):
    """What files that were written before do not have."""

    compression_ratio: Amount


class StepRecord(_OfLaterVersions):
    """What steps did together."""

    kind: Literal["step"]
    step: Whole
    seconds: Seconds
    step_seconds: Seconds
    steps: Count
    nonfinite_steps: WholeOrNull
    messages: Amount
    message_bytes: Amount
    gradient_bytes: Amount
    arithmetic_seconds: Seconds
    waiting_seconds: Seconds
    exposed_seconds: Seconds


class NormsRecord(TypedDict):
    """Errors and their norms, by route."""

    kind: Literal["norms"]
    step: Whole
    relative_error: Numbers
    error_norm: Numbers


class LogRecord(TypedDict):
    """Numbers that the user logged; those come beside, under their names."""

    kind: Literal["log"]
    step: Whole
    seconds: Seconds


KINDS = {"run": RunRecord, "plan": PlanRecord, "step": StepRecord, "norms": NormsRecord, "log": LogRecord}


def checked_record(line: str) -> Record:
    """Return a line's record, with the fields that its kind has and no others.

    Raises:
        ValueError: The line is none; says why.
    """
    read = parsed(line)
    kind = field_of(read, "kind")
    if type(kind) is not str or kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}")
    # Before the checks, which know today's words only.
    brought_up_to_date(read)
    record = {"kind": kind, **_checked(read, KINDS[kind])}
    if kind == "log":
        record |= _numbers_or_null("log", {key: read[key] for key in read if key not in RESERVED})
    return record


def record_of(line: str) -> Record | None:
    """Return a line's record; None if it is not one."""
    try:
        return checked_record(line)
    except ValueError:
        return None


def _checked(read: Any, kind: type) -> Record:
    """Return the fields that a kind of record has, each checked, and no others.

    Args:
        read: The record as read.
        kind: Its type here.
    """
    # What later versions have added is absent from older files, but checked where it is there.
    optional = cast("frozenset[str]", kind.__optional_keys__)  # type: ignore[attr-defined]
    return {
        name: check(name, field_of(read, name))
        for name, check in _checks(kind).items()
        if name not in optional or name in read
    }


@cache
def _checks(kind: type) -> Mapping[str, Check]:
    """Return the checks of a record's fields, as its type has them."""
    # Cached: evaluating the annotations takes far longer than checking a line. `kind`, a Literal, has no
    # check: by it the type was chosen.
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
