"""Giving all processes the tensors of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from thinwire.errors import CommunicationError

__all__ = ["copy_from_first"]


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Make every tensor, in place, what it is on the group's first process; exact to the bit.

    Collective. Tensors travel as bytes, one message a device.

    Args:
        tensors: The same shapes and types in the same order on every process.
        group: The process group.

    Raises:
        CommunicationError: The backend fails.
    """
    by_device = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            by_device[tensor.device].append(tensor.detach())
    for members in by_device.values():
        flat = torch.cat([_as_bytes(tensor) for tensor in members])
        try:
            dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
        except RuntimeError as error:
            raise CommunicationError(
                f"copying {len(flat)} bytes from the group's first process failed: {error}. A process has "
                "died, or its model is another one; look for the first error among all processes"
            ) from error
        parts = flat.split_with_sizes([tensor.numel() * tensor.element_size() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
