"""A training process's watch, read as it grows, and the figures of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from thinwire.plan import compression_ratio
from thinwire.probe.result import ring_share
from thinwire.watch.reading import Growing
from thinwire.watch.records import Record

COUNTED = ("step_seconds", "waiting_seconds", "message_bytes", "gradient_bytes")


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One training step, as process 0 saw it: `step` counts from 1, `loss` is of its batch."""

    algorithm: str
    processes: int
    step: int
    loss: float
    step_seconds: float
    waiting_seconds: float
    message_bytes: int
    gradient_bytes: int
    heldout_loss: float | None = None


class RecordFile:
    """The file of a watch that may still be going on."""

    def __init__(self, path: Path) -> None:
        self._file = Growing(path)
        self._run: Record = {}
        self._step: Record = {}

    def new_records(self) -> list[TrainedStep]:
        """Return the steps whose loss was logged since the last call."""
        found = []
        for record in self._file.new_records():
            if record["kind"] == "run":
                self._run = record
            elif record["kind"] == "step":
                self._step = record
            elif record["kind"] == "log":
                # A step is whole with its loss, which is logged behind the record of what it sent.
                found.append(
                    TrainedStep(
                        algorithm=self._run["name"],
                        processes=self._run["processes"],
                        step=record["step"],
                        # What was not finite is null in the file.
                        loss=math.nan if record["loss"] is None else record["loss"],
                        heldout_loss=record.get("heldout_loss"),
                        **{name: self._step[name] for name in COUNTED},
                    )
                )
        return found


def read_records(path: Path) -> list[TrainedStep]:
    """Return all complete records in a file; none if there is no such file."""
    return RecordFile(path).new_records()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What one algorithm did to one run: medians over steps, and what process 0 sent, a mean over steps."""

    algorithm: str
    processes: int
    heldout_loss: float | None
    step_seconds: float
    waiting_seconds: float
    working_seconds: float
    message_bytes: float
    compression_ratio: float

    def implied_step_seconds(self, bits_per_second: float) -> float:
        """Return the step time on a link of this rate, computed: nothing overlaps, latency is ignored."""
        return self.working_seconds + 8 * self.message_bytes * ring_share(self.processes) / bits_per_second


def summarize(steps: Sequence[TrainedStep]) -> Summary:
    """Return the figures of one algorithm's steps."""
    if not steps:
        raise ValueError("got no records, expected at least one step")
    return Summary(
        algorithm=steps[-1].algorithm,
        processes=steps[-1].processes,
        heldout_loss=steps[-1].heldout_loss,
        step_seconds=median(step.step_seconds for step in steps),
        waiting_seconds=median(step.waiting_seconds for step in steps),
        # Of the differences: medians of two numbers do not subtract to the median of their difference.
        working_seconds=median(step.step_seconds - step.waiting_seconds for step in steps),
        # The mean, unlike above: some algorithms send much in one step of several, and links carry the sum.
        message_bytes=fmean(step.message_bytes for step in steps),
        compression_ratio=compression_ratio(
            sum(step.gradient_bytes for step in steps), sum(step.message_bytes for step in steps)
        ),
    )
