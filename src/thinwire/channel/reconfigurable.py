"""The transport of a process group that is configured anew while it lives, and not torch's to name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions

from thinwire.channel import pieces
from thinwire.channel.process_group import OPERATIONS, ProcessGroupWork, _as_bytes, named_failure
from thinwire.channel.transport import Operation, Transport

WHY = (
    "A member has died, stood still for longer than the timeout, was cut off, or has broken the averaging "
    "off because a message of its own failed"
)


class ReconfigurableTransport(Transport):
    """Carries tensors over a process group by its own methods, which `torch.distributed` does not know of.

    It is of one configuration: when the members change, take a new one.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device | None = None) -> None:
        self._group, self._rank, self._size = group, rank, size
        self._device = torch.device("cpu") if device is None else device

    @property
    def size(self) -> int:
        """As `Transport.size`."""
        return self._size

    @property
    def rank(self) -> int:
        """As `Transport.rank`."""
        return self._rank

    @property
    def control_device(self) -> torch.device:
        """As `Transport.control_device`."""
        return self._device

    def all_reduce(
        self, tensor: torch.Tensor, purpose: str, *, operation: Operation = "sum"
    ) -> ProcessGroupWork:
        """As `Transport.all_reduce`."""
        options = AllreduceOptions()
        options.reduceOp = OPERATIONS[operation]  # type: ignore[assignment]
        return self._started(purpose, lambda: self._group.allreduce([tensor], options))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> ProcessGroupWork:
        """As `Transport.all_gather`."""
        # Views of `output`, as bytes: Gloo gathers some types only, and fills a tensor for each member.
        rows = _as_bytes(output).view(self.size, -1)
        own, options = _as_bytes(tensor), AllgatherOptions()

        def start(into: list[torch.Tensor], piece: torch.Tensor) -> Any:
            return self._group.allgather([into], [piece], options)

        return self._started(purpose, lambda: pieces.gathered(rows, own, self._num_pieces(own), start))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> ProcessGroupWork:
        """As `Transport.all_to_all`."""
        received, sent, options = _as_bytes(output), _as_bytes(tensor), AllToAllOptions()

        def start(to: torch.Tensor, piece: torch.Tensor, sizes: list[int]) -> Any:
            return self._group.alltoall_base(to, piece, sizes, sizes, options)

        return self._started(
            purpose, lambda: pieces.swapped(received, sent, self.rank, self._num_pieces(sent), start)
        )

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> ProcessGroupWork:
        """As `Transport.broadcast`."""
        options = BroadcastOptions()
        options.rootRank = source
        return self._started(purpose, lambda: self._group.broadcast([_as_bytes(tensor)], options))

    def send(self, tensor: torch.Tensor, to: int, purpose: str) -> ProcessGroupWork:
        """Send a tensor to one member, which calls `receive`."""
        return self._started(purpose, lambda: self._group.send([_as_bytes(tensor)], to, 0))

    def receive(self, tensor: torch.Tensor, source: int, purpose: str) -> ProcessGroupWork:
        """Receive what one member sends."""
        return self._started(purpose, lambda: self._group.recv([_as_bytes(tensor)], source, 0))

    def _num_pieces(self, sent: torch.Tensor) -> int:
        return pieces.num_pieces(sent, self.size) if self._group.getBackendName() == "torchft-gloo" else 1

    def _started(self, purpose: str, start: Callable[[], Any]) -> ProcessGroupWork:
        with named_failure(purpose, WHY):
            return ProcessGroupWork(start(), purpose, WHY)
