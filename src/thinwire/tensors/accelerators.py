"""Functions for accelerators, where each operation is a launch that costs the host microseconds."""

from __future__ import annotations

import torch


def is_accelerator(device: torch.device) -> bool:
    """Return whether few operations matter more than data that stays in a core's cache.

    Tests replace this function to run the code for accelerators on the CPU.
    """
    # On the CPU a launch is a call; the cost is how often memory is read and written.
    return device.type != "cpu"


def to_device_async(device: torch.device, made: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor to a device, on CUDA without waiting for it; the same tensor on the CPU."""
    if device.type == "cuda":
        # From pageable memory, the host would wait for all work launched before the copy.
        made = made.pin_memory()
    # Torch keeps pinned memory alive until the copy is done; on "meta" there is no memory.
    return made.to(device, non_blocking=device.type in ("cuda", "meta"))


class DeviceCopies(dict[torch.device, torch.Tensor]):
    """Copies of a host tensor by device, each made once, since the host may have to wait for a copy."""

    def __init__(self, on_host: torch.Tensor) -> None:
        super().__init__()
        self._on_host = on_host

    def __missing__(self, device: torch.device) -> torch.Tensor:
        copied = self[device] = self._on_host.to(device)
        return copied


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
