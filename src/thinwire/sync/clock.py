"""Times a step: host time by its own clock, exposed time by the accelerator's events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thinwire.comm import Traffic
from thinwire.sync.streams import WITHOUT_STREAMS, record_event


class StepClock:
    """Adds up the time inside Thinwire, and from ready gradients to their means; holds the traffic."""

    def __init__(self) -> None:
        self.traffic = Traffic()  # counts the waits for messages
        self.arithmetic_seconds = 0.0  # inside Thinwire, without waiting for messages
        self.device = torch.device("cpu")  # of the gradients
        self._exposed_seconds = 0.0
        self._ready: tuple[float, torch.device, torch.Event | None] = (0.0, self.device, None)
        self._unread: deque[tuple[torch.Event, torch.Event]] = deque()
        self._is_inside = False

    @property
    def exposed_seconds(self) -> float:
        """Time from each step's last ready gradients to its end, for steps that the device has ended."""
        # In step order: a step after one that has not ended has not ended either.
        while self._unread and all(event.query() for event in self._unread[0]):
            start, end = self._unread.popleft()
            # A step's last stream waits for its buckets' streams. Gradients that become ready on an unknown
            # stream may be later than the step's end: then nothing was exposed.
            self._exposed_seconds += max(0.0, start.elapsed_time(end) / 1e3)
        return self._exposed_seconds

    @contextmanager
    def inside(self, *, are_ready: bool = True) -> Iterator[None]:
        """Count the time inside this context as Thinwire's; nested contexts count once."""
        # Adapters, engines and steps all enter this, and any may be the outer one. The engines of a LocalSGD
        # share a clock, so that an average within another's time counts once.
        if self._is_inside:
            yield
            return
        start, waited = time.perf_counter(), self.traffic.waiting_seconds
        self._is_inside = True
        if are_ready:
            # The condition saves a call on the CPU.
            event = None if self.device.type in WITHOUT_STREAMS else record_event(self.device)
            self._ready = (start, self.device, event)
        try:
            yield
        finally:
            self._is_inside = False
            waited = self.traffic.waiting_seconds - waited
            self.arithmetic_seconds += time.perf_counter() - start - waited

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the host's waits inside as exposed, for steps that end during the next forward pass."""
        waited = self.traffic.waiting_seconds
        yield
        self._exposed_seconds += self.traffic.waiting_seconds - waited

    def end_step(self) -> None:
        """Record that all means have arrived."""
        start, device, event = self._ready
        # The host runs ahead of an accelerator: its clock would show when the work was issued. Both events
        # are on one device: two devices have no common clock.
        if event is None or (end := record_event(device)) is None:
            self._exposed_seconds += time.perf_counter() - start
        else:
            self._unread.append((event, end))
            # Read events as soon as possible, without waiting, so that they do not pile up.
            _ = self.exposed_seconds
