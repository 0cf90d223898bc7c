"""The records of a watch: what each kind has, and how a file of them is read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, cast

from thinwire.errors import ConfigError
from thinwire.json_records import Amount, Count, Processes, Seconds, Whole, parsed, read_record, value_of

FORMAT = 4  # of files; a reader refuses all others
# Both bound what a reader holds in memory of a file that may come from anywhere.
MAX_LINE_BYTES, MAX_BYTES = 1 << 24, 1 << 28
# A number that is logged may not have one of these names.
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


class Counted(TypedDict):
    """What `Stats` counts, as differences."""

    messages: Amount
    message_bytes: Amount
    inside_bytes: Amount
    gradient_bytes: Amount
    arithmetic_seconds: Seconds
    waiting_seconds: Seconds
    exposed_seconds: Seconds


class StepRecord(Counted):
    """What steps did together."""

    kind: Literal["step"]
    step: Whole
    seconds: Seconds
    step_seconds: Seconds
    steps: Count
    nonfinite_steps: Whole | None
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
    """Read the file of a `Watch`, up to the first line that is damaged, or to 256 MiB.

    Memory: about three times the file.

    Raises:
        ConfigError: It can't be read, or its first line is not a `Watch`'s, or it has a different format.
    """
    path = Path(path)
    run, shown = Run(path, printable(path.stem)), printable(path)
    try:
        records = list(_undamaged(path, run))
    except OSError as error:
        raise ConfigError(f"{shown} can't be read: {error.strerror}") from error
    if not records:
        why = run.damage or "it is empty"
        raise ConfigError(f"{shown} is no file of a thinwire.Watch: {why}; give one that a Watch has written")
    # Every start is listed: training may have been resumed with a different version.
    for version in (each["format"] for each in records if each["kind"] == "run"):
        if version != FORMAT:
            found = f"{shown} has format {version}, this Thinwire reads format {FORMAT}"
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
        records = map(record_of, complete.decode("utf-8", "replace").splitlines())
        yield [record for record in records if record is not None]


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


def printable(path: str | os.PathLike[str]) -> str:
    """Return a file's name, whose bytes may be no text."""
    return os.fspath(path).encode("utf-8", "replace").decode()


def _undamaged(path: Path, run: Run) -> Iterator[Record]:
    """Yield the records of a file up to the first damage, and note that."""
    process_rank, read_bytes = None, 0
    with path.open("rb") as file:
        for number in count(start=1):
            # Bounded: a file that is no watch's may be one line of any length.
            line = file.readline(MAX_LINE_BYTES)
            read_bytes += len(line)
            if not line:
                return
            try:
                if read_bytes > MAX_BYTES:
                    raise ValueError(f"it is beyond {MAX_BYTES:,} bytes: give Watch a larger every_steps")
                if len(line) == MAX_LINE_BYTES:
                    raise ValueError(f"it is longer than {MAX_LINE_BYTES:,} bytes")
                if not line.endswith(b"\n"):
                    raise ValueError("it is cut off")
                record = checked_record(line.decode("utf-8", "replace"))
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
    # The places in the file at which training went back, and the steps that it went back to.
    returns: list[tuple[int, int]] = []
    start, last_step = None, math.inf
    for index, record in enumerate(records):
        if record["kind"] == "run":
            start = index
        elif record["kind"] == "step":
            # A new start may go on from a state that was saved before the last steps; and a training loop may
            # load an earlier state. The plan of a step is written just before it.
            if start is not None or record["step"] <= last_step:
                has_plan = records[index - 1]["kind"] == "plan"
                returns.append(
                    (index - has_plan if start is None else start, record["step"] - record["steps"])
                )
            start, last_step = None, record["step"]
    kept: list[Record] = []
    lowest = math.inf
    for index in reversed(range(len(records))):
        # A record goes if training went back before its step at any time after it was written. Seen from the
        # end, those returns are the ones met so far, and the furthest of them decides.
        while returns and returns[-1][0] > index:
            lowest = min(lowest, returns.pop()[1])
        if records[index]["kind"] == "run" or records[index]["step"] <= lowest:
            kept.append(records[index])
    return kept[::-1]


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
