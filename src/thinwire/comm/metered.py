"""Transports around others: `Wrapped` delegates, `Metered` counts messages, `Recording` notes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from thinwire.comm.transport import Collective, CombinedWork, Message, Transport, Work


class Wrapped(Transport):
    """Hands messages to `transport`, which may change; a subclass does more in `start`."""

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
    """Counts of what went through a transport, and perhaps through others that count in the same place."""

    messages: int = 0
    message_bytes: int = 0  # as of an all-reduce, see `message_bytes_of`
    rounds: int = 0  # the longest chain of messages of which each was sent when the one before had come
    waiting_seconds: float = 0.0  # of the host
    machine_bytes: int = 0  # of the messages of all local ranks, if they share them: as planned
    inside_bytes: int = 0  # that this rank has sent to others of its machine for that
    members: int = 1  # of the largest group that messages were sent to

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:  # if it fails as well: that is often the longest wait
            self.waiting_seconds += time.perf_counter() - start


class Metered(Wrapped):
    """Counts in `traffic` what goes through a transport, and the time that is waited for it."""

    def __init__(self, transport: Transport, traffic: Traffic | None = None) -> None:
        super().__init__(transport)
        self.traffic = Traffic() if traffic is None else traffic

    def start(self, message: Message) -> Work:
        transport, traffic = self.transport, self.traffic
        size, work = transport.size, transport.start(message)
        # Count only now: a message that was refused has cost nothing.
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
    """A message that was sent. Notes are equal if the messages are, whenever those were sent.

    Attributes:
        collective: What carried it.
        shape: Of this rank's tensor.
        dtype: Of the same tensor.
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
        """Bytes of this rank's tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Recording(Wrapped):
    """Notes the messages of a transport: for tests, and for reckoning what a step sends.

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
        return CombinedWork(partial(self._wait, super().start(message), note))

    def _wait(self, work: Work, note: Note) -> None:
        if note.awaited_at is None:  # the first time: later ones wait for nothing
            note.awaited_at = self._clock()
        work.wait()
