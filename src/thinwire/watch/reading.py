"""Reading what a `Watch` wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.watch.fields import FIELDS, FORMAT

__all__ = ["Point", "Record", "Run", "read_run", "record_of"]

Record = dict[str, Any]


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
    """A run's records, by kind and in order. Where training was resumed, steps made twice are here once.

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
        return [name for name in named if name not in ("kind", "step", "seconds")]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the file of a `Watch`, up to the first line that is damaged.

    Raises:
        ConfigError: It can't be read, not even its first line is a `Watch`'s, or it is of a later version.
    """
    path = Path(path)
    run = Run(path, path.stem)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
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


def record_of(line: str) -> Record | None:
    """A line's record; None if it is not one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    fields = FIELDS.get(str(record.get("kind")))
    return record if fields is not None and record.keys() >= set(fields) else None


def _undamaged(lines: Iterable[str], run: Run) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        record = record_of(line) if line.endswith("\n") else None
        if record is None or (number == 1 and record["kind"] != "run"):
            run.damage = f"line {number} is damaged; read up to there"
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
        for kept in (run.plans, run.steps, run.norms, run.logs):
            kept[:] = [each for each in kept if each["step"] <= first]
    before_seconds = run.steps[-1]["seconds"] if run.steps else 0.0
    lists = {"plan": run.plans, "step": run.steps, "norms": run.norms, "log": run.logs}
    for record in segment:
        if "seconds" in record:
            record["seconds"] += before_seconds
        if record["kind"] == "run":
            run.name, run.processes = record["name"] or run.name, record["processes"]
        elif record["kind"] != "plan" or not _is_same(record, run.plans):
            lists[record["kind"]].append(record)


def _is_same(plan: Record, plans: list[Record]) -> bool:
    return bool(plans) and all(plan[name] == plans[-1][name] for name in FIELDS["plan"])
