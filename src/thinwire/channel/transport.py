"""What a transport is: the collectives of one group, as one of its members sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

Operation: TypeAlias = Literal["sum", "max"]

Collective: TypeAlias = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result is there: the host, or on CUDA only the current stream."""


class Transport(ABC):
    """Carries tensors between the members of a group.

    All members make the same calls in the same order, from one thread each. A tensor belongs to the transport
    from the call until `wait` has returned. Every method that sends may raise `CommunicationError`: from the
    call where the backend refuses the tensor, from `wait` where the collective fails.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Members of the group."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This member's place in the group, from 0 on."""

    @property
    @abstractmethod
    def control_device(self) -> torch.device:
        """The device on which small messages for the host are cheapest."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, purpose: str, *, operation: Operation = "sum") -> Work:
        """Replace `tensor` by its sum or its maximum over the members.

        Args:
            tensor: Contiguous, of the same shape and type on all members; overwritten.
            purpose: What for and in which step, for errors.
            operation: "sum" or "max".
        """

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Collect the members' tensors.

        Args:
            output: Shape (members, n), contiguous; written: row i is member i's.
            tensor: Shape (n,), contiguous, of any type; only read.
            purpose: What for and in which step, for errors.
        """

    @abstractmethod
    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Send each member a row of its own.

        Args:
            output: Shape (members, n), contiguous; written: row i comes from member i.
            tensor: Shape (members, n), contiguous, of any type; row i goes to member i. Only read.
            purpose: What for and in which step, for errors.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> Work:
        """Replace `tensor` by that of one member.

        Args:
            tensor: Contiguous, of any type; overwritten on all members but the source.
            source: The rank of the member whose tensor is taken.
            purpose: What for and in which step, for errors.
        """

    def mean(self, tensor: torch.Tensor, purpose: str) -> Work:
        """Replace a floating `tensor` by its mean over the members; as `all_reduce` otherwise.

        Args:
            tensor: Contiguous, floating; overwritten.
            purpose: What for and in which step, for errors.
        """
        # Before the sum: in half precision that would overflow where the mean does not.
        tensor.div_(self.size)
        return self.all_reduce(tensor, purpose)

    def mean_row(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """Average the members' rows for this member: a reduce-scatter.

        Args:
            output: Shape (n,), contiguous, floating; written: the mean of all members' row of this rank.
            tensor: Shape (members, n), contiguous, of the same type; row i goes to member i. Only read.
            purpose: What for and in which step, for errors.
        """
        received = torch.empty_like(tensor)
        return _MeanRow(self.all_to_all(received, tensor, purpose), received, output)


class _MeanRow(NamedTuple):
    work: Work
    received: torch.Tensor
    output: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        # In fp32 at least: a sum in half precision would overflow, and round after each member.
        wide = torch.promote_types(self.output.dtype, torch.float32)
        self.output.copy_(torch.sum(self.received, 0, dtype=wide).div_(len(self.received)))
