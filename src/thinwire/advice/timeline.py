"""A step on one process without any network: when which message would have been sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.channel import Channel, Pending, Told

__all__ = ["RecordingChannel", "Sent", "Timeline"]


@dataclass(frozen=True)
class Sent:
    """A message.

    Attributes:
        at_seconds: Since the step began.
        message_bytes: Its size.
        waited_seconds: When the process asked for its mean, since the step began.
    """

    at_seconds: float
    message_bytes: int
    waited_seconds: float


@dataclass(frozen=True)
class Timeline:
    """A step: its messages in the order they were sent, and how long it took without a network."""

    sent: tuple[Sent, ...]
    seconds: float

    def step_seconds(self, average_seconds: Callable[[float], float]) -> float:
        """How long it would have taken on a network, one message after the other.

        Args:
            average_seconds: Of a message, by its bytes.
        """
        delay = busy_until = 0.0
        arrivals: list[float] = []
        order = sorted(
            [(each.at_seconds, 0, index) for index, each in enumerate(self.sent)]
            + [(each.waited_seconds, 1, index) for index, each in enumerate(self.sent)]
        )
        for seconds, is_wait, index in order:
            if is_wait:
                delay = max(delay, arrivals[index] - seconds)
            else:
                busy_until = max(busy_until, seconds + delay) + average_seconds(
                    self.sent[index].message_bytes
                )
                arrivals.append(busy_until)
        return self.seconds + delay


@dataclass
class _Note:
    at_seconds: float
    message_bytes: int
    waited_seconds: float = 0.0


@dataclass
class _Noted:
    message: torch.Tensor
    note: _Note
    now: Callable[[], float]

    def wait(self) -> torch.Tensor:
        self.note.waited_seconds = self.now()
        return self.message


class RecordingChannel(Channel):
    """A channel to nobody: every message is its own mean, at once. Notes when it was sent and waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._start = 0.0
        self._notes: list[_Note] = []

    @property
    def size(self) -> int:
        """Of a group of one."""
        return 1

    @property
    def process_rank(self) -> int:
        """The only one."""
        return 0

    def agree(self, told: Told, purpose: str) -> None:
        """There is nobody to differ."""

    def start(self) -> None:
        """A step begins."""
        self._start, self._notes = time.perf_counter(), []

    def timeline(self) -> Timeline:
        """The step has ended."""
        seconds = self._now()
        sent = tuple(Sent(each.at_seconds, each.message_bytes, each.waited_seconds) for each in self._notes)
        return Timeline(sent, seconds)

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _average(self, message: torch.Tensor, purpose: str) -> Pending:
        self._notes.append(_Note(self._now(), message.numel() * message.element_size()))
        return _Noted(message, self._notes[-1], self._now)
