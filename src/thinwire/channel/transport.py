"""What a transport is: the collectives of one group, as one of its members sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    def scatter_mean(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Average tensors of the members, each member a part: a reduce-scatter, of parts of any lengths.

        Args:
            flat: Shape (sum of lengths,), contiguous, floating; the part of this rank becomes the mean, what
                the other parts hold then is undefined.
            lengths: Of the parts, by rank.
            purpose: What for and in which step, for errors.
        """
        return self.mean(flat, purpose)  # more than is needed; where bytes count, a transport sends less

    def gather_parts(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Collect the parts of all members.

        Args:
            flat: Shape (sum of lengths,), contiguous; this rank's part is sent, the others are written.
            lengths: Of the parts, by rank.
            purpose: What for and in which step, for errors.
        """
        parts = flat.split_with_sizes(list(lengths))
        return _Several([self.broadcast(part, rank, purpose) for rank, part in enumerate(parts) if len(part)])


class _Several(NamedTuple):
    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
