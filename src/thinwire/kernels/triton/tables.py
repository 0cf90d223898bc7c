"""Tables that kernels look up: addresses and sizes of many tensors, and which tile of which a program has.

A table is copied to the device when something in it is new, which in most steps nothing is: DDP's buckets and
the residuals stay where they are, and the allocator gives a step the memory that the one before had.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.kernels.device_cache import on_device


def padded(size: int) -> int:
    """Return the next power of two: tiles have no other sizes."""
    return 1 << (size - 1).bit_length()


def table_of(rows: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """Return rows of numbers on a device, int64, shape (rows, numbers)."""
    # 64 bits: addresses, and sizes of which two are multiplied.
    return on_device(("table", *rows), lambda: torch.tensor(rows, dtype=torch.int64), device)


def tiles_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return for each program its row of a table and its tile of that, int32, shape (programs, 2)."""

    def made() -> torch.Tensor:
        sizes = torch.tensor(counts)
        owners = torch.arange(len(sizes)).repeat_interleave(sizes)
        tiles = torch.arange(len(owners)) - (sizes.cumsum(0) - sizes)[owners]
        # Side by side, so that a program reads both from one line of memory.
        return torch.stack([owners, tiles], dim=1).int()

    return on_device(("tiles", *counts), made, device)


def each_of(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the matrices of all batches, contiguous ones."""
    # A copy lives as long as the caller's list: a kernel that was launched has its address alone.
    whole = [batch if not len(batch) or batch[0].is_contiguous() else batch.contiguous() for batch in batches]
    return [each for batch in whole for each in batch.unbind()]
