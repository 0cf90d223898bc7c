"""A training process's watch, read as it grows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from thinwire.watch.records import Record, record_of

__all__ = ["RecordFile", "TrainedStep", "read_records"]


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One training step, as process 0 saw it.

    Attributes:
        algorithm: The name it was trained with.
        processes: How many processes trained together.
        step: Counted from 1.
        loss: Of process 0's batch, before the step.
        step_seconds: From the end of the last averaging to the end of this one.
        waiting_seconds: Of those, spent waiting for messages.
        messages: Messages that process 0 sent.
        message_bytes: Bytes of those messages.
        gradient_bytes: Bytes of the uncompressed gradients.
        heldout_loss: After the step, on held-out text; None where it was not measured.
    """

    algorithm: str
    processes: int
    step: int
    loss: float
    step_seconds: float
    waiting_seconds: float
    messages: int
    message_bytes: int
    gradient_bytes: int
    heldout_loss: float | None = None


class RecordFile:
    """The file of a watch that may still be going on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._run: Record = {}
        self._step: Record = {}

    def new_records(self) -> list[TrainedStep]:
        """Return the steps whose loss was logged since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._position += len(complete) + len(newline)
        lines = complete.decode().splitlines()
        return [step for line in lines if (step := self._joined(line)) is not None]

    def _joined(self, line: str) -> TrainedStep | None:
        record = record_of(line)
        if record is None:
            return None
        if record["kind"] == "run":
            self._run = record
        elif record["kind"] == "step":
            self._step = record
        if record["kind"] != "log":
            return None
        counted = ("step_seconds", "waiting_seconds", "messages", "message_bytes", "gradient_bytes")
        return TrainedStep(
            algorithm=self._run["name"],
            processes=self._run["processes"],
            step=record["step"],
            loss=math.nan if record["loss"] is None else record["loss"],
            heldout_loss=record.get("heldout_loss"),
            **{name: self._step[name] for name in counted},
        )


def read_records(path: Path) -> list[TrainedStep]:
    """Return all complete records in a file; none if there is no such file."""
    return RecordFile(path).new_records()
