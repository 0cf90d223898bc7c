"""A transport that notes what is sent through it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.channel.transport import Collective, Transport, Work
from thinwire.channel.wrapped import Wrapped


@dataclass
class Note:
    """A message that was sent. Notes are equal if the messages are, whenever those were sent.

    Attributes:
        collective: What carried it.
        shape: Of the tensor that this member handed over.
        dtype: Of the same.
        purpose: As its sender gave it.
        sent_at: When it was sent: what the clock of `Recording` gave.
        awaited_at: When its sender first waited for it, likewise; None before that.
    """

    collective: Collective
    shape: tuple[int, ...]
    dtype: torch.dtype
    purpose: str
    sent_at: Any = field(default=0.0, compare=False)
    awaited_at: Any = field(default=None, compare=False)

    @property
    def handed_bytes(self) -> int:
        """Bytes that this member handed over."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Recording(Wrapped):
    """Notes what goes through another transport: for tests, and for reckoning what a step sends.

    Args:
        transport: Carries the messages.
        clock: Returns what marks the present moment.

    Attributes:
        notes: The messages so far.
    """

    def __init__(self, transport: Transport, clock: Callable[[], Any] = time.perf_counter) -> None:
        super().__init__(transport)
        self.notes: list[Note] = []
        self._clock = clock

    def send(
        self, collective: Collective, tensor: torch.Tensor, purpose: str, start: Callable[[], Work]
    ) -> Work:
        """As `Wrapped.send`; note it, and when it is waited for."""
        # Keep only the tensor's shape and type: the tensor itself would hold a gradient's memory.
        note = Note(collective, tuple(tensor.shape), tensor.dtype, purpose, self._clock())
        self.notes.append(note)
        return _NotedWork(start(), note, self._clock)


@dataclass(frozen=True)
class _NotedWork:
    work: Work
    note: Note
    clock: Callable[[], Any]

    def wait(self) -> None:
        if self.note.awaited_at is None:  # the first time: later ones wait for nothing
            self.note.awaited_at = self.clock()
        self.work.wait()
