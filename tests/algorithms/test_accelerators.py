"""What differs on accelerators."""

from __future__ import annotations

from typing import Any

import torch

from thinwire.tensors.accelerators import to_device_async


class Pinnable:
    """A tensor that notes how it goes to a device, where there is none."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def pin_memory(self) -> Pinnable:
        self.calls.append("pinned")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> Pinnable:
        self.calls.append((device.type, non_blocking))
        return self


def test_what_the_host_makes_goes_to_a_gpu_without_a_wait() -> None:
    found = {}
    for kind in ("cuda", "mps", "cpu"):
        to_device_async(torch.device(kind), made := Pinnable())  # type: ignore[arg-type]
        found[kind] = made.calls
    assert found == {"cuda": ["pinned", ("cuda", True)], "mps": [("mps", False)], "cpu": [("cpu", False)]}
    tensor = torch.ones(3)
    assert to_device_async(torch.device("cpu"), tensor) is tensor
