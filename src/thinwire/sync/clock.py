"""Times a step: the host's share by its own clock, what did not overlap by the accelerator's events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thinwire.comm import Traffic
from thinwire.sync.streams import WITHOUT_STREAMS, record_event


class StepClock:
    """Adds up the time inside Thinwire, and from gradients being ready until their means are there."""

    def __init__(self) -> None:
        self.arithmetic_seconds = 0.0  # inside, and not waiting for messages
        self.device = torch.device("cpu")  # of the gradients
        self._exposed_seconds = 0.0
        self._ready: tuple[float, torch.device, torch.Event | None] = (0.0, self.device, None)
        self._unread: deque[tuple[torch.Event, torch.Event]] = deque()
        self._is_inside = False

    @property
    def exposed_seconds(self) -> float:
        """From each step's last gradients being ready to its end; of steps that the device has ended."""
        # In the order of the steps: what is behind one that has not ended has not ended either.
        while self._unread and all(event.query() for event in self._unread[0]):
            start, end = self._unread.popleft()
            # A step lets its last stream wait for those of its buckets; gradients that are ready on one that
            # it does not know may come behind its end, and then nothing was exposed.
            self._exposed_seconds += max(0.0, start.elapsed_time(end) / 1e3)
        return self._exposed_seconds

    @contextmanager
    def inside(self, traffic: Traffic, *, are_ready: bool = True) -> Iterator[None]:
        """Count what is done within as Thinwire's; of nested ones only the outer one counts."""
        # Adapters, engines and steps each ask, and any may be the outer one; the engines of a local SGD have
        # one clock, so that an average of one within the other's time counts once.
        if self._is_inside:
            yield
            return
        start, waited = time.perf_counter(), traffic.waiting_seconds
        self._is_inside = True
        if are_ready:
            # The condition spares the CPU's steps a call.
            event = None if self.device.type in WITHOUT_STREAMS else record_event(self.device)
            self._ready = (start, self.device, event)
        try:
            yield
        finally:
            self._is_inside = False
            waited = traffic.waiting_seconds - waited
            self.arithmetic_seconds += time.perf_counter() - start - waited

    @contextmanager
    def exposed(self, traffic: Traffic) -> Iterator[None]:
        """Count what the host waits within: of steps that end during the next forward pass."""
        waited = traffic.waiting_seconds
        yield
        self._exposed_seconds += traffic.waiting_seconds - waited

    def end_step(self) -> None:
        """Note that all means are there."""
        start, device, event = self._ready
        # The host is ahead of an accelerator: its own clock would tell when the work was issued. Both events
        # are on one device: two devices have no common clock.
        if event is None or (end := record_event(device)) is None:
            self._exposed_seconds += time.perf_counter() - start
        else:
            self._unread.append((event, end))
            # Read as soon as they may be, so that they do not become many; no one waits for them.
            _ = self.exposed_seconds
