"""Channels average messages over a group: the one room that calls `torch.distributed`.

`ProcessGroupChannel` is the real one. `InProcessChannel` averages among simulated workers of one
process, so that an algorithm's mathematics can be run at 64 workers in milliseconds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from thinwire.errors import AttachError, CommunicationError

__all__ = ["Channel", "InProcessChannel", "Pending", "ProcessGroupChannel", "Traffic", "lockstep"]


@dataclass
class Traffic:
    """What went through a channel.

    Attributes:
        messages: Averaging collectives.
        message_bytes: Bytes this process contributed to them.
        waiting_seconds: Time the host was blocked until their means had come back.
    """

    messages: int = 0
    message_bytes: int = 0
    waiting_seconds: float = 0.0


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> torch.Tensor:
        """The mean, in the memory of the message; blocks the host (on CUDA, only the stream)."""


class Channel(ABC):
    """Averages messages over a group; all members send the same messages in the same order.

    Attributes:
        traffic: Counts of the gradient messages so far.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._place = 0  # of the latest message in the order

    @property
    @abstractmethod
    def size(self) -> int:
        """Members of the group."""

    def average(self, message: torch.Tensor, *, is_gradient: bool = True) -> Pending:
        """Start to average `message`, a flat tensor that is given away, over the group.

        Args:
            message: Flat.
            is_gradient: Whether it counts as traffic; saving a state does not.

        Raises:
            CommunicationError: The backend refuses it, or (from `wait`) the collective fails.
        """
        self._place += 1
        if not is_gradient:
            return self._average(message)
        self.traffic.messages += 1
        self.traffic.message_bytes += message.numel() * message.element_size()
        return _Timed(self._average(message), self.traffic)

    @abstractmethod
    def _average(self, message: torch.Tensor) -> Pending:
        """Start the collective."""


@dataclass(frozen=True)
class _Timed:
    pending: Pending
    traffic: Traffic

    def wait(self) -> torch.Tensor:
        start = time.perf_counter()
        try:
            return self.pending.wait()
        finally:
            self.traffic.waiting_seconds += time.perf_counter() - start


class ProcessGroupChannel(Channel):
    """Averages over a process group of `torch.distributed`, on any backend.

    Args:
        group: The process group, None for the default one.

    Raises:
        AttachError: `torch.distributed` is not initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = _checked(group)

    @property
    def size(self) -> int:
        """Processes in the group."""
        return self.group.size()

    def average_later(self, message: torch.Tensor) -> Future[torch.Tensor]:
        """Like `average`, as a future of the mean, for code that never comes back to wait."""
        future = self._average(message).work.get_future()
        return cast("Future[torch.Tensor]", future.then(lambda done: done.value()[0]))

    def _average(self, message: torch.Tensor) -> _Collective:
        # Divided before the sum: half precision would overflow after it.
        message.div_(self.size)
        where = f"the average of message {self._place} ({message.numel()} × {message.dtype})"
        try:
            work = dist.all_reduce(message, group=self.group, async_op=True)
        except RuntimeError as error:
            raise _failed(where, error) from error
        return _Collective(message, cast(dist.Work, work), where)


@dataclass(frozen=True)
class _Collective:
    message: torch.Tensor
    work: dist.Work
    where: str

    def wait(self) -> torch.Tensor:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _failed(self.where, error) from error
        return self.message


def _checked(group: object) -> dist.ProcessGroup:
    """The group to use, after refusing what can't be one."""
    if not dist.is_available() or not dist.is_initialized():
        raise AttachError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first"
        )
    chosen = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        raise AttachError(
            "this process is not a member of the process group; create and use it on members only"
        )
    if not isinstance(chosen, dist.ProcessGroup):
        raise AttachError(f"expected a torch.distributed process group or None, got {chosen!r}")
    return chosen


def _failed(where: str, error: RuntimeError) -> CommunicationError:
    return CommunicationError(
        f"{where} failed: {error}. A process has died, stalled or sent another message, or the backend "
        "can't carry this type; look for the first error among all processes"
    )


class InProcessChannel(Channel):
    """One simulated worker's end of a group that lives in this process; see `InProcessChannel.group`.

    Workers must take turns: `lockstep` drives their generators so that each has sent its message
    before any waits for the mean.
    """

    def __init__(self, room: _Room, worker: int) -> None:
        super().__init__()
        self._room = room
        self.worker = worker

    @classmethod
    def group(cls, size: int) -> list[InProcessChannel]:
        """The channels of `size` simulated workers.

        >>> channels = InProcessChannel.group(2)
        >>> messages = [torch.tensor([1.0]), torch.tensor([3.0])]
        >>> pending = [c.average(m) for c, m in zip(channels, messages)]
        >>> [p.wait().item() for p in pending]
        [2.0, 2.0]
        """
        room = _Room(size)
        return [cls(room, worker) for worker in range(size)]

    @property
    def size(self) -> int:
        """Simulated workers."""
        return self._room.size

    def _average(self, message: torch.Tensor) -> Pending:
        return _Deposit(self._room, self._place, self.worker, message).put()


@dataclass
class _Room:
    """Messages that wait for those of the other workers, by their place in the order."""

    size: int
    messages: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    means: dict[int, torch.Tensor] = field(default_factory=dict)

    def mean(self, place: int) -> torch.Tensor:
        """The mean of the messages at one place of the order, once all are there."""
        if place not in self.means:
            messages = self.messages[place]
            missing = sorted(set(range(self.size)) - set(messages))
            if missing:
                raise CommunicationError(
                    f"workers {missing} have not sent message {place}; drive them in lockstep"
                )
            if len({(m.shape, m.dtype) for m in messages.values()}) > 1:
                kinds = {worker: (tuple(m.shape), m.dtype) for worker, m in sorted(messages.items())}
                raise CommunicationError(f"message {place} differs between workers: {kinds}")
            parts = [messages[worker] / self.size for worker in range(self.size)]
            self.means[place] = sum(parts[1:], start=parts[0])
        return self.means[place]

    def leave(self, place: int, worker: int) -> None:
        """Forget a mean that every worker has taken."""
        del self.messages[place][worker]
        if not self.messages[place]:
            del self.messages[place], self.means[place]


@dataclass(frozen=True)
class _Deposit:
    room: _Room
    place: int
    worker: int
    message: torch.Tensor

    def put(self) -> _Deposit:
        self.room.messages.setdefault(self.place, {})[self.worker] = self.message
        return self

    def wait(self) -> torch.Tensor:
        self.message.copy_(self.room.mean(self.place))
        self.room.leave(self.place, self.worker)
        return self.message


def lockstep(workers: Sequence[Iterator[None]]) -> None:
    """Drive simulated workers to their end, one stretch each in turn.

    Args:
        workers: Iterators that yield after sending and before waiting, as `GradientSync.finish` does.

    Raises:
        CommunicationError: They do not send the same messages in the same order.
    """
    running = list(workers)
    while running:
        done = object()
        still = [worker for worker in running if next(worker, done) is not done]
        if still and len(still) < len(running):
            raise CommunicationError(
                f"{len(running) - len(still)} of {len(running)} workers ended before the others"
            )
        running = still
