"""What an algorithm asks of its group, and the commit before it writes memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from thinwire.errors import ConfigError

# Requests are equal only to themselves (`eq=False`): comparing tensors does not give one bool.


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
    """Wait until all of the step may be written: the last request of every exchange.

    The generator is resumed if all buckets of the step stand here and are healthy, and closed otherwise.
    Before it, memory is only read.

    Args:
        is_healthy: Returns whether what this bucket has received may be used, as a tensor of one bool. It
            must be computed from what all members have received alike, or members would decide differently.
            It is asked only where the answer matters.
        writes: Whether memory is written behind the commit. If nothing of the step writes, nobody asks.
        writes_where: Whether the exchange keeps to the answer: None if the step is healthy; or one bool, not
            read back, where the host does not ask. If it is false, the exchange leaves memory as it was and
            makes all gradients NaN. Of an exchange without this, a copy of its memory is made and put back.
            Behind its commit it may ask for `Jointly`.

    Raises:
        ConfigError: `is_healthy` is not a function.
    """

    # A function: to look at what was received costs a pass, and where nothing is written nobody looks.
    is_healthy: Callable[[], torch.Tensor] | AllFinite
    writes: bool = True
    writes_where: bool = False

    def __post_init__(self) -> None:
        """Refuse the answer itself, which would be called only where it matters."""
        if not isinstance(self.is_healthy, AllFinite) and not callable(self.is_healthy):
            raise ConfigError(
                f"Commit takes a function, got {type(self.is_healthy).__name__}; write "
                "Commit(lambda: all_finite(mean))"
            )


@dataclass(frozen=True, eq=False)
class AllFinite:
    """Healthy, for a `Commit`, if every element of some tensors is finite.

    The engine looks at those of all buckets at once: on an accelerator, with a few launches.

    Args:
        tensors: As all members have received them.
    """

    tensors: tuple[torch.Tensor, ...]


Request: TypeAlias = Mean | AllGather | AllToAll | Jointly | Commit

Requests: TypeAlias = Generator["Request | tuple[Message, ...]", Any, None]
"""Yields a request and receives its answer; several messages at once, and their answers in the same order.

All messages that are yielded together, in all buckets, are under way together; those of one operation, type
and device travel as one.
"""
