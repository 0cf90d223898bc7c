"""Tables of the functions of a backend: low-rank arithmetic, codes of few bits, few entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire.kernels.matrices import MatmulBatch, Reconstruction, Rows, Subtraction, Write
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded
from thinwire.tensors.entries import EntryLayout
from thinwire.tensors.rounding import RandomBits

# The largest matrix rank that Numba serves. It stands here to be known without importing Numba.
NUMBA_FACTOR_ROWS = 4


@dataclass(frozen=True, eq=False)
class Kernels:
    """The arithmetic of a low-rank step.

    Every function takes all items of one device, so that a backend on which each launch costs may serve
    groups of many shapes with one. Inside a group all matrices have one shape and type. The loss scale stays
    a tensor down to the backend: to read it, the host would wait for an accelerator.

    M is a gradient plus its residual. A backend may add them in place when it is first asked for anything of
    a step's matrices, or whenever it reads them. So residuals are the same until `reconstruct`, and are given
    every time.
    """

    gradient_types: Collection[torch.dtype]
    """Types of gradients that may be a group's matrices. Others are copied to fp32 first."""

    products: Callable[[Sequence[MatmulBatch]], list[torch.Tensor]]
    """(M Q)ᵀ of every matrix, for each group (matrices, r, rows)."""

    projections: Callable[[Sequence[MatmulBatch]], list[torch.Tensor]]
    """P̂ᵀ M of every matrix, for each group (matrices, r, columns)."""

    subtract_own: Callable[[Sequence[Subtraction]], None]
    """Leaves in every matrix what an iteration did not send of it."""

    reconstruct: Callable[[Sequence[Reconstruction]], None]
    """Turns every gradient into the mean one, in place, and writes to its error what was not sent.

    That includes what a gradient in 16 bits can't hold of the mean. What was sent is this process's own
    projection, P̂ · own, and not the mean one: so differences between processes leave the residual, which
    stays bounded, and the mean of the residuals is the same.
    """

    write: Callable[[Sequence[Write]], None]
    """Writes what a step leaves, in place."""

    orthonormal_rows: Callable[[Sequence[Rows]], list[torch.Tensor]]
    """An orthonormal basis of the rows of every matrix: new tensors of the same shapes and types.

    A row that depends on those before it becomes zero: the basis has as many rows that are not zero as the
    matrix has rank. So projecting on the rows is right whatever the matrix rank, zero included. Finite input
    never gives NaN.
    """

    all_finite: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Whether every element is finite, as a tensor of one bool, not read back.

    Takes contiguous tensors of one type and device, none of them empty.
    """


class MeanArgs(NamedTuple):
    """Messages of members with some blocks, whose mean is to be coded again."""

    received: Coded  # a row of each member
    blocks: Blocks  # of the bucket
    own: slice  # which of them were received
    codebook: Codebook
    draws: RandomBits | None  # of these blocks, for stochastic rounding; None for the nearest level
    # Takes what coding the mean has lost, shape (blocks, block), with anything behind the end of a short
    # block. None to forget it.
    lost: torch.Tensor | None
    dtype: torch.dtype  # of the computation, fp32 or fp64


class ResidualArgs(NamedTuple):
    """The coded mean of a bucket, and what a residual is made of."""

    coded: Coded
    blocks: Blocks
    codebook: Codebook
    flat: torch.Tensor  # the gradients, which become the mean
    values: torch.Tensor  # what this member has coded, fp32 or fp64; may be the gradients
    sent: Coded  # as it did
    lost: torch.Tensor  # as of `Averaging`
    own: slice  # the blocks that those are
    loss_scale: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class CodeKernels:
    """The arithmetic of averaging in few bits, of flat tensors in fp32 or fp64; gradients may be in 16 bits.

    What is decoded is the same to the bit with each backend, since members may have different ones: a level
    times the scale, rounded once. What is encoded may differ in the last bit of a scale: all receive it.
    """

    encoded: Callable[[torch.Tensor, Blocks, Codebook, RandomBits | None], Coded]
    """All blocks of a flat tensor as they travel: a row for each member, which averages it.

    Random bits are for stochastic rounding; without them the nearest level is taken.
    """

    averaged: Callable[[MeanArgs], Coded]
    """The mean of what members have sent of some blocks, coded again: one row."""

    decode: Callable[[Coded, Blocks, Codebook, torch.Tensor], None]
    """Writes the numbers that all blocks stand for to gradients; NaN if a scale is not finite."""

    decode_and_keep: Callable[[ResidualArgs], torch.Tensor]
    """The same, and returns the residual: what this member has not sent, what was lost when it coded a mean,
    and what the gradients' type can't hold.

    So the mean residual and the mean in few bits add up to the true mean.
    """


@dataclass(eq=False)
class TopKQuery:
    """A bucket in a step that averages few of its entries."""

    layout: EntryLayout
    flat: torch.Tensor  # gradients; at last the mean
    error: torch.Tensor  # residuals, fp32 or fp64, as long; at last what was not sent
    decay: float  # what residuals are multiplied by
    loss_scale: torch.Tensor | None  # what gradients are divided by
    rank: int  # this member's
    by_senders: bool  # whether sums are divided by the members that have sent something, not by all
    wanted: torch.Tensor | None = None  # gradient plus residual, if `encode` keeps it for `merge`


@dataclass(frozen=True, eq=False)
class EntryKernels:
    """The arithmetic of averaging few entries. Gradients may be overwritten by the first of them."""

    serves: Callable[[EntryLayout], bool]
    """Whether chunks are short enough."""

    encode: Callable[[TopKQuery], torch.Tensor]
    """This member's message, uint8: of each chunk the entries of largest magnitude."""

    decode: Callable[[TopKQuery, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Where entries of all members belong, as `merge` takes it, and values, (members, entries).

    Of a chunk that has anything that is not finite, no value is finite. A value of zero was not sent.
    """

    merge: Callable[[TopKQuery, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor | None], None]
    """Writes the mean of what was sent to gradients, what was not sent to residuals, and by how much less the
    squares of each chunk's residual have become; if it is given a bool that is false, only NaN to gradients.
    """

    commits_on_device: bool = False
    """Whether `merge` takes that bool."""


@dataclass(frozen=True, eq=False)
class Tables:
    """All that a backend computes; what it has no code for, PyTorch's functions do."""

    low_rank: Kernels
    codes: CodeKernels
    entries: EntryKernels
