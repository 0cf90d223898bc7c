"""Read the file of a watch; docs/watching.md documents each field of a record."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import ConfigError

FORMAT = 4  # of files; a reader refuses all others
KINDS = ("run", "plan", "step", "norms", "log")
RESERVED = ("kind", "step", "seconds")  # fields of every record of logged numbers
# What a page reads, by kind.
NUMBER = (int, float)
SUMMED = ("steps", "message_bytes", "inside_bytes", "gradient_bytes")
SECONDS = ("seconds", "step_seconds", "exposed_seconds", "waiting_seconds", "arithmetic_seconds")
FIELDS: dict[str, dict[str, Any]] = {
    "run": {"name": (str, type(None)), "processes": int, "machines": int, "process_rank": int},
    "plan": {"step": int, "algorithm": str, "routes": list},
    "route": {"label": str, "detail": str, "gradient_bytes": NUMBER, "message_bytes": NUMBER},
    "step": {
        "step": int,
        **dict.fromkeys((*SUMMED, *SECONDS), NUMBER),
        "nonfinite_steps": (int, type(None)),
    },
    "norms": {"step": int, "relative_error": dict},
    "log": {"step": int, "seconds": NUMBER},
}

Record = dict[str, Any]


class Point(NamedTuple):
    """A logged number, with its step and the seconds of training."""

    step: int
    seconds: float
    value: float


@dataclass
class Run:
    """A run's records, by kind and in order. Steps that were repeated after a resume occur once.

    Attributes:
        path: The file.
        name: The name given to `Watch`, or else the file's.
        plans: The first plan, and one for each change of it.
        steps: The records of steps.
        norms: Errors and their norms, every `norms_every_steps`.
        logs: The user's logs: "step", "seconds", and numbers under the user's names.
        processes: The number of processes that trained together.
        machines: The number of processes, or of machines with several, that averaged with each other.
        resumed: How often training was resumed.
        damage: Why reading ended early; None if all was read.
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
        """Return the numbers logged under a name."""
        logs = (log for log in self.logs if log.get(name) is not None)
        return [Point(log["step"], log["seconds"], log[name]) for log in logs]

    @property
    def logged(self) -> list[str]:
        """The names under which numbers were logged."""
        names = dict.fromkeys(name for log in self.logs for name in log)
        return [name for name in names if name not in RESERVED]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the file of a `Watch`, up to the first damaged line.

    Raises:
        ConfigError: It can't be read, or its first line is not a `Watch`'s, or it has a different format.
    """
    path = Path(path)
    run = Run(path, path.stem)
    try:
        first, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    records: list[Record] = []
    rank = check_first_line(path, first).get("process_rank")
    for number, line in enumerate([first, *lines], start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("it is cut off")
            record = _record_of(line)
            # If two processes append to one file, their steps can't be separated.
            if record["kind"] == "run" and (other := record.get("process_rank")) != rank:
                what = f"it is of process {other!r}, the first of process {rank!r}"
                raise ValueError(f"{what}: give each its own file")
            _check_fields(record["kind"], record)
        except ValueError as error:
            run.damage = f"reading stopped at line {number}: {error}"
            break
        records.append(record)
    _sort_into(run, without_undone(records))
    return run


def _sort_into(run: Run, records: list[Record]) -> None:
    lists, seconds_before = {"step": run.steps, "norms": run.norms, "log": run.logs}, 0.0
    for record in records:
        if record["kind"] == "run":
            run.name = record["name"] or run.name
            run.processes, run.machines = record["processes"], record["machines"]
            # Each start counts its seconds from 0; a run's seconds continue.
            seconds_before = run.steps[-1]["seconds"] if run.steps else 0.0
            run.resumed += record is not records[0]
        elif record["kind"] == "plan":
            # Every start records its plan. After DDP has rebuilt its buckets, rounding may move a few bytes
            # from one parameter to the next: that is the same plan, with its final bytes.
            if run.plans and _travels(run.plans[-1]) == _travels(record):
                run.plans[-1]["routes"] = record["routes"]
            else:
                run.plans.append(record)
        else:
            if "seconds" in record:
                record["seconds"] += seconds_before
            lists[record["kind"]].append(record)


def _travels(plan: Record) -> tuple[object, object]:
    return plan["algorithm"], sorted((route["label"], route["detail"]) for route in plan["routes"])


def check_first_line(path: Path, line: bytes) -> Record:
    """Return the record of a file's first line; raise unless a `Watch` of this format has written it."""
    try:
        first = _record_of(line)
        if first["kind"] != "run" or "format" not in first:
            raise ValueError("expected a run and its format")
    except ValueError as error:
        reason = f"its first line: {error}" if line else "it is empty"
        raise ConfigError(
            f"{path} was not written by thinwire.Watch ({reason}); pass a different path"
        ) from error
    if first["format"] != FORMAT:
        other = f"{path} has format {first['format']}, but this Thinwire release has format {FORMAT}"
        raise ConfigError(f"{other}; pass a different path, or read the file with the release that wrote it")
    return first


def _record_of(line: bytes) -> Record:
    try:
        record: Record = json.loads(line)
    except RecursionError as error:
        raise ValueError("its brackets are too deep") from error
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        raise ValueError(f"expected an object whose kind is one of {', '.join(KINDS)}")
    return record


def _check_fields(kind: str, record: Any) -> None:
    """Raise if a record lacks a field that a page reads, or has one of a wrong type."""
    for name, types in FIELDS[kind].items():
        value = record.get(name) if isinstance(record, dict) else None
        if not isinstance(value, types) or name not in record:
            raise ValueError(f"its {name} is {value!r:.40}")
    for route in record["routes"] if kind == "plan" else ():
        _check_fields("route", route)
    # A log may have any names.
    numbers = {"log": record, "norms": record.get("relative_error")}.get(kind, {})
    for name, value in numbers.items():
        # Null is a number that was not finite.
        if name not in RESERVED and not isinstance(value, (*NUMBER, type(None))):
            raise ValueError(f"its {name!r:.40} is {value!r:.40}")


def without_undone(records: list[Record]) -> list[Record]:
    """Return the records without those of steps that a resumed training made again."""
    valid: list[Record] = []
    last_step = 0
    for record in records:
        if record["kind"] in ("plan", "step"):  # a plan comes just before its step
            back_to = record["step"] - record.get("steps", 1)
            if back_to < last_step:
                valid = [old for old in valid if old["kind"] == "run" or old["step"] <= back_to]
            last_step = record["step"] if record["kind"] == "step" else min(last_step, back_to)
        valid.append(record)
    return valid
