"""Blocks as they travel: packed codes, and a scale for each block.

A scale travels as bf16, which has fp32's range: half the bytes, so that blocks may be half as long. Codes are
found for the scale as it travels. A block that has anything that is not finite has such a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from thinwire.algorithms.low_bit.packing import packed_bytes

__all__ = ["SCALE_BYTES", "Coded", "block_bytes"]

SCALE_BYTES = 2


class Coded(NamedTuple):
    """Blocks as they travel.

    Attributes:
        codes: Packed, uint8, shape (…, blocks, bytes).
        scales: bf16, shape (…, blocks).
    """

    codes: torch.Tensor
    scales: torch.Tensor


def block_bytes(block: int, bits: int) -> int:
    """Return the bytes that a block takes, its scale included.

    Args:
        block: Its elements.
        bits: Of each.
    """
    return packed_bytes(block, bits) + SCALE_BYTES
