"""What an algorithm asks of its group, and the gate before it writes memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = [
    "AllGather",
    "AllToAll",
    "Commit",
    "Jointly",
    "Mean",
    "Message",
    "Request",
    "Requests",
    "all_finite",
]


@dataclass(frozen=True, eq=False)
class Mean:
    """Ask for the mean over the members.

    Args:
        tensor: Flat, floating, given away. The answer may lie in its memory.
    """

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllGather:
    """Ask for the tensors of all members: (n,) → (members, n).

    Args:
        tensor: Flat, of any type, given away.
    """

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send each member a row of its own, and ask for those meant for this one: (members, n) → (members, n).

    Args:
        tensor: Shape (members, n), of any type, given away. Row i goes to member i; in the answer it comes
            from member i.
    """

    tensor: torch.Tensor


Message: TypeAlias = Mean | AllGather | AllToAll
"""A request that sends something."""


@dataclass(frozen=True, eq=False)
class Jointly:
    """Compute something for all buckets of the step at once, without sending.

    Args:
        function: Takes the items of all buckets in one list and returns as many results. Buckets whose
            requests name the same function are served by one call.
        items: Of this bucket; the answer is the list of their results.
    """

    function: Callable[[list[Any]], Sequence[Any]]
    items: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Commit:
    """Pass the gate: the last request of every exchange.

    The generator is resumed if all buckets of the step stand here and are healthy, and closed otherwise.
    Before it, memory is only read.

    Args:
        is_healthy: Returns whether what this bucket has received may be used, as a tensor of one bool. It
            must be computed from what all members have received alike, or members would decide differently.
            It is asked only where the answer matters.
        writes: Whether memory is written behind the gate. If nothing of the step writes, nobody asks.
    """

    is_healthy: Callable[[], torch.Tensor]
    writes: bool = True


Request: TypeAlias = Mean | AllGather | AllToAll | Jointly | Commit

Requests: TypeAlias = Generator["Request | tuple[Message, ...]", Any, None]
"""Yields a request and receives its answer; several messages at once, and their answers in the same order.

All messages that are yielded together, in all buckets, are under way together; those of one operation, type
and device travel as one.
"""


def all_finite(*tensors: torch.Tensor) -> torch.Tensor:
    """Return whether every element of every tensor is finite, as a tensor of one bool; not read back.

    Tensors without elements are finite. They may lie on several devices; the answer is on the first one's.
    """
    extremes = [
        torch.stack(torch.aminmax(each)).double() for each in tensors if each.numel()
    ]  # NaN wins both
    if not extremes:
        return torch.tensor(True)
    on_one_device = [pair.to(extremes[0].device, non_blocking=True) for pair in extremes]
    return torch.cat(on_one_device).isfinite().all()
