"""Codes by compiled passes: fp32 on the CPU, to the nearest level.

What they have no code for, PyTorch's kernels do.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.kernels.base import CodeKernels
from thinwire.kernels.numba import code_passes
from thinwire.kernels.torch_codes import TorchCodes
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded, packed_bytes
from thinwire.tensors.rounding import Draws


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
            *_rows(coded),
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
        # Compiled code writes fp32 to its address, whatever torch's default type.
        room = torch.empty(max(code_passes.TOGETHER, block), dtype=torch.float32) if lost is None else lost
        address, row_bytes, _ = _rows(received)
        code_passes.average(
            address,
            row_bytes,
            received.message.shape[0],
            _numels(blocks),
            own.start,
            own.stop,
            block,
            codebook.bits,
            codebook.levels[-1],
            room.data_ptr(),
            lost is not None,
            coded.message.data_ptr(),
            blocks.share,
        )
        return coded

    def decode(self, coded: Coded, blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
        """As `CodeKernels.decode`."""
        code_passes.decode(*_rows(coded), _numels(blocks), blocks.block, codebook.bits, flat.data_ptr())

    def remainder(self, flat: torch.Tensor, coded: Coded, blocks: Blocks, codebook: Codebook) -> torch.Tensor:
        """As `CodeKernels.remainder`."""
        rest = torch.empty_like(flat)
        code_passes.subtract(
            flat.data_ptr(),
            *_rows(coded),
            _numels(blocks),
            blocks.block,
            codebook.bits,
            rest.data_ptr(),
        )
        return rest


def _numels(blocks: Blocks) -> NDArray[np.int64]:
    return np.array(blocks.numels, np.int64)


def _rows(coded: Coded) -> tuple[int, int, int]:
    """Return the address of the first row, the bytes from one to the next, and the blocks of each."""
    # Of several buckets' messages that travelled as one, rows lie further apart than they are long.
    return coded.message.data_ptr(), coded.message.stride(0), coded.share
