"""Transports around others: those that count, and that note, what goes through them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from thinwire.comm.transport import Collective, Message, Transport, Work


class Wrapped(Transport):
    """Hands messages to `transport`, which may change; a subclass does in `start` what it does besides."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    @property
    def size(self) -> int:  # type: ignore[override]
        """As of the transport."""
        return self.transport.size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """As of the transport."""
        return self.transport.rank

    @property
    def control_device(self) -> torch.device:
        """As of the transport."""
        return self.transport.control_device

    def start(self, message: Message) -> Work:
        return self.transport.start(message)


def wire_bytes(collective: Collective, handed_bytes: int, members: int) -> int:
    """Return the bytes that leave, and reach, each member on the wire; of an all-reduce, those of a ring.

    Examples:
        >>> [wire_bytes(kind, 300, 3) for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast")]
        [400, 600, 200, 300]
    """
    # Rings send so: an all-reduce is a scatter of sums and a gather, each of (members − 1) / members.
    others = members - 1
    return {
        "all_reduce": 2 * handed_bytes * others // members,
        "all_gather": handed_bytes * others,
        "all_to_all": handed_bytes * others // members,
        "broadcast": handed_bytes if others else 0,
    }[collective]


def message_bytes_of(collective: Collective, handed_bytes: int, members: int) -> int:
    """Return the bytes of a message, counted as of an all-reduce, so that collectives compare.

    A message of n bytes stands for 2 n (members − 1) / members bytes that leave each member, as on a ring.

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
    """Counts of what went through a transport, and perhaps through others that count in the same place.

    Attributes:
        messages: All collectives.
        message_bytes: Bytes of all messages, counted as of an all-reduce; see `message_bytes_of`.
        rounds: Of the messages, the longest chain of such as were each sent after the one before had come.
        waiting_seconds: Time the host was blocked until results had come back.
        machine_bytes: Of the messages of all processes of this machine, if they share them; as told by each,
            or by the plan where the host reads no answer.
        members: Of the largest group that messages were sent to, this process included.
        counted_bytes: Of the messages of this process, how many are in these.
        inside_bytes: What this process has sent to others of its machine for that.
    """

    messages: int = 0
    message_bytes: int = 0
    rounds: int = 0
    waiting_seconds: float = 0.0
    machine_bytes: int = 0
    members: int = 1
    counted_bytes: int = 0
    inside_bytes: int = 0

    def count_machine(self, sent_bytes: int) -> None:
        """Count what the processes of this machine have sent in a step."""
        self.machine_bytes += sent_bytes
        self.counted_bytes = self.message_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within as waiting, also if what is waited for fails: that is often the longest."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waiting_seconds += time.perf_counter() - start


class Metered(Wrapped):
    """Counts in `traffic` what goes through a transport, and the time that is waited for it."""

    def __init__(self, transport: Transport, traffic: Traffic | None = None) -> None:
        super().__init__(transport)
        self.traffic = Traffic() if traffic is None else traffic

    def start(self, message: Message) -> Work:
        handed_bytes, size, work = message.tensor.nbytes, self.size, super().start(message)
        # Only now: what could not be sent has cost nothing.
        self.traffic.messages += 1
        self.traffic.members = max(self.traffic.members, size)
        self.traffic.message_bytes += message_bytes_of(message.collective, handed_bytes, size)
        return _TimedWork(work, self.traffic, self.traffic.rounds + 1)


class _TimedWork(NamedTuple):
    work: Work
    traffic: Traffic
    number: int  # of its round

    def wait(self) -> None:
        with self.traffic.waiting():
            self.work.wait()
        self.traffic.rounds = max(self.traffic.rounds, self.number)


@dataclass
class Note:
    """A message that was sent. Notes are equal if the messages are, whenever those were sent.

    Attributes:
        collective: What carried it.
        shape: Of the tensor that this member handed over.
        dtype: Of the same.
        purpose: As its sender gave it.
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
        """Bytes that this member handed over."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Recording(Wrapped):
    """Notes what goes through a transport: for tests, and for reckoning what a step sends.

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

    def start(self, message: Message) -> Work:
        # Keep only the tensor's shape and type: the tensor itself would hold a gradient's memory.
        tensor = message.tensor
        note = Note(message.collective, tuple(tensor.shape), tensor.dtype, message.purpose, self._clock())
        self.notes.append(note)
        return _NotedWork(super().start(message), note, self._clock)


class _NotedWork(NamedTuple):
    work: Work
    note: Note
    clock: Callable[[], Any]

    def wait(self) -> None:
        if self.note.awaited_at is None:  # the first time: later ones wait for nothing
            self.note.awaited_at = self.clock()
        self.work.wait()
