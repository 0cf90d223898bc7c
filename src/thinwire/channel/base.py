"""What a channel is: it averages messages, and counts what went through."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.channel.agreement import Told

__all__ = ["Channel", "Pending", "Traffic"]


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

    @property
    @abstractmethod
    def process_rank(self) -> int:
        """This member's place in the group."""

    def average(
        self,
        message: torch.Tensor,
        purpose: str,
        *,
        is_gradient: bool = True,
        is_traffic: bool | None = None,
    ) -> Pending:
        """Start to average `message`, a flat tensor that is given away, over the group.

        Args:
            message: Flat.
            purpose: What is averaged and in which step, for errors.
            is_gradient: Whether it holds gradients, or factors of them.
            is_traffic: Whether it counts as traffic: saving a state does not, what a step sends does. None:
                as `is_gradient`.

        Raises:
            CommunicationError: The backend refuses it, or (from `wait`) the collective fails.
        """
        self._place += 1
        if not (is_gradient if is_traffic is None else is_traffic):
            return self._average(message, purpose)
        self.traffic.messages += 1
        self.traffic.message_bytes += message.numel() * message.element_size()
        return _Timed(self._average(message, purpose), self.traffic)

    @abstractmethod
    def agree(self, told: Told, purpose: str) -> None:
        """Collective: refuse to go on if the members tell different things. Blocks until all have told.

        Args:
            told: What this member tells of itself, by subject.
            purpose: What they are about to do, for errors.

        Raises:
            AgreementError: They differ; raised on all members, with names.
            CommunicationError: The collective failed.
        """

    @abstractmethod
    def _average(self, message: torch.Tensor, purpose: str) -> Pending:
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
