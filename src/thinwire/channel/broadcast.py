"""Giving all processes the tensors of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from thinwire.channel.process_group import told_where
from thinwire.errors import CommunicationError

__all__ = ["copy_from"]


def copy_from(is_source: bool, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Make every tensor, in place, what it is on one process; exact to the bit.

    Collective. Tensors travel as bytes, one message a device.

    Args:
        is_source: Whether this process offers its own; of several, the last one's are taken.
        tensors: The same shapes and types in the same order on every process.
        group: The process group.

    Raises:
        CommunicationError: No process offers its own, or the backend fails.
    """
    by_device = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            by_device[tensor.device].append(tensor.detach())
    for device, members in by_device.items():
        source = _source(is_source, device, group)
        flat = torch.cat([_as_bytes(tensor) for tensor in members])
        with told_where(f"copying {len(flat)} bytes from process {source} of the group"):
            dist.broadcast(flat, src=dist.get_global_rank(group, source), group=group)
        parts = flat.split_with_sizes([tensor.numel() * tensor.element_size() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _source(is_source: bool, device: torch.device, group: dist.ProcessGroup) -> int:
    """The group's last process that offers its own tensors."""
    offered = torch.tensor(group.rank() if is_source else -1, device=device)
    with told_where("finding the process to copy from"):
        dist.all_reduce(offered, op=dist.ReduceOp.MAX, group=group)
    if offered < 0:
        raise CommunicationError("no process of the group offers its tensors to the others")
    return int(offered)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
