"""Transport: the collectives of one group, as one of its ranks sees them; and what is waited for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

Operation: TypeAlias = Literal["sum", "mean", "max"]

Collective: TypeAlias = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class Message:
    """A collective, as one rank sends it."""

    collective: Collective
    tensor: torch.Tensor  # what this rank hands over
    output: torch.Tensor  # where the result comes to lie; of an all-reduce and a broadcast, `tensor` itself
    purpose: str  # what for and in which step, for errors
    operation: Operation = "sum"  # of an all-reduce
    source: int = 0  # of a broadcast, the rank whose tensor is taken

    def __str__(self) -> str:
        """Say what is sent what for, for errors."""
        what = f"{self.tensor.numel()} × {self.tensor.dtype}"
        words = {
            "all_reduce": f"the {'maximum' if self.operation == 'max' else 'average'} of {what}",
            "all_gather": f"the gather of {what}",
            "all_to_all": f"the exchange of {what}",
            "broadcast": f"the copy of {what} from process {self.source} of the group",
        }
        return f"{self.purpose}: {words[self.collective]}"


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result is there: the host, or on CUDA only the current stream."""


class CompletedWork:
    """A collective that needs no waiting."""

    def wait(self) -> None:
        return


class CombinedWork(NamedTuple):
    """Work that is made of other work: its `wait` is a function that waits for them, and does more."""

    wait: Callable[[], None]


class Transport(ABC):
    """Carries tensors between the ranks of a group.

    All ranks make the same calls in the same order, from one thread each. Tensors are contiguous, and
    belong to the transport from the call until `wait` has returned. Every method that sends may raise
    `CommunicationError`: the call if the backend refuses the tensor, `wait` if the collective fails.
    """

    size: int
    rank: int

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
        """Start a collective, without waiting for it; the methods below call this."""

    def all_reduce(self, tensor: torch.Tensor, purpose: str, *, operation: Operation = "sum") -> Work:
        """Replace `tensor` by its sum, mean (if floating) or maximum over the ranks."""
        return self.start(Message("all_reduce", tensor, tensor, purpose, operation))

    def mean(self, tensor: torch.Tensor, purpose: str) -> Work:
        """Replace a floating `tensor` by its mean over the ranks."""
        return self.all_reduce(tensor, purpose, operation="mean")

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Write to row i of `output`, (size, n), the `tensor` of rank i: (n,), of any type."""
        return self.start(Message("all_gather", tensor, output, purpose))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Send row i of `tensor`, of any type, to rank i; what that sends here becomes row i of `output`."""
        return self.start(Message("all_to_all", tensor, output, purpose))

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> Work:
        """Replace `tensor`, of any type, by that of rank `source`."""
        return self.start(Message("broadcast", tensor, tensor, purpose, source=source))

    def scatter_mean(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Replace this rank's part of `flat` by its mean; parts have these lengths, the others are ruined."""
        return self.mean(flat, purpose)  # more than is needed; if bytes count, a transport sends less

    def gather_parts(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Send this rank's part of `flat`, and write those of the others; parts have these lengths."""
        parts = flat.split_with_sizes(list(lengths))
        copies = [self.broadcast(part, rank, purpose) for rank, part in enumerate(parts) if len(part)]

        def wait() -> None:
            for copy in copies:
                copy.wait()

        return CombinedWork(wait)
