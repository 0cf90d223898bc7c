"""The records of a watch: what each kind has, and whether a line is one."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from thinwire.json_records import Amount, Count, Processes, Seconds, Whole, parsed, read_record, value_of

# Of files; a reader refuses all others.
FORMAT = 4
# Also what a reader holds in memory at once of a file that may come from anywhere.
MAX_LINE_BYTES = 1 << 24

# Of `Stats`, as differences.
COUNTED = (
    "messages",
    "message_bytes",
    "inside_bytes",
    "gradient_bytes",
    "arithmetic_seconds",
    "waiting_seconds",
    "exposed_seconds",
)

# What the user may not call a number that is logged.
RESERVED = ("kind", "step", "seconds")

Record = dict[str, Any]
Numbers = dict[str, float | None]


class RouteRecord(TypedDict):
    """How a parameter travels; see `thinwire.plan.Route`."""

    label: str
    detail: str
    is_compressed: bool
    gradient_bytes: Whole
    message_bytes: Whole


class RunRecord(TypedDict):
    """The start of training: what trains, and how many."""

    kind: Literal["run"]
    step: Whole
    format: Count
    name: str | None
    thinwire: str
    unix_seconds: float
    processes: Processes
    machines: Processes
    process_rank: Whole


class PlanRecord(TypedDict):
    """How gradients travel from here on."""

    kind: Literal["plan"]
    step: Whole
    algorithm: str
    routes: list[RouteRecord]


class StepRecord(TypedDict):
    """What steps did together."""

    kind: Literal["step"]
    step: Whole
    seconds: Seconds
    step_seconds: Seconds
    steps: Count
    nonfinite_steps: Whole | None
    messages: Amount
    message_bytes: Amount
    inside_bytes: Amount
    gradient_bytes: Amount
    arithmetic_seconds: Seconds
    waiting_seconds: Seconds
    exposed_seconds: Seconds
    compression_ratio: Amount


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
    """Return a line's record, with the fields that its kind has and no others."""
    read = parsed(line)
    kind = read.get("kind") if type(read) is dict else None
    if type(kind) is not str or kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}")
    record: Record = read_record(KINDS[kind], read)
    if kind == "log":
        record |= value_of(Numbers, kind, {key: read[key] for key in read if key not in RESERVED})
    return record


def record_of(line: str) -> Record | None:
    """Return a line's record; None if it is not one."""
    try:
        return checked_record(line)
    except ValueError:
        return None
