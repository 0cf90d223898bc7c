"""The protocol of kernels for few bits: from numbers to codes and scales, and back."""

from __future__ import annotations

from typing import Protocol

import torch

from thinwire.tensors.blocks import Blocks
from thinwire.tensors.codebooks import Codebook
from thinwire.tensors.coded import Coded
from thinwire.tensors.rounding import Draws


class CodeKernels(Protocol):
    """The arithmetic of averaging in few bits, for the tensors that its backend serves: fp32 or fp64, flat.

    What is decoded is the same to the bit whatever the backend: a level times the scale, rounded once. What
    is encoded may differ in the last bit of a scale.
    """

    # Members may have other backends, and all must decode the mean alike. What each encodes, all receive.

    def encoded(self, flat: torch.Tensor, blocks: Blocks, codebook: Codebook, draws: Draws | None) -> Coded:
        """Return all blocks as they travel: a row for each member, which averages it.

        Args:
            flat: The tensors that `blocks` divides, one after the other; only read.
            blocks: Of them.
            codebook: The levels.
            draws: For stochastic rounding; None for the nearest level.
        """

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
        """Return the mean of what members have sent of some blocks, coded again: one row.

        Args:
            received: A row of each member.
            blocks: Of the bucket.
            own: Which of them were received.
            codebook: The levels.
            draws: Of these blocks, for stochastic rounding; None for the nearest level.
            lost: Takes what coding the mean has lost, shape (blocks, block); behind the end of a short block
                anything. None to forget it.
            dtype: Of the computation, fp32 or fp64.
        """

    def decode(self, coded: Coded, blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
        """Write the numbers that all blocks stand for; NaN where a scale is not finite.

        Args:
            coded: All blocks.
            blocks: Of the tensors.
            codebook: The levels.
            flat: Written.
        """

    def remainder(self, flat: torch.Tensor, coded: Coded, blocks: Blocks, codebook: Codebook) -> torch.Tensor:
        """Return what all blocks have not sent of some numbers.

        Args:
            flat: The numbers, only read.
            coded: What was sent of them.
            blocks: Of the tensors.
            codebook: The levels.
        """
