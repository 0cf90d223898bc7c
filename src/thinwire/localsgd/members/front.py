"""What `Membership` lets average: a model's changes, or its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from thinwire.channel import Description


class Prepared(NamedTuple):
    """An averaging whose messages have all come, and that has changed nothing yet.

    Attributes:
        commit: Lets it change model and memory. Sends nothing.
        abandon: Forgets it; nothing has changed.
    """

    commit: Callable[[], None]
    abandon: Callable[[], None]


class Front(Protocol):
    """What is averaged."""

    @property
    def step(self) -> int:
        """Steps so far, of those who have been here longest."""

    def weight(self, turns_ahead: int = 0) -> float:
        """Return how much this member's part weighs in an averaging: 0 if it has done nothing."""

    def is_finite(self, turns_ahead: int = 0) -> bool:
        """Return whether what this member would put in is finite."""

    def described(self) -> Description:
        """Return what must be the same on all members, by subject."""

    def state(self) -> Mapping[str, Any]:
        """Return what a newcomer starts from: tensors and plain values."""

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Start from such a state. All is checked before anything is changed."""

    def prepare(self, scale: float) -> Prepared:
        """Send all messages of an averaging. Collective."""

    def committed(self, step: int, *, was_averaged: bool, has_newcomers: bool) -> None:
        """Go on from a committed averaging."""
