"""The requests of an algorithm to its group, and the commit before it writes memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

# Requests are equal only to themselves (`eq=False`): comparing tensors does not give one bool.


@dataclass(frozen=True, eq=False)
class Mean:
    """Ask for the mean of a flat floating tensor, given away: the answer may lie in its memory."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllGather:
    """Ask for the tensors of all members, flat, of any type, given away: (n,) → (members, n)."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send row i, of any type, to member i, and ask for its row for this one: (members, n) → (members, n)."""

    tensor: torch.Tensor


CollectiveRequest: TypeAlias = Mean | AllGather | AllToAll
"""A request that sends something."""


@dataclass(frozen=True, eq=False)
class Jointly:
    """Compute something for all buckets of the step at once, without sending.

    Args:
        function: Takes the items of all buckets in one list and returns as many results, or None. Buckets
            whose requests name the same function, and are of one kind, are served by one call.
        items: Of this bucket; the answer is the list of their results.
        kind: Such as a device: what has different ones can't be computed in one call.
    """

    function: Callable[[list[Any]], Sequence[Any] | None]
    items: Sequence[Any]
    kind: Hashable = None


@dataclass(frozen=True, eq=False)
class AllFinite:
    """Healthy, for a `Commit`, if every element of tensors that all members have received is finite.

    The engine looks at those of all buckets at once: on an accelerator, with a few launches.
    """

    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Commit:
    """Wait until all of the step may be written: the last request of every exchange.

    The generator is resumed if all buckets of the step stand here and are healthy, and closed otherwise.
    Before it, memory is only read.

    Args:
        is_healthy: Returns whether what this bucket has received may be used, as a tensor of one bool. It
            must be computed from what all members have received alike, or members would decide differently.
            It is called only if the answer matters, since looking costs a pass.
        writes: Whether memory is written behind the commit. If nothing of the step writes, no one asks.
        commits_on_device: Whether the plan keeps to the answer: None if the step is healthy; or one bool, not
            read back, if the host does not ask. If it is false, the exchange leaves memory as it was and
            makes all gradients NaN. For a plan without this the host asks in any case. After its commit it
            may ask for `Jointly`.
    """

    is_healthy: Callable[[], torch.Tensor] | AllFinite
    writes: bool = True
    commits_on_device: bool = False


Request: TypeAlias = Mean | AllGather | AllToAll | Jointly | Commit

Requests: TypeAlias = Generator["Request | tuple[CollectiveRequest, ...]", Any, None]
"""Yields a request and receives its answer; several messages at once, and their answers in the same order.

All messages that are yielded together, in all buckets, are under way together; those of one operation, type
and device travel as one.
"""

Answer = TypeVar("Answer")
Round: TypeAlias = Generator[Request | tuple[CollectiveRequest, ...], Any, Answer]
"""A part of an exchange: it yields requests and returns their result."""
