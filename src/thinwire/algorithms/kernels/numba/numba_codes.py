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
        bits, block, last = codebook.bits, blocks.block, codebook.levels[-1]
        coded = _empty(blocks.total, block, bits)
        numels, scales = _numels(blocks), _bits(coded.scales)
        code_passes.encode(
            flat.contiguous().data_ptr(), numels, block, bits, last, coded.codes.data_ptr(), scales
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
        members, num_blocks = received.scales.shape
        bits, block = codebook.bits, blocks.block
        coded = _empty(num_blocks, block, bits)
        room = torch.empty(1, block) if lost is None else lost
        code_passes.average(
            received.codes.data_ptr(),
            _bits(received.scales).reshape(-1),
            members,
            blocks.lengths(room.device)[own].numpy(),
            block,
            bits,
            codebook.levels[-1],
            room.data_ptr(),
            0 if lost is None else 4 * block,
            coded.codes.data_ptr(),
            _bits(coded.scales),
        )
        return coded

    def decode(self, coded: Coded, blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
        """As `CodeKernels.decode`."""
        codes, scales = coded.codes.contiguous(), coded.scales.contiguous()
        code_passes.decode(
            codes.data_ptr(), _bits(scales), _numels(blocks), blocks.block, codebook.bits, flat.data_ptr()
        )

    def remainder(self, flat: torch.Tensor, coded: Coded, blocks: Blocks, codebook: Codebook) -> torch.Tensor:
        """As `CodeKernels.remainder`."""
        rest, codes, scales = torch.empty_like(flat), coded.codes.contiguous(), coded.scales.contiguous()
        code_passes.subtract(
            flat.data_ptr(),
            codes.data_ptr(),
            _bits(scales),
            _numels(blocks),
            blocks.block,
            codebook.bits,
            rest.data_ptr(),
        )
        return rest


def _empty(num_blocks: int, block: int, bits: int) -> Coded:
    codes = torch.empty(num_blocks, packed_bytes(block, bits), dtype=torch.uint8)
    return Coded(codes, torch.empty(num_blocks, dtype=torch.bfloat16))


def _numels(blocks: Blocks) -> NDArray[np.int64]:
    return np.array(blocks.numels, np.int64)


def _bits(scales: torch.Tensor) -> NDArray[np.uint16]:
    """Return scales as NumPy sees them, which has no bf16."""
    return scales.view(torch.int16).numpy().view(np.uint16)
