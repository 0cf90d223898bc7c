"""Transports around others: `Wrapped` delegates, `Metered` counts messages, `Recording` records them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from thinwire.comm.transport import CombinedWork, Message, Transport, Work
from thinwire.wire import Collective


class Wrapped(Transport):
    """Passes messages to `transport`, which may change; a subclass does more in `start`."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.transport.size

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.transport.rank

    @property
    def control_device(self) -> torch.device:
        return self.transport.control_device

    @property
    def data_device(self) -> torch.device:
        return self.transport.data_device

    def start(self, message: Message) -> Work:
        return self.transport.start(message)


def message_bytes_of(collective: Collective, handed_bytes: int, members: int) -> int:
    """Return the bytes of a message, counted as for an all-reduce, so that collectives are comparable.

    A message of n bytes stands for 2 n (members − 1) / members bytes that each member sends, as in a ring.

    Examples:
        >>> [message_bytes_of(kind, 300, 4) for kind in ("all_reduce", "all_gather", "all_to_all")]
        [300, 600, 150]
    """
    # For gathers and exchanges: the size of the all-reduce with the same `wire_bytes`.
    return {
        "all_reduce": handed_bytes,
        "all_gather": handed_bytes * members // 2,
        "all_to_all": handed_bytes // 2,
        "broadcast": handed_bytes,
    }[collective]


@dataclass
class Traffic:
    """Counts of what a transport has sent; several transports may share one."""

    messages: int = 0
    message_bytes: int = 0  # counted as for an all-reduce, see `message_bytes_of`
    rounds: int = 0  # the longest chain of messages in which each was sent after the one before had arrived
    waiting_seconds: float = 0.0  # of the host
    machine_bytes: int = 0  # planned bytes of all local ranks' messages, if they share them
    inside_bytes: int = 0  # sent by this rank to others of its machine for that
    members: int = 1  # of the largest group that messages were sent to

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside this context as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:  # also if it fails: that is often the longest wait
            self.waiting_seconds += time.perf_counter() - start


class Metered(Wrapped):
    """Counts a transport's messages and the time waited for them in `traffic`."""

    def __init__(self, transport: Transport, traffic: Traffic | None = None) -> None:
        super().__init__(transport)
        self.traffic = Traffic() if traffic is None else traffic

    def start(self, message: Message) -> Work:
        transport, traffic = self.transport, self.traffic
        size, work = transport.size, transport.start(message)
        # Count only now: a refused message has cost nothing.
        traffic.messages += 1
        traffic.members = max(traffic.members, size)
        traffic.message_bytes += message_bytes_of(message.collective, message.tensor.nbytes, size)
        return CombinedWork(partial(self._wait, work, traffic.rounds + 1))

    def _wait(self, work: Work, rounds: int) -> None:
        with self.traffic.waiting():
            work.wait()
        self.traffic.rounds = max(self.traffic.rounds, rounds)


@dataclass
class Note:
    """A sent message. Notes are equal if the messages are, at whatever times they were sent.

    Attributes:
        collective: The message's collective.
        shape: The shape of this rank's tensor.
        dtype: The dtype of this rank's tensor.
        purpose: The purpose given by its sender.
        sent_at: When it was sent, by the clock of `Recording`.
        awaited_at: When its sender first waited for it; None before that.
    """

    collective: Collective
    shape: tuple[int, ...]
    dtype: torch.dtype
    purpose: str
    sent_at: Any = field(default=0.0, compare=False)
    awaited_at: Any = field(default=None, compare=False)

    @property
    def handed_bytes(self) -> int:
        """Bytes of this rank's tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Recording(Wrapped):
    """Records the messages of a transport: for tests, and to compute what a step sends.

    Args:
        transport: Carries the messages.
        clock: Returns a mark of the present time.

    Attributes:
        notes: The messages so far.
    """

    def __init__(self, transport: Transport, clock: Callable[[], Any] = time.perf_counter) -> None:
        super().__init__(transport)
        self.notes: list[Note] = []
        self._clock = clock

    def start(self, message: Message) -> Work:
        # Keep only the tensor's shape and dtype: the tensor itself would keep a gradient's memory.
        tensor = message.tensor
        note = Note(message.collective, tuple(tensor.shape), tensor.dtype, message.purpose, self._clock())
        self.notes.append(note)
        return CombinedWork(partial(self._wait, super().start(message), note))

    def _wait(self, work: Work, note: Note) -> None:
        if note.awaited_at is None:  # only the first wait: later ones wait for nothing
            note.awaited_at = self._clock()
        work.wait()
