"""The channels of simulated workers, which live in one process and take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.channel.agreement import Told, check_same
from thinwire.channel.base import Channel, Pending
from thinwire.errors import CommunicationError

__all__ = ["InProcessChannel", "lockstep"]


class InProcessChannel(Channel):
    """One simulated worker's end of a group that lives in this process; see `InProcessChannel.group`.

    A group of one serves a process that has no process group. Of several, workers must take turns:
    `lockstep` drives their generators so that each has sent its message before any waits for the mean.
    """

    def __init__(self, room: _Room, worker: int) -> None:
        super().__init__()
        self._room = room
        self.worker = worker

    @classmethod
    def group(cls, size: int) -> list[InProcessChannel]:
        """The channels of `size` simulated workers.

        Examples:
            >>> channels = InProcessChannel.group(2)
            >>> messages = [torch.tensor([1.0]), torch.tensor([3.0])]
            >>> pending = [c.average(m, "an example") for c, m in zip(channels, messages)]
            >>> [p.wait().item() for p in pending]
            [2.0, 2.0]
        """
        room = _Room(size)
        return [cls(room, worker) for worker in range(size)]

    @property
    def size(self) -> int:
        """Simulated workers."""
        return self._room.size

    @property
    def process_rank(self) -> int:
        """The worker's number."""
        return self.worker

    def agree(self, told: Told, purpose: str) -> None:
        """Compare with the workers that have told already, without waiting for the others."""
        self._place += 1
        self._room.compare(self._place, self.worker, told, purpose)

    def _average(self, message: torch.Tensor, purpose: str) -> Pending:
        return _Deposit(self._room, self._place, self.worker, message).put()


@dataclass
class _Room:
    """Messages that wait for those of the other workers, by their place in the order."""

    size: int
    messages: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    means: dict[int, torch.Tensor] = field(default_factory=dict)
    told: dict[int, dict[int, Told]] = field(default_factory=dict)

    def compare(self, place: int, worker: int, told: Told, purpose: str) -> None:
        """Refuse what differs from what others have told at this place of the order."""
        others = self.told.setdefault(place, {})
        others[worker] = told
        if len(others) == self.size:
            del self.told[place]
        check_same([others.get(each, told) for each in range(self.size)], purpose)

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
        workers: Iterators that yield after sending and before waiting, as `Engine.finish` does.

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
