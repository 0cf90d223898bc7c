"""A transport around another one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.channel.transport import Collective, Operation, Transport, Work


class Wrapped(Transport):
    """Hands every message to another transport; a subclass says in `send` what happens besides.

    Attributes:
        transport: As given.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def send(
        self, collective: Collective, tensor: torch.Tensor, purpose: str, start: Callable[[], Work]
    ) -> Work:
        """Start a collective.

        Args:
            collective: Which one.
            tensor: What this member hands over.
            purpose: What for, as its sender says.
            start: Starts it on the other transport.
        """
        return start()

    @property
    def size(self) -> int:
        """As of the other transport."""
        return self.transport.size

    @property
    def rank(self) -> int:
        """As of the other transport."""
        return self.transport.rank

    @property
    def control_device(self) -> torch.device:
        """As of the other transport."""
        return self.transport.control_device

    def all_reduce(self, tensor: torch.Tensor, purpose: str, *, operation: Operation = "sum") -> Work:
        """As `Transport.all_reduce`."""
        inner = self.transport
        return self.send(
            "all_reduce", tensor, purpose, lambda: inner.all_reduce(tensor, purpose, operation=operation)
        )

    def mean(self, tensor: torch.Tensor, purpose: str) -> Work:
        """As `Transport.mean`."""
        # Call the inner transport's own `mean`, which may divide in the same pass.
        return self.send("all_reduce", tensor, purpose, lambda: self.transport.mean(tensor, purpose))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """As `Transport.all_gather`."""
        inner = self.transport
        return self.send("all_gather", tensor, purpose, lambda: inner.all_gather(output, tensor, purpose))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, purpose: str) -> Work:
        """As `Transport.all_to_all`."""
        inner = self.transport
        return self.send("all_to_all", tensor, purpose, lambda: inner.all_to_all(output, tensor, purpose))

    def broadcast(self, tensor: torch.Tensor, source: int, purpose: str) -> Work:
        """As `Transport.broadcast`."""
        inner = self.transport
        return self.send("broadcast", tensor, purpose, lambda: inner.broadcast(tensor, source, purpose))
