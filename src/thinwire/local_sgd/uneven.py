"""Uneven inputs: what a process without input does in a join context."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook

__all__ = ["Shadow"]


class Shadow(JoinHook):
    """How a process that has no more input takes part in the steps of the others.

    Args:
        shadow: To be called for each step of the others.
        average: To be called on all processes when none has input any more.
    """

    def __init__(self, shadow: Callable[[], None], average: Callable[[], None]) -> None:
        self._shadow = shadow
        self._average = average

    def main_hook(self) -> None:
        """The others take a step."""
        self._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out: average what is left, so that all hold the same model."""
        self._average()
