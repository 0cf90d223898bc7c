"""The requests of an algorithm to its group, and the commit before it writes memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

# Requests are equal only to themselves (`eq=False`): comparing tensors does not give one bool.


@dataclass(frozen=True, eq=False)
class Mean:
    """Ask for the mean of a flat floating-point tensor; the answer may reuse its memory."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllGather:
    """Ask for the flat tensors of all members, any dtype: (n,) → (members, n). The tensor may be reused."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send row i to member i, and ask for its row for this member: (members, n) → (members, n), any dtype."""

    tensor: torch.Tensor


CollectiveRequest: TypeAlias = Mean | AllGather | AllToAll
"""A request that sends a message."""


@dataclass(frozen=True, eq=False)
class Jointly:
    """Compute something for all buckets of the step together, without sending.

    Args:
        function: Takes the items of all buckets in one list and returns one result for each, or None. One
            call serves all buckets whose requests have the same function and kind.
        items: The items of this bucket; the answer is the list of their results.
        kind: Such as a device: items of different kinds can't be computed in one call.
    """

    function: Callable[[list[Any]], Sequence[Any] | None]
    items: Sequence[Any]
    kind: Hashable = None


@dataclass(frozen=True, eq=False)
class AllFinite:
    """Healthy, for a `Commit`, if every element of tensors that all members have received is finite.

    The engine checks the tensors of all buckets together: on an accelerator, with a few launches.
    """

    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Commit:
    """Wait until the whole step may be written: the last request of every `run`.

    The generator is resumed if all buckets of the step get here and are healthy, and closed otherwise.
    Before the commit, memory is only read.

    Args:
        is_healthy: Returns whether the values this bucket has received may be used, as a tensor of one bool.
            Compute it only from values that all members have received, or members would decide differently.
            It is called only if the answer matters, since the check costs a pass.
        writes: Whether memory is written after the commit. If no bucket writes, health is not checked.
        commits_on_device: Whether the plan handles the answer itself. The answer is None if the step is
            healthy. If the host does not wait, it is a tensor of one bool; if that is false, the plan must
            leave memory as it was and make all gradients NaN. Without this the host always waits. After such
            a commit the plan may yield `Jointly`.
    """

    is_healthy: Callable[[], torch.Tensor] | AllFinite
    writes: bool = True
    commits_on_device: bool = False


Request: TypeAlias = Mean | AllGather | AllToAll | Jointly | Commit

Requests: TypeAlias = Generator["Request | tuple[CollectiveRequest, ...]", Any, None]
"""Yields a request, or a tuple of them, and receives the answer, or a tuple of answers in the same order.

All messages that the buckets yield at the same time are sent together; those of one operation, dtype and
device are sent as one.
"""

Answer = TypeVar("Answer")
RunPart: TypeAlias = Generator[Request | tuple[CollectiveRequest, ...], Any, Answer]
"""A part of a `run`: it yields requests and returns a result."""
