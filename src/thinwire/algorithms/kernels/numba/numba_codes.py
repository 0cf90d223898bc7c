"""Codes by compiled passes: fp32 on the CPU, to the nearest level.

What they have no code for, PyTorch's kernels do.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.algorithms.kernels.codes import CodeKernels
from thinwire.algorithms.kernels.numba import code_passes
from thinwire.algorithms.kernels.torch_codes import TorchCodes
from thinwire.algorithms.low_bit.blocks import Blocks
from thinwire.algorithms.low_bit.codebooks import Codebook
from thinwire.algorithms.low_bit.coded import Coded
from thinwire.algorithms.low_bit.packing import packed_bytes
from thinwire.algorithms.low_bit.rounding import Draws

__all__ = ["NumbaCodes"]


class NumbaCodes(CodeKernels):
    """Compiled passes over all blocks of a bucket; see `CodeKernels` for what each method does."""

    def __init__(self) -> None:
        self._others = TorchCodes()

    def encoded(self, flat: torch.Tensor, blocks: Blocks, codebook: Codebook, draws: Draws | None) -> Coded:
        """As `CodeKernels.encoded`; stochastic rounding by PyTorch's operations."""
        if draws is not None:
            return self._others.encoded(flat, blocks, codebook, draws)
        block, size = blocks.block, packed_bytes(blocks.block, codebook.bits)
        coded = Coded.empty(blocks.total, blocks.num_members, blocks.share, size)
        code_passes.encode(
            flat.contiguous().data_ptr(),
            _numels(blocks),
            block,
            codebook.bits,
            codebook.levels[-1],
            *_places(coded),
        )
        return coded

    def averaged(
        self,
        received: Coded,
        blocks: Blocks,
        own: slice,
        codebook: Codebook,
        draws: Draws | None,
        lost: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> Coded:
        """As `CodeKernels.averaged`; stochastic rounding by PyTorch's operations."""
        if draws is not None:
            return self._others.averaged(received, blocks, own, codebook, draws, lost, dtype)
        num_blocks, block = own.stop - own.start, blocks.block
        coded = Coded.empty(num_blocks, 1, blocks.share, packed_bytes(block, codebook.bits))
        # Room for one block, used again and again, unless what is lost is wanted of all.
        # Compiled code writes fp32 to its address, whatever torch's default type.
        room = torch.empty(1, block, dtype=torch.float32) if lost is None else lost
        code_passes.average(
            *_places(received)[:3],
            len(received.message),
            blocks.lengths(room.device)[own].numpy(),
            block,
            codebook.bits,
            codebook.levels[-1],
            room.data_ptr(),
            0 if lost is None else 4 * block,
            *_places(coded)[:2],
        )
        return coded

    def decode(self, coded: Coded, blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
        """As `CodeKernels.decode`."""
        code_passes.decode(*_places(coded), _numels(blocks), blocks.block, codebook.bits, flat.data_ptr())

    def remainder(self, flat: torch.Tensor, coded: Coded, blocks: Blocks, codebook: Codebook) -> torch.Tensor:
        """As `CodeKernels.remainder`."""
        rest = torch.empty_like(flat)
        code_passes.subtract(
            flat.data_ptr(),
            *_places(coded),
            _numels(blocks),
            blocks.block,
            codebook.bits,
            rest.data_ptr(),
        )
        return rest


def _numels(blocks: Blocks) -> NDArray[np.int64]:
    return np.array(blocks.numels, np.int64)


def _places(coded: Coded) -> tuple[int, NDArray[np.uint16], int, int]:
    """Return the address of the first codes, the message as scales, the bytes of a row, and its blocks."""
    message = coded.message
    row_bytes = message.stride(0)
    # Of several buckets' messages that travelled as one, rows lie further apart than they are long.
    whole = message.as_strided(((len(message) - 1) * row_bytes + message.shape[1],), (1,))
    scales = whole.view(torch.int16).numpy().view(np.uint16)  # NumPy has no bf16
    return coded.codes.data_ptr(), scales, row_bytes, coded.share
