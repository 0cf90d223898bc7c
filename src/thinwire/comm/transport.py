"""Transport: the collectives of one group, from the view of one rank; and their work handles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

from thinwire.wire import Collective

Operation: TypeAlias = Literal["sum", "mean", "max"]


@dataclass(frozen=True)
class Message:
    """One rank's part of a collective."""

    collective: Collective
    tensor: torch.Tensor  # this rank's input
    output: torch.Tensor  # receives the result; for an all-reduce and a broadcast, `tensor` itself
    purpose: str  # errors name it: the use, and the step
    operation: Operation = "sum"  # for an all-reduce
    source: int = 0  # for a broadcast, the source rank

    def __str__(self) -> str:
        """Describe the message and its purpose, for errors."""
        what = f"{self.tensor.numel()} × {self.tensor.dtype}"
        words = {
            "all_reduce": f"the {'maximum' if self.operation == 'max' else 'average'} of {what}",
            "all_gather": f"the gather of {what}",
            "all_to_all": f"the exchange of {what}",
            "broadcast": f"the copy of {what} from process {self.source} of the group",
        }
        return f"{self.purpose}: {words[self.collective]}"


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Block until the result is available: the host, or on CUDA only the current stream."""


class CombinedWork(NamedTuple):
    """Work made of other work: its `wait` is a function that waits for them, and does more."""

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
        """The device on which small messages for computations on gradients are cheapest."""
        return self.control_device

    @abstractmethod
    def start(self, message: Message) -> Work:
        """Start a collective, without waiting for it; the methods below call this."""

    def all_reduce(self, tensor: torch.Tensor, purpose: str, *, operation: Operation = "sum") -> Work:
        """Replace `tensor` by its sum, mean (floating dtypes only) or maximum over the ranks."""
        return self.start(Message("all_reduce", tensor, tensor, purpose, operation))

    def mean(self, tensor: torch.Tensor, purpose: str) -> Work:
        """Replace a floating `tensor` by its mean over the ranks."""
        return self.all_reduce(tensor, purpose, operation="mean")

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Write the `tensor` of rank i, (n,) of any dtype, to row i of `output`, (size, n)."""
        return self.start(Message("all_gather", tensor, output, purpose))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Send row i of `tensor`, of any dtype, to rank i; receive row i of `output` from rank i."""
        return self.start(Message("all_to_all", tensor, output, purpose))

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> Work:
        """Replace `tensor`, of any dtype, by that of rank `source`."""
        return self.start(Message("broadcast", tensor, tensor, purpose, source=source))

    def scatter_mean(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Replace this rank's part of `flat` by its mean, and overwrite the others; parts have `lengths`."""
        return self.mean(flat, purpose)  # more than needed; if bytes matter, a transport overrides this

    def gather_parts(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Send this rank's part of `flat`, and receive those of the others; parts have `lengths`."""
        parts = flat.split_with_sizes(list(lengths))
        copies = [self.broadcast(part, rank, purpose) for rank, part in enumerate(parts) if len(part)]

        def wait() -> None:
            for copy in copies:
                copy.wait()

        return CombinedWork(wait)
