"""One JSON line a training step: written by a training process, read by whoever watches."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step, as process 0 saw it.

    Attributes:
        algorithm: the name it was trained with.
        processes: how many processes trained together.
        step: counted from 1.
        loss: of process 0's batch, before the step.
        step_seconds: from drawing the batch to the updated parameters.
        waiting_seconds: of those, spent waiting for messages.
        messages: messages process 0 sent.
        message_bytes: bytes of those messages.
        gradient_bytes: bytes of the uncompressed gradients.
        heldout_loss: after the step, on held-out text; None where it was not measured.
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

    def to_json(self) -> str:
        """One line, without its newline."""
        return json.dumps(asdict(self))


class RecordFile:
    """A file of records that may still be growing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def new_records(self) -> list[StepRecord]:
        """The records whose lines were completed since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._position += len(complete) + len(newline)
        return [StepRecord(**json.loads(line)) for line in complete.splitlines()]


def read_records(path: Path) -> list[StepRecord]:
    """All complete records in a file; none if there is no such file."""
    return RecordFile(path).new_records()
