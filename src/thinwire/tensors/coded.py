"""Blocks as they travel: packed codes, and a scale for each block.

Codes are found for the scale as it travels. A block that has anything that is not finite has such a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.tensors.packing import packed_bytes

# bf16, which has fp32's range: with half the bytes of fp32, blocks may be half as long for as much.
SCALE_BYTES = 2


@dataclass(frozen=True)
class Coded:
    """Blocks as they travel: rows of equally many, in each the scales first and then the codes.

    Kernels write codes where they are sent from and read them where they arrive: nothing is copied between.

    Attributes:
        message: uint8, shape (rows, bytes); the bytes of a row lie one after the other.
        share: Blocks of a row.
    """

    message: torch.Tensor
    share: int

    @property
    def scales(self) -> torch.Tensor:
        """bf16, shape (rows, blocks); a view."""
        return self.message[:, : SCALE_BYTES * self.share].view(torch.bfloat16)

    @property
    def codes(self) -> torch.Tensor:
        """Packed, uint8, shape (rows, blocks, bytes); a view."""
        codes = self.message[:, SCALE_BYTES * self.share :]
        return codes.view(len(codes), self.share, codes.shape[1] // self.share)

    @classmethod
    def empty(cls, num_blocks: int, rows: int, share: int, size: int) -> Coded:
        """Allocate blocks on the CPU. Padding blocks in the last rows are zero."""
        coded = cls(torch.empty(rows, share * (SCALE_BYTES + size), dtype=torch.uint8), share)
        # They are sent too, and a scale that is not finite would have the step taken back.
        for row in range(num_blocks // share, rows):
            used = max(0, num_blocks - row * share)
            coded.scales[row, used:] = 0
            coded.codes[row, used:] = 0
        return coded

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor, rows: int, share: int) -> Coded:
        """Return a message of blocks, with zeros behind them."""
        missing = rows * share - len(scales)
        if missing:
            codes = torch.cat([codes, codes.new_zeros(missing, codes.shape[1])])
            scales = torch.cat([scales, scales.new_zeros(missing)])
        # As bytes of one message: two would cost a latency more.
        parts = [scales.view(torch.uint8).view(rows, -1), codes.view(rows, -1)]
        return cls(torch.cat(parts, dim=1), share)

    @classmethod
    def arrived(cls, message: torch.Tensor, share: int) -> Coded:
        """Return what was received: a copy only if it does not begin at a whole number of bf16."""
        is_even = message.storage_offset() % SCALE_BYTES == 0 and message.stride(0) % SCALE_BYTES == 0
        return cls(message if is_even else message.contiguous(), share)


def block_bytes(block: int, bits: int) -> int:
    """Return the bytes that a block takes, its scale included."""
    return packed_bytes(block, bits) + SCALE_BYTES
