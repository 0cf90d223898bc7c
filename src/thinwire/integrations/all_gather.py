"""A gather that gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from thinwire.comm import ProcessGroupTransport, gather_stacked
from thinwire.errors import ConfigError


class AllGatherGrad(torch.autograd.Function):
    """Gather a tensor from every process and stack them; gradients flow back to where each came from.

    `AllGatherGrad.apply(tensor, group=None)`, as in Lightning; `all_gather_grad` says more.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Return shape (processes, *shape). Collective."""
        # Kept for the backward pass, which is not given the group.
        ctx.transport = ProcessGroupTransport(group, tensor.device)
        return gather_stacked(tensor, ctx.transport)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum what all contributed to one's own slice. Collective."""
        # Each process gets its own slice only: half the bytes of a sum of everything, which all would get.
        parts = gradients[0].contiguous()
        received = torch.empty_like(parts)
        rows = (ctx.transport.size, parts[0].numel())
        ctx.transport.all_to_all(received.view(rows), parts.view(rows), "the gradient of a gather").wait()
        return received.sum(0), None


def all_gather_grad(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Gather tensors of one shape and type from all processes, and stack them by rank, differentiably.

    Collective, as is the backward pass: the gradient of a process's tensor is the sum of what all processes'
    losses contribute to its slice.

    Args:
        tensor: Any shape, contiguous or not.
        group: The process group, None for the default one.

    Returns:
        Shape (processes, *tensor.shape).

    Cost: a gather of 18 integers to compare shapes, one of the tensor; in the backward pass an
    exchange in which each process sends every other one the slice that is its tensor's.

    Raises:
        AttachError: No process group, or one this process is not in.
        CommunicationError: The processes brought different shapes or types; raised on all of them.
        ConfigError: `tensor` is none.

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
