"""What differs on accelerators: each operation is a launch, which costs the host microseconds."""

from __future__ import annotations

import torch

__all__ = ["pays_per_launch"]


def pays_per_launch(device: torch.device) -> bool:
    """Return whether few operations on many tensors are worth more than what stays in a core's cache.

    Tests put another function in its place, to run on the CPU what runs on accelerators.

    Args:
        device: Where the tensors lie.
    """
    return device.type != "cpu"
