"""The protocols of kernels: low-rank arithmetic, codes of few bits, and few entries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

import torch

from thinwire.kernels.matrices import Asked, Factors, MatrixGroup, Reconstruction, Write
from thinwire.tensors.blocks import Blocks, Chunks
from thinwire.tensors.coded import Codebook, Coded
from thinwire.tensors.rounding import Draws

# The largest matrix rank that Numba serves. It stands here to be known without importing Numba.
FACTOR_ROWS = 4


class Kernels(Protocol):
    """The arithmetic of a low-rank step, for the groups that its backend serves.

    Every method takes all groups of a device at once, so that a backend on which each launch costs may serve
    groups of many shapes with one. Inside a group, all matrices have one shape and type; groups may differ in
    both. A backend does all of the protocol for what it serves, and hands on itself what it has no code
    for. The loss scale stays a tensor down to the backend: to read it on the host waits for an accelerator.

    M is a gradient plus its residual. A backend may add them in place when it is first asked for anything of
    a step's matrices, or whenever it reads them; so residuals are the same until `reconstruct`, and are given
    every time.

    Attributes:
        gradient_types: Types of gradients that may be a group's matrices. Others are copied to fp32 first.
        lays_by_shape: Whether on an accelerator residuals of one shape, of all buckets, are to lie side by
            side.
    """

    gradient_types: ClassVar[Collection[torch.dtype]]
    lays_by_shape: ClassVar[bool] = False

    def products(self, items: Sequence[Asked]) -> list[torch.Tensor]:
        """Return (M Q)ᵀ of every matrix, for each group (matrices, r, rows)."""

    def projections(self, items: Sequence[Asked]) -> list[torch.Tensor]:
        """Return P̂ᵀ M of every matrix, for each group (matrices, r, columns)."""

    def reconstruct(self, items: Sequence[Reconstruction]) -> None:
        """Turn every gradient into the mean one, in place, and write to its error what was not sent.

        Of gradients in 16 bits also what their type can't hold of the mean.

        What it sent is its own projection, P̂ · own, and not the mean one. Differences between processes
        then leave the residual, which so stays bounded; the mean of the residuals is the same.
        """

    def subtract_own(self, groups: Sequence[MatrixGroup], factors: Sequence[Factors]) -> None:
        """Leave in every matrix what an iteration did not send of it.

        Args:
            groups: The matrices, updated in place.
            factors: Of each group those of the iteration.
        """

    def write(self, items: Sequence[Write], is_healthy: torch.Tensor | None) -> list[torch.Tensor]:
        """Write what a step leaves, by whether it is healthy.

        Args:
            items: What, on one device. Targets that stay in a healthy step are given away.
            is_healthy: One bool, not read back; None for true.

        Returns:
            Of each item the target; or, if that was to stay, a tensor in its place.
        """

    def orthonormal_rows(
        self, batches: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return an orthonormal basis of the rows of every matrix.

        A row that depends on those before it becomes zero: the basis has as many rows that are not zero
        as the matrix has rank. So projecting on the rows is right whatever the matrix rank, zero included.
        Finite input never gives NaN.

        Args:
            batches: fp32 or fp64 tensors of shape (matrices, rows, columns), few rows and many columns; they
                may differ in all three and in type.
            drawn: Of each batch what replaces rows of zeros, (rows, columns), the same for batches of one
                shape; None to leave them. With it the batches are given away.

        Returns:
            A new tensor of the same shape and type for each batch.
        """

    def all_finite(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return whether every element is finite, as a tensor of one bool; not read back.

        Args:
            tensors: Contiguous, of one type and device, none of them empty.
        """


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


class EntryKernels(Protocol):
    """The arithmetic of averaging few entries, of the tensors that its backend serves: fp32 or fp64, flat.

    What members have sent comes out the same to the bit whatever the backend.
    """

    def largest(self, flat: torch.Tensor, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the entries of largest magnitude of each chunk: positions, ascending, and values.

        NaN counts as the largest, then infinity. Of equal ones any may be taken.

        Args:
            flat: The bucket, only read.
            chunks: Of it.

        Returns:
            Positions in the chunk, int64, and values, as `flat`; (chunks, kept).
        """

    def add(
        self,
        result: torch.Tensor,
        places: torch.Tensor,
        values: torch.Tensor,
        sent: torch.Tensor,
        kept: torch.Tensor,
        *,
        by_senders: bool,
    ) -> None:
        """Add what members have sent to zeros, member after member.

        Args:
            result: The bucket, zeros; written.
            places: In the bucket, int64, (members, entries); of each member no place twice.
            values: Of the entries, as `result`.
            sent: As they were sent: who has sent zero has sent nothing.
            kept: Entries of each chunk, int64, in the order of the entries.
            by_senders: Whether each sum is divided by the members that have sent something.
        """
