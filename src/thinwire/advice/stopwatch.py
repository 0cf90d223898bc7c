"""Times a step on one process without any network: its messages, and when it waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from thinwire.advice.timeline import Sent, Timeline
from thinwire.comm import Message, Recording, Transport, Work
from thinwire.comm.transport import CompletedWork
from thinwire.sync.streams import record_event
from thinwire.tensors.accelerators import wait_for


class Stopwatch:
    """Times steps on one process that sends nothing: a `LoopbackTransport` answers.

    On an accelerator, device events show when it has made a message, and when its stream would wait.
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self._device = torch.device("cpu") if device is None else device
        self._mark: Callable[[], Any] = time.perf_counter
        if self._device.type != "cpu":
            # On the current stream: hooks may run on a different one than the training loop.
            self._mark = partial(record_event, self._device)
        self.transport = Recording(LoopbackTransport(size), self._mark)
        self._start: Any = 0.0

    def start(self) -> None:
        self.transport.notes.clear()
        self._start = self._mark()

    def timeline(self) -> Timeline:
        """End the step and return its messages and its time."""
        end = self._mark()
        wait_for(self._device)  # before this, events have no times
        sent = []
        for note in self.transport.notes:
            # A message without a wait must have arrived when the next step begins.
            awaited_at = end if note.awaited_at is None else note.awaited_at
            times = self._seconds_until(note.sent_at), self._seconds_until(awaited_at)
            sent.append(Sent(times[0], note.handed_bytes, times[1], note.collective))
        return Timeline(tuple(sent), self._seconds_until(end))

    def _seconds_until(self, mark: Any) -> float:
        if self._device.type == "cpu":
            return float(mark - self._start)
        return float(self._start.elapsed_time(mark)) / 1e3


class LoopbackTransport(Transport):
    """A group in which all members send at the same time, and the same values as this one.

    Results have typical values: arithmetic on zeros or garbage might take a different time.
    """

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def start(self, message: Message) -> Work:
        tensor, output = message.tensor, message.output
        if message.collective == "all_reduce" and message.operation == "sum":
            tensor.mul_(self.size)  # mean and maximum of equal tensors need no change
        elif message.collective == "all_gather":
            output.copy_(tensor.expand_as(output))
        elif message.collective == "all_to_all":
            # All send the same: each member sends to this one what this one sends to the first.
            output.copy_(tensor[0].expand_as(output))
        return CompletedWork()
