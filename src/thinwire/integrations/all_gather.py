"""A differentiable all-gather."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from thinwire.comm import ProcessGroupTransport, gather_stacked
from thinwire.errors import ConfigError

__all__ = ["AllGatherGrad", "all_gather_grad"]


class AllGatherGrad(torch.autograd.Function):
    """Gather a tensor from every process and stack them; gradients flow back to the processes.

    `AllGatherGrad.apply(tensor, group=None)`, as in Lightning; see `all_gather_grad`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Return shape (processes, *shape). Collective."""
        # Kept for the backward pass, which does not get the group.
        ctx.transport = ProcessGroupTransport(group, tensor.device)
        return gather_stacked(tensor, ctx.transport)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum all processes' gradients of this process's slice. Collective."""
        # Each process gets only its own slice: half the bytes of an all-reduce of everything.
        parts = gradients[0].contiguous()
        received = torch.empty_like(parts)
        rows = (ctx.transport.size, parts[0].numel())
        ctx.transport.all_to_all(received.view(rows), parts.view(rows), "the gradient of a gather").wait()
        return received.sum(0), None


def all_gather_grad(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Gather tensors of one shape and dtype from all processes, and stack them by rank, differentiably.

    Collective, as is the backward pass: the gradient of a process's tensor is the sum of what all processes'
    losses contribute to its slice.

    Args:
        tensor: Any shape, contiguous or not.
        group: The process group, None for the default one.

    Returns:
        Shape (processes, *tensor.shape).

    Cost: a gather of 512 bytes to compare shapes, and one of the tensor; in the backward pass an
    all-to-all in which each process sends every other one the gradient of its slice.

    Raises:
        AttachError: No process group, or one this process is not in.
        CommunicationError: The processes passed different shapes or dtypes; raised on all of them.
        ConfigError: `tensor` is not a tensor.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)  # in a process group of one
        >>> stacked = all_gather_grad(x)
        >>> stacked.square().sum().backward()
        >>> stacked.shape, x.grad
        (torch.Size([1, 2]), tensor([2., 4.]))
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"expected a tensor to gather, got {tensor!r}")
    stacked: torch.Tensor = AllGatherGrad.apply(tensor, group)  # type: ignore[no-untyped-call]
    return stacked
