"""The records of a watch, and how a file of them is read; docs/watching.md says what each field is."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from thinwire.errors import ConfigError

FORMAT = 4  # of files; a reader refuses all others
# A foreign file may be one line of any length.
MAX_LINE_BYTES = 1 << 24
# A number that is logged may not have one of these names.
RESERVED = ("kind", "step", "seconds")
# Sums of `Stats`; a record has the differences.
SECONDS = ("arithmetic_seconds", "waiting_seconds", "exposed_seconds")
COUNTED = ("messages", "message_bytes", "inside_bytes", "gradient_bytes", *SECONDS)
# Fields that are read of each kind. Numbers that the user logged come beside, under their names.
FIELDS: dict[str, dict[str, Any]] = {
    "run": {"format": int, "name": str | None, "processes": int, "machines": int, "process_rank": int},
    "plan": {"step": int, "algorithm": str, "routes": list},
    "step": {
        "step": int,
        "steps": int,
        "nonfinite_steps": int | None,
        **dict.fromkeys(("seconds", "step_seconds", "compression_ratio", *COUNTED), int | float),
    },
    "norms": {"step": int, "relative_error": dict, "error_norm": dict},
    "log": {"step": int, "seconds": int | float},
}
ROUTE = {"label": str, "detail": str, "gradient_bytes": int, "message_bytes": int}

Record = dict[str, Any]


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
    plans: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    norms: list[Record] = field(default_factory=list)
    logs: list[Record] = field(default_factory=list)
    processes: int = 1
    machines: int = 1
    resumed: int = 0
    damage: str | None = None

    def points(self, name: str) -> list[Point]:
        """Return the numbers that were logged under a name."""
        logs = (log for log in self.logs if log.get(name) is not None)
        return [Point(log["step"], log["seconds"], log[name]) for log in logs]

    @property
    def logged(self) -> list[str]:
        """The names that something was logged under."""
        named = dict.fromkeys(name for log in self.logs for name in log)
        return [name for name in named if name not in RESERVED]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the file of a `Watch`, up to the first line that is damaged.

    Raises:
        ConfigError: It can't be read, or its first line is not a `Watch`'s, or it has a different format.
    """
    path = Path(path)
    run = Run(path, path.stem)
    try:
        with path.open("rb") as file:
            first = first_record(path, file.readline(MAX_LINE_BYTES))
            records = [first, *_undamaged(file, run, first["process_rank"])]
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    before_seconds = 0.0
    lists = {"step": run.steps, "norms": run.norms, "log": run.logs}
    for record in without_undone(records):
        if record["kind"] == "run":
            run.name = record["name"] or run.name
            run.processes, run.machines = record["processes"], record["machines"]
            # Each start counts its seconds from 0; those of a run go on.
            before_seconds = run.steps[-1]["seconds"] if run.steps else 0.0
            run.resumed += record is not first
        elif record["kind"] == "plan":
            _add_plan(run.plans, record)
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
                # A line without a newline is still being written; it is read once it is complete.
                complete, newline, _ = file.read().rpartition(b"\n")
            position += len(complete) + len(newline)
        yield list(map(checked_record, complete.splitlines()))


def first_record(path: Path, line: bytes) -> Record:
    """Return the record of a file's first line, if a `Watch` of this format has written it."""
    try:
        first = checked_record(line)
        if first["kind"] != "run":
            raise ValueError("it must be of kind run")
    except ValueError as error:
        why = f"its first line: {error}" if line else "it is empty"
        raise ConfigError(f"{path} is no file of a thinwire.Watch ({why}); give a different path") from error
    if first["format"] != FORMAT:
        found = f"{path} has format {first['format']}, this Thinwire has format {FORMAT}"
        raise ConfigError(f"{found}; give a different path, or read it with the Thinwire that wrote it")
    return first


def checked_record(line: bytes) -> Record:
    """Return a line's record, if it has what is read of its kind."""
    record: Record = json.loads(line, parse_constant=_refuse)
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"kind must be one of {', '.join(FIELDS)}")
    _check(record, FIELDS[kind])
    if kind == "plan":
        for route in record["routes"]:
            _check(route, ROUTE)
    elif kind == "norms":
        for errors in (record["relative_error"], record["error_norm"]):
            _check(errors, dict.fromkeys(errors, int | float | None))
    elif kind == "log":
        _check(record, dict.fromkeys(record.keys() - RESERVED, int | float | None))
    return record


def _check(record: object, types: Mapping[str, Any]) -> None:
    for name, expected in types.items():
        if not isinstance(record, dict) or name not in record:
            raise ValueError(f"there is no {name}")
        if not isinstance(record[name], expected):
            words = expected.__name__ if isinstance(expected, type) else expected
            raise ValueError(f"{name} must be {words}, got {reprlib.repr(record[name])}")


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}, expected finite numbers")


def _undamaged(file: BinaryIO, run: Run, process_rank: int) -> Iterator[Record]:
    """Yield the records after the first line, up to the first damage, and note that."""
    for number in count(start=2):
        line = file.readline(MAX_LINE_BYTES)
        if not line:
            return
        try:
            if not line.endswith(b"\n"):
                raise ValueError("it is cut off")
            record = checked_record(line)
            # No one can take apart the steps of two processes that append to one file.
            if (own_rank := record.get("process_rank", process_rank)) != process_rank:
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


def _add_plan(plans: list[Record], plan: Record) -> None:
    """Append a plan; but every start records its plan, perhaps the same one."""

    def travels(plan: Record) -> tuple[object, object]:
        return plan["algorithm"], sorted((route["label"], route["detail"]) for route in plan["routes"])

    # Once DDP has rebuilt its buckets, rounding may move a few bytes from one parameter to the next: that is
    # the same plan, with its final bytes.
    if plans and travels(plans[-1]) == travels(plan):
        plans[-1]["routes"] = plan["routes"]
    else:
        plans.append(plan)
