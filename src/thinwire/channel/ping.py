"""Timing one message between two processes."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from thinwire.channel.process_group import told_where

__all__ = ["ping_seconds"]


def ping_seconds(first: int, second: int, message: torch.Tensor, group: dist.ProcessGroup) -> float | None:
    """Send a message from one process to another and back; to be called on both, others may leave it out.

    Args:
        first: The process that starts, and measures; a rank in the group.
        second: The other.
        message: Of the same shape and type on both; overwritten.
        group: The process group.

    Returns:
        Seconds a direction on the first, None on the second.

    Raises:
        CommunicationError: The backend failed.
    """
    here = group.rank()
    peer = dist.get_global_rank(group, second if here == first else first)
    with told_where(f"a message between the processes {first} and {second}"):
        if here == second:
            dist.recv(message, src=peer, group=group)
            dist.send(message, dst=peer, group=group)
            return None
        start = time.perf_counter()
        dist.send(message, dst=peer, group=group)
        dist.recv(message, src=peer, group=group)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        return (time.perf_counter() - start) / 2
