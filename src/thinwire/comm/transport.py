"""Transport: the collectives of one group, as one of its members sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

Operation: TypeAlias = Literal["sum", "mean", "max"]

Collective: TypeAlias = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class Message:
    """A collective, as one member sends it."""

    collective: Collective
    tensor: torch.Tensor  # what this member hands over
    output: torch.Tensor  # where the result comes to lie; of an all-reduce and a broadcast, `tensor` itself
    purpose: str  # what for and in which step, for errors
    operation: Operation = "sum"  # of an all-reduce
    source: int = 0  # of a broadcast, the rank whose tensor is taken


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result is there: the host, or on CUDA only the current stream."""


class Transport(ABC):
    """Carries tensors between the members of a group.

    All members make the same calls in the same order, from one thread each. Tensors are contiguous, and
    belong to the transport from the call until `wait` has returned. Every method that sends may raise
    `CommunicationError`: the call if the backend refuses the tensor, `wait` if the collective fails.
    """

    size: int  # members of the group
    rank: int  # this member's place in the group, from 0 on

    @property
    def control_device(self) -> torch.device:
        """The device on which small messages for the host are cheapest."""
        return torch.device("cpu")

    @property
    def data_device(self) -> torch.device:
        """The device on which small messages for what is computed of gradients are cheapest."""
        return self.control_device

    @abstractmethod
    def start(self, message: Message) -> Work:
        """Start a collective, without waiting for it; what the methods below ask for."""

    def all_reduce(self, tensor: torch.Tensor, purpose: str, *, operation: Operation = "sum") -> Work:
        """Replace `tensor` by its sum, mean (if floating) or maximum over the members."""
        return self.start(Message("all_reduce", tensor, tensor, purpose, operation))

    def mean(self, tensor: torch.Tensor, purpose: str) -> Work:
        """Replace a floating `tensor` by its mean over the members."""
        return self.all_reduce(tensor, purpose, operation="mean")

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Write to row i of `output`, (members, n), the `tensor` of member i: (n,), of any type."""
        return self.start(Message("all_gather", tensor, output, purpose))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Send row i of `tensor`, of any type, to member i; what that has sent becomes row i of `output`."""
        return self.start(Message("all_to_all", tensor, output, purpose))

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> Work:
        """Replace `tensor`, of any type, by that of the member of rank `source`."""
        return self.start(Message("broadcast", tensor, tensor, purpose, source=source))

    def scatter_mean(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Replace this rank's part of `flat` by its mean; parts have these lengths, the others are ruined."""
        return self.mean(flat, purpose)  # more than is needed; if bytes count, a transport sends less

    def gather_parts(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Send this rank's part of `flat`, and write those of the others; parts have these lengths."""
        parts = flat.split_with_sizes(list(lengths))
        return _Several([self.broadcast(part, rank, purpose) for rank, part in enumerate(parts) if len(part)])


class _Several(NamedTuple):
    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
