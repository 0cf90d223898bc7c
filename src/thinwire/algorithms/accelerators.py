"""What differs on accelerators: each operation is a launch, which costs the host microseconds."""

from __future__ import annotations

import warnings

import torch

__all__ = ["note_shortfall", "pays_per_launch", "shortfalls"]

_shortfalls: dict[str, None] = {}  # in the order in which they were found


def pays_per_launch(device: torch.device) -> bool:
    """Return whether few operations on many tensors are worth more than what stays in a core's cache.

    Tests put another function in its place, to run on the CPU what runs on accelerators.

    Args:
        device: Where the tensors lie.
    """
    # On the CPU a launch is a call, and what counts is how often memory is read and written.
    return device.type != "cpu"


def note_shortfall(sentence: str) -> None:
    """Warn once in this process that slower kernels serve, and keep it for `shortfalls`.

    Args:
        sentence: Why, and which serve.
    """
    if sentence not in _shortfalls:
        _shortfalls[sentence] = None
        warnings.warn(sentence, stacklevel=2)


def shortfalls(device: torch.device) -> tuple[str, ...]:
    """Return why slower kernels than those made for a device have served it; nothing on the CPU.

    Args:
        device: Which.
    """
    return tuple(_shortfalls) if pays_per_launch(device) else ()
