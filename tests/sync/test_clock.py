"""What did not overlap is timed by an accelerator's own events, and nobody waits for them."""

from __future__ import annotations

import pytest
import torch

from thinwire.comm import Traffic
from thinwire.sync.clock import StepClock

CUDA = torch.device("cuda", 0)


class Device:
    """Events are recorded 2 ms apart; those up to `done` have ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self
        self.recorded: list[object] = []
        self.done = 0

        class Event:
            def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
                assert (device, enable_timing) == (CUDA, True)

            def record(self, stream: object) -> None:
                assert stream == "its stream"
                device.recorded.append(self)

            def query(self) -> bool:
                return device.recorded.index(self) < device.done

            def elapsed_time(self, end: Event) -> float:
                assert self.query()
                assert end.query()
                return 2.0 * (device.recorded.index(end) - device.recorded.index(self))

        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "its stream")


def test_by_events_read_once_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock, traffic = Device(monkeypatch), StepClock(), Traffic()
    clock.device = CUDA
    for _ in range(3):
        for _ in range(2):  # buckets: the last one's gradients count
            with clock.inside(traffic), clock.inside(traffic):
                pass
        clock.end_step()
    assert clock.exposed_seconds == 0
    device.done = 8  # two steps, and the third but for its end
    assert clock.exposed_seconds == pytest.approx(0.004)
    device.done = 9
    assert clock.exposed_seconds == pytest.approx(0.006)
    assert not clock._unread  # what has ended is not kept
    assert len(device.recorded) == 9
    assert 0 < clock.arithmetic_seconds < 1
