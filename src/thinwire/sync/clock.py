"""Where a step's time goes, as the host sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.channel import Traffic

__all__ = ["StepClock"]


class StepClock:
    """Adds up the time inside Thinwire, and from gradients being ready until their means are there.

    Attributes:
        arithmetic_seconds: Inside, and not waiting for messages.
        exposed_seconds: From each step's last gradients being ready to `end_step`.
    """

    def __init__(self) -> None:
        self.arithmetic_seconds = self.exposed_seconds = 0.0
        self._ready = 0.0
        self._is_inside = False

    @contextmanager
    def inside(self, traffic: Traffic, *, are_ready: bool = True) -> Iterator[None]:
        """Count what is done within as Thinwire's; where one stands in another, only the outer one counts.

        Args:
            traffic: Has the time spent waiting.
            are_ready: Whether gradients have become ready at the beginning.
        """
        # Fronts, engines and steps each ask, and any may be the outer one; the engines of a local SGD have
        # one clock, so that an average of one within the other's time counts once.
        if self._is_inside:
            yield
            return
        start, waited = time.perf_counter(), traffic.waiting_seconds
        self._is_inside = True
        if are_ready:
            self._ready = start
        try:
            yield
        finally:
            self._is_inside = False
            waited = traffic.waiting_seconds - waited
            self.arithmetic_seconds += time.perf_counter() - start - waited

    def end_step(self) -> None:
        """Note that all means are there."""
        self.exposed_seconds += time.perf_counter() - self._ready
