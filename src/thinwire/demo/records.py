"""A training process's watch, read as it grows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from thinwire.watch.reading import Growing
from thinwire.watch.records import Record

COUNTED = ("step_seconds", "waiting_seconds", "messages", "message_bytes", "gradient_bytes")


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
