"""Reading what a `Watch` wrote."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

from thinwire.errors import ConfigError
from thinwire.watch.records import (
    FORMAT,
    MAX_LINE_BYTES,
    RESERVED,
    NormsRecord,
    PlanRecord,
    Record,
    StepRecord,
    checked_record,
    record_of,
)

MAX_BYTES = 1 << 28
READ_UP_TO_THERE = "; read up to there"


@dataclass(frozen=True)
class Point:
    """A number that was logged.

    Attributes:
        step: After which step.
        seconds: Of training, since it began.
        value: The number.
    """

    step: int
    seconds: float
    value: float


@dataclass
class Run:
    """A run's records, by kind and in order. Where training went back, steps made twice are here once.

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
        return [
            Point(each["step"], each["seconds"], each[name])
            for each in self.logs
            if each.get(name) is not None
        ]

    @property
    def logged(self) -> list[str]:
        """The names that something was logged under."""
        named = dict.fromkeys(name for each in self.logs for name in each)
        return [name for name in named if name not in RESERVED]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the file of a `Watch`, up to the first line that is damaged, or to 256 MiB.

    Memory: about three times the file.

    Raises:
        ConfigError: It can't be read, or not even its first line is a `Watch`'s, or it is of another format.
    """
    path = Path(path)
    run, shown = Run(path, printable(path.stem)), printable(path)
    try:
        # All of it, before anything is said: what the damage is, `_undamaged` knows only at its end.
        segments = list(_segments(_undamaged(path, run)))
    except OSError as error:
        raise ConfigError(f"{shown} can't be read: {error.strerror}") from error
    if not segments:
        why = (run.damage or "it is empty").removesuffix(READ_UP_TO_THERE)
        raise ConfigError(f"{shown} is no file of a thinwire.Watch: {why}; give one that a Watch has written")
    # Every start is listed: training may have been resumed with a different version.
    for segment in segments:
        if segment[0]["format"] != FORMAT:
            raise ConfigError(
                f"{shown} has format {segment[0]['format']}, this Thinwire reads format {FORMAT}; "
                "read it with the Thinwire that wrote it"
            )
    undone: list[tuple[int, int]] = []
    for segment in segments:
        _append(run, segment, undone)
    run.logs = _without(run.logs, undone)
    run.resumed = len(segments) - 1
    return run


class Growing:
    """The file of a watch that may still be going on; there need not be one yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def new_records(self) -> list[Record]:
        """Return what was written since the last call, less what is no record."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            # What follows the last newline is still being written; it is read when its own has come.
            complete, newline, _ = file.read().rpartition(b"\n")
        self._position += len(complete) + len(newline)
        records = map(record_of, complete.decode("utf-8", "replace").splitlines())
        return [record for record in records if record is not None]


def printable(path: str | os.PathLike[str]) -> str:
    """Return a file's name, whose bytes may be no text."""
    return os.fspath(path).encode("utf-8", "replace").decode()


def _undamaged(path: Path, run: Run) -> Iterator[Record]:
    """Yield the records of a file up to the first damage."""
    process_rank = None
    read_bytes = 0
    with path.open("rb") as file:
        for number in count(start=1):
            # Bounded: a file that is no watch's may be one line of any length.
            line = file.readline(MAX_LINE_BYTES)
            read_bytes += len(line)
            if not line:
                return
            if read_bytes > MAX_BYTES:
                run.damage = (
                    f"line {number} is beyond {MAX_BYTES:,} bytes; read up to there; give Watch a larger "
                    "every_steps"
                )
                return
            try:
                if not line.endswith(b"\n"):
                    is_too_long = len(line) == MAX_LINE_BYTES
                    raise ValueError(
                        f"it is longer than {MAX_LINE_BYTES:,} bytes" if is_too_long else "it is cut off"
                    )
                record = checked_record(line.decode("utf-8", "replace"))
                if number == 1 and record["kind"] != "run":
                    raise ValueError("the first line must be of kind run")
            except ValueError as error:
                run.damage = f"line {number} is damaged ({error}){READ_UP_TO_THERE}"
                return
            if record["kind"] == "run":
                # Two processes that append to one file interleave their steps: nobody can take them
                # apart.
                process_rank = record["process_rank"] if process_rank is None else process_rank
                if record["process_rank"] != process_rank:
                    run.damage = (
                        f"line {number} is of process {record['process_rank']}, the first of process "
                        f"{process_rank}: read up to there; give each process a file of its own"
                    )
                    return
            yield record


def _segments(records: Iterable[Record]) -> Iterator[list[Record]]:
    """From one start of training to the next."""
    segment: list[Record] = []
    for record in records:
        if record["kind"] == "run" and segment:
            yield segment
            segment = []
        segment.append(record)
    if segment:
        yield segment


def _append(run: Run, segment: list[Record], undone: list[tuple[int, int]]) -> None:
    """Append one start of training."""
    # A start that resumes makes steps again that were recorded after its state was saved: the later ones
    # count.
    first = next((each["step"] - each["steps"] for each in segment if each["kind"] == "step"), None)
    if first is not None:
        _go_back_to(first, run, undone)
    # Each start counts its seconds from 0; those of a run go on.
    before_seconds = run.steps[-1]["seconds"] if run.steps else 0.0
    lists: dict[str, list[Any]] = {"step": run.steps, "norms": run.norms, "log": run.logs}
    for record in segment:
        if "seconds" in record:
            record["seconds"] += before_seconds
        if record["kind"] == "run":
            run.name = record["name"] or run.name
            run.processes, run.machines = record["processes"], record["machines"]
        elif record["kind"] == "plan":
            # Every start records its plan. And once DDP has rebuilt its buckets, rounding may move a few
            # bytes from one parameter to the next: that is the same plan, with its final bytes.
            if run.plans and _travels(run.plans[-1]) == _travels(record):
                run.plans[-1]["routes"] = record["routes"]
            else:
                run.plans.append(cast(PlanRecord, record))
        else:
            # Within one start as well: a training loop may load an earlier state and go on from there.
            if record["kind"] == "step" and run.steps and record["step"] <= run.steps[-1]["step"]:
                _go_back_to(record["step"] - record["steps"], run, undone)
            lists[record["kind"]].append(record)


def _travels(plan: Mapping[str, Any]) -> tuple[object, object]:
    return plan["algorithm"], sorted((each["label"], each["detail"]) for each in plan["routes"])


def _go_back_to(step: int, run: Run, undone: list[tuple[int, int]]) -> None:
    """Forget what came after a step, from the end; `_without` does so with the logs, all at once."""
    lists: tuple[list[Any], ...] = (run.plans, run.steps, run.norms)
    for kept in lists:
        while kept and kept[-1]["step"] > step:
            kept.pop()
    undone.append((len(run.logs), step))


def _without(logs: list[Record], undone: list[tuple[int, int]]) -> list[Record]:
    """Return the logs, less those of steps that training went back before: in one pass, from the end."""
    kept: list[Record] = []
    returns = list(undone)
    lowest = math.inf
    for index in reversed(range(len(logs))):
        # A log goes if training went back before its step at any time after it was written. Seen from the
        # end, those returns are the ones met so far, and the furthest of them decides.
        while returns and returns[-1][0] > index:
            lowest = min(lowest, returns.pop()[1])
        if logs[index]["step"] <= lowest:
            kept.append(logs[index])
    return kept[::-1]
