"""Reading what a `Watch` wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.watch.fields import FORMAT, RESERVED, Record, record_of

__all__ = ["Point", "Run", "read_run"]


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
        steps: One a record of steps.
        norms: Errors and their norms, now and then.
        logs: What the user logged.
        processes: How many trained together.
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
    resumed: int = 0
    damage: str | None = None

    def points(self, name: str) -> list[Point]:
        """What was logged under a name."""
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

    def go_back_to(self, step: int) -> None:
        """Forget what came after a step."""
        for kept in (self.plans, self.steps, self.norms, self.logs):
            kept[:] = [each for each in kept if each["step"] <= step]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the file of a `Watch`, up to the first line that is damaged.

    Raises:
        ConfigError: It can't be read, or not even its first line is a `Watch`'s, or it is of a later version.
    """
    path = Path(path)
    run = Run(path, _printable(path.stem))
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{_printable(str(path))} can't be read: {error.strerror}") from error
    segments = list(_segments(_undamaged(lines, run)))
    if not segments:
        raise ConfigError(f"{path} is no file of a thinwire.Watch: {run.damage or 'it is empty'}")
    later = max(segment[0]["format"] for segment in segments)
    if later > FORMAT:
        raise ConfigError(
            f"{path} has format {later}, this Thinwire reads up to {FORMAT}: install a later version"
        )
    for segment in segments:
        _append(run, segment)
    run.resumed = len(segments) - 1
    return run


def _undamaged(lines: Iterable[str], run: Run) -> Iterator[Record]:
    process_rank = None
    for number, line in enumerate(lines, start=1):
        record = record_of(line) if line.endswith("\n") else None
        if record is None or (number == 1 and record["kind"] != "run"):
            run.damage = f"line {number} is damaged; read up to there"
            return
        if record["kind"] == "run":
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


def _append(run: Run, segment: list[Record]) -> None:
    first = next((each["step"] - each["steps"] for each in segment if each["kind"] == "step"), None)
    if first is not None:
        run.go_back_to(first)
    before_seconds = run.steps[-1]["seconds"] if run.steps else 0.0
    lists = {"step": run.steps, "norms": run.norms, "log": run.logs}
    for record in segment:
        if "seconds" in record:
            record["seconds"] += before_seconds
        if record["kind"] == "run":
            run.name, run.processes = record["name"] or run.name, record["processes"]
        elif record["kind"] == "plan":
            if not run.plans or any(run.plans[-1][name] != record[name] for name in ("algorithm", "routes")):
                run.plans.append(record)
        else:
            if record["kind"] == "step" and run.steps and record["step"] <= run.steps[-1]["step"]:
                run.go_back_to(record["step"] - record["steps"])
            lists[record["kind"]].append(record)


def _printable(name: str) -> str:
    """A file's name may have bytes that are no text."""
    return name.encode("utf-8", "replace").decode()
