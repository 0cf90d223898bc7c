"""The transport of a process group that is configured anew while it lives, and not torch's to name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions

from thinwire.channel.process_group import OPERATIONS, GroupTransport, ProcessGroupWork, as_bytes
from thinwire.channel.transport import Operation


class ReconfigurableTransport(GroupTransport):
    """Carries tensors over a process group by its own methods, which `torch.distributed` does not know of.

    It is of one configuration: when the members change, take a new one.
    """

    why = (
        "A member has died, stood still for longer than the timeout, was cut off, or has broken the "
        "averaging off because a message of its own failed"
    )

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def all_reduce(
        self, tensor: torch.Tensor, purpose: str, *, operation: Operation = "sum"
    ) -> ProcessGroupWork:
        """As `Transport.all_reduce`."""
        options = AllreduceOptions()
        options.reduceOp = OPERATIONS[operation]  # type: ignore[assignment]
        return self.started(purpose, lambda: self._group.allreduce([tensor], options))

    def gather(self, rows: list[torch.Tensor], own: torch.Tensor) -> dist.Work:
        """As `GroupTransport.gather`."""
        work: dist.Work = self._group.allgather([rows], [own], AllgatherOptions())
        return work

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, sizes: list[int]) -> dist.Work:
        """As `GroupTransport.exchange`."""
        work: dist.Work = self._group.alltoall_base(received, sent, sizes, sizes, AllToAllOptions())
        return work

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> ProcessGroupWork:
        """As `Transport.broadcast`."""
        options = BroadcastOptions()
        options.rootRank = source
        return self.started(purpose, lambda: self._group.broadcast([as_bytes(tensor)], options))

    def send(self, tensor: torch.Tensor, to: int, purpose: str) -> ProcessGroupWork:
        """Send a tensor to one member, which calls `receive`."""
        return self.started(purpose, lambda: self._group.send([as_bytes(tensor)], to, 0))

    def receive(self, tensor: torch.Tensor, source: int, purpose: str) -> ProcessGroupWork:
        """Receive what one member sends."""
        return self.started(purpose, lambda: self._group.recv([as_bytes(tensor)], source, 0))

    def is_gloo(self, device: torch.device) -> bool:
        """As `GroupTransport.is_gloo`."""
        return bool(self._group.getBackendName() == "torchft-gloo")
