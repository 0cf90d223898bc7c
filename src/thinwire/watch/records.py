"""Read the file of a watch; docs/watching.md says what each field of a record is."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import ConfigError

FORMAT = 4  # of files; a reader refuses all others
KINDS = ("run", "plan", "step", "norms", "log")
RESERVED = ("kind", "step", "seconds")  # what every record of a logged number has

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
        """Return the numbers that were logged under a name."""
        logs = (log for log in self.logs if log.get(name) is not None)
        return [Point(log["step"], log["seconds"], log[name]) for log in logs]

    @property
    def logged(self) -> list[str]:
        """The names that something was logged under."""
        names = dict.fromkeys(name for log in self.logs for name in log)
        return [name for name in names if name not in RESERVED]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the file of a `Watch`, up to the first line that is damaged.

    Raises:
        ConfigError: It can't be read, or its first line is not a `Watch`'s, or it has a different format.
    """
    path = Path(path)
    run = Run(path, path.stem)
    try:
        first, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    records = [check_first_line(path, first)]
    rank = records[0]["process_rank"]
    for number, line in enumerate(lines, start=2):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("it is cut off")
            record = _record_of(line)
            # No one can take apart the steps of two processes that append to one file.
            if (other := record.get("process_rank", rank)) != rank:
                what = f"it is of process {other}, the first of process {rank}"
                raise ValueError(f"{what}: give each its own file")
        except ValueError as error:
            run.damage = f"line {number} ends the reading: {error}"
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
            # Each start counts its seconds from 0; those of a run go on.
            seconds_before = run.steps[-1]["seconds"] if run.steps else 0.0
            run.resumed += record is not records[0]
        elif record["kind"] == "plan":
            # Every start records its plan; and once DDP has rebuilt its buckets, rounding may move a few
            # bytes from one parameter to the next. That is the same plan, with its final bytes.
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
    """Return the record of a file's first line, if a `Watch` of this format has written it."""
    try:
        first = _record_of(line)
        if first["kind"] != "run" or "format" not in first:
            raise ValueError("expected a run and its format")
    except ValueError as error:
        reason = f"its first line: {error}" if line else "it is empty"
        raise ConfigError(
            f"{path} is no file of a thinwire.Watch ({reason}); give a different path"
        ) from error
    if first["format"] != FORMAT:
        other = f"{path} has format {first['format']}, this Thinwire has format {FORMAT}"
        raise ConfigError(f"{other}; give a different path, or read it with the Thinwire that wrote it")
    return first


def _record_of(line: bytes) -> Record:
    record: Record = json.loads(line)
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        raise ValueError(f"expected an object whose kind is one of {', '.join(KINDS)}")
    return record


def without_undone(records: list[Record]) -> list[Record]:
    """Return the records, less those of steps that training went back before and made again."""
    valid: list[Record] = []
    last_step = 0
    for record in records:
        if record["kind"] in ("plan", "step"):  # a plan stands just before its step
            back_to = record["step"] - record.get("steps", 1)
            if back_to < last_step:
                valid = [old for old in valid if old["kind"] == "run" or old["step"] <= back_to]
            last_step = record["step"] if record["kind"] == "step" else min(last_step, back_to)
        valid.append(record)
    return valid
