"""The records of a watch: what each kind has, and how a file of them is read."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypedDict, cast, get_args, get_origin, get_type_hints

from thinwire.errors import ConfigError

FORMAT = 4  # of files; a reader refuses all others
# A foreign file may be one line of any length.
MAX_LINE_BYTES = 1 << 24
# A number that is logged may not have one of these names.
RESERVED = ("kind", "step", "seconds")

Record = dict[str, Any]
Numbers = dict[str, float | None]


class RouteRecord(TypedDict):
    """How a parameter travels; see `thinwire.plan.Route`."""

    label: str
    detail: str
    is_compressed: bool
    gradient_bytes: int
    message_bytes: int


class RunRecord(TypedDict):
    """The start of training: what trains, and how many."""

    kind: str
    step: int
    format: int
    name: str | None
    thinwire: str
    unix_seconds: float
    processes: int
    machines: int
    process_rank: int


class PlanRecord(TypedDict):
    """How gradients travel from here on."""

    kind: str
    step: int
    algorithm: str
    routes: list[RouteRecord]


class Counted(TypedDict):
    """What `Stats` counts, as differences."""

    messages: float
    message_bytes: float
    inside_bytes: float
    gradient_bytes: float
    arithmetic_seconds: float
    waiting_seconds: float
    exposed_seconds: float


class StepRecord(Counted):
    """What steps did together."""

    kind: str
    step: int
    seconds: float
    step_seconds: float
    steps: int
    nonfinite_steps: int | None
    compression_ratio: float


class NormsRecord(TypedDict):
    """Errors and their norms, by route."""

    kind: str
    step: int
    relative_error: Numbers
    error_norm: Numbers


class LogRecord(TypedDict):
    """Numbers that the user logged; those come beside, under their names."""

    kind: str
    step: int
    seconds: float


def _types_of(record: type) -> dict[str, tuple[type, ...]]:
    """Return of what types each field of a record may be."""

    def types(hint: Any) -> tuple[type, ...]:
        if hint is float:
            return int, float
        return get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)

    return {name: types(hint) for name, hint in get_type_hints(record).items()}


KINDS = {
    "run": _types_of(RunRecord),
    "plan": _types_of(PlanRecord),
    "step": _types_of(StepRecord),
    "norms": _types_of(NormsRecord),
    "log": _types_of(LogRecord),
}
ROUTE = _types_of(RouteRecord)


class Point(NamedTuple):
    """A number that was logged: after which step, and seconds of training."""

    step: int
    seconds: float
    value: float


@dataclass
class Run:
    """A run's records, by kind and in order. Steps that were repeated after a resume are here once.

    Attributes:
        path: The file.
        name: As given to `Watch`, else the file's.
        plans: One for each time that the plan changed, the first included.
        steps: One for each record of steps.
        norms: Errors and their norms, now and then.
        logs: What the user logged: "step", "seconds", and numbers under the names that they were given.
        processes: How many trained together.
        machines: How many of them, or of machines of several, averaged with each other.
        resumed: How often training was resumed.
        damage: What could not be read; None if all could.
    """

    path: Path
    name: str
    plans: list[PlanRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    norms: list[NormsRecord] = field(default_factory=list)
    logs: list[Record] = field(default_factory=list)
    processes: int = 1
    machines: int = 1
    resumed: int = 0
    damage: str | None = None

    def points(self, name: str) -> list[Point]:
        """Return what was logged under a name."""
        logs = (each for each in self.logs if each.get(name) is not None)
        return [Point(each["step"], each["seconds"], each[name]) for each in logs]

    @property
    def logged(self) -> list[str]:
        """The names that something was logged under."""
        named = dict.fromkeys(name for each in self.logs for name in each)
        return [name for name in named if name not in RESERVED]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the file of a `Watch`, up to the first line that is damaged.

    Raises:
        ConfigError: It can't be read, or its first line is not a `Watch`'s, or it has a different format.
    """
    path = Path(path)
    run = Run(path, path.stem)
    try:
        records = list(_undamaged(path, run))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    if not records:
        why = run.damage or "it is empty"
        raise ConfigError(f"{path} is no file of a thinwire.Watch: {why}; give one that a Watch has written")
    if (version := records[0]["format"]) != FORMAT:
        found = f"{path} has format {version}, this Thinwire reads format {FORMAT}"
        raise ConfigError(f"{found}; read it with the Thinwire that wrote it")
    before_seconds = 0.0
    lists: dict[str, list[Any]] = {"step": run.steps, "norms": run.norms, "log": run.logs}
    for record in without_undone(records):
        if record["kind"] == "run":
            run.name = record["name"] or run.name
            run.processes, run.machines = record["processes"], record["machines"]
            # Each start counts its seconds from 0; those of a run go on.
            before_seconds = run.steps[-1]["seconds"] if run.steps else 0.0
            run.resumed += record is not records[0]
        elif record["kind"] == "plan":
            _add_plan(run.plans, cast(PlanRecord, record))
        else:
            if "seconds" in record:
                record["seconds"] += before_seconds
            lists[record["kind"]].append(record)
    return run


def follow(path: Path) -> Iterator[list[Record]]:
    """Yield what was written to a watch's file since the last time; there need not be a file yet."""
    position = 0
    while True:
        complete = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                # What follows the last newline is still being written; it is read once it is complete.
                complete, newline, _ = file.read().rpartition(b"\n")
            position += len(complete) + len(newline)
        yield list(map(checked_record, complete.splitlines()))


def checked_record(line: bytes) -> Record:
    """Return a line's record, if it has what its kind has, each of its type."""
    record: Any = json.loads(line, parse_constant=_refuse)
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}")
    _check(record, KINDS[kind])
    if kind == "plan":
        for route in record["routes"]:
            _check(route, ROUTE)
    elif kind == "norms":
        _check_numbers(record["relative_error"])
        _check_numbers(record["error_norm"])
    elif kind == "log":
        _check_numbers(record)
    return cast(Record, record)


def _check(record: object, types: Mapping[str, tuple[type, ...]]) -> None:
    for name, expected in types.items():
        if not isinstance(record, dict) or name not in record:
            raise ValueError(f"there is no {name}")
        if not isinstance(record[name], expected):
            names = " or ".join(each.__name__ for each in expected)
            raise ValueError(f"{name} must be {names}, got {reprlib.repr(record[name])}")


def _check_numbers(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if name != "kind" and not isinstance(value, int | float | None):
            raise ValueError(f"{name} must be a number, got {reprlib.repr(value)}")


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}, expected finite numbers")


def _undamaged(path: Path, run: Run) -> Iterator[Record]:
    """Yield the records of a file up to the first damage, and note that."""
    process_rank = None
    with path.open("rb") as file:
        for number in count(start=1):
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                return
            try:
                if not line.endswith(b"\n"):
                    is_long = len(line) == MAX_LINE_BYTES
                    raise ValueError(
                        f"it is longer than {MAX_LINE_BYTES:,} bytes" if is_long else "it is cut off"
                    )
                record = checked_record(line)
                if number == 1 and record["kind"] != "run":
                    raise ValueError("the first line must be of kind run")
                own_rank = record.get("process_rank", process_rank)
                process_rank = own_rank if process_rank is None else process_rank
                # No one can take apart the steps of two processes that append to one file.
                if own_rank != process_rank:
                    both = f"it is of process {own_rank}, the first of process {process_rank}"
                    raise ValueError(f"{both}: give each process its own file")
            except ValueError as error:
                run.damage = f"line {number} ends the reading: {error}"
                return
            yield record


def without_undone(records: list[Record]) -> list[Record]:
    """Return the records, less those of steps that training went back before and made again."""
    kept: list[Record] = []
    plan: list[Record] = []  # is written just before its step, which may be one that was made again
    start: int | None = None  # where the records of a new start begin, until its first step
    last_step = -1
    for record in records:
        if record["kind"] == "plan":
            plan.append(record)
            continue
        if record["kind"] == "run":
            start, plan = len(kept), []
        elif record["kind"] == "step":
            # A new start may go on from a state that was saved before the last steps; and a training loop may
            # load an earlier state.
            if start is not None or record["step"] <= last_step:
                start = len(kept) if start is None else start
                back_to = record["step"] - record["steps"]
                before = [old for old in kept[:start] if old["kind"] == "run" or old["step"] <= back_to]
                kept = before + kept[start:]
            start, last_step = None, record["step"]
            kept.extend(plan)
            plan = []
        kept.append(record)
    return kept + plan


def _add_plan(plans: list[PlanRecord], plan: PlanRecord) -> None:
    """Append a plan; but every start records its plan, perhaps the same one."""

    def travels(plan: PlanRecord) -> tuple[object, object]:
        return plan["algorithm"], sorted((each["label"], each["detail"]) for each in plan["routes"])

    # Once DDP has rebuilt its buckets, rounding may move a few bytes from one parameter to the next: that is
    # the same plan, with its final bytes.
    if plans and travels(plans[-1]) == travels(plan):
        plans[-1]["routes"] = plan["routes"]
    else:
        plans.append(plan)
