"""The tables of a backend's functions: low-rank arithmetic, codes of few bits, few entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire.kernels.matrices import MatmulBatch, Reconstruction, Rows, Write
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded
from thinwire.tensors.entries import EntryLayout

# The largest matrix rank that Numba serves. Defined here, to be known without importing Numba.
NUMBA_FACTOR_ROWS = 4


@dataclass(frozen=True, eq=False)
class Kernels:
    """The arithmetic of a low-rank step.

    Every function takes all items of one device, so that a backend with expensive launches can serve groups
    of many shapes with one. Inside a group all matrices have one shape and dtype. The loss scale stays a
    tensor down to the backend: reading it would make the host wait for an accelerator.

    M is a gradient plus its residual. A backend may add them in place in the first call for a step's
    matrices, or in every read. So residuals do not change until `reconstruct`, and are passed every time.
    """

    gradient_types: Collection[torch.dtype]
    """Dtypes of gradients that a group's matrices may have. Others are copied to fp32 first."""

    products: Callable[[Sequence[MatmulBatch]], list[torch.Tensor]]
    """(M Q)ᵀ of every matrix, for each group (matrices, r, rows)."""

    projections: Callable[[Sequence[MatmulBatch]], list[torch.Tensor]]
    """P̂ᵀ M of every matrix, for each group (matrices, r, columns)."""

    reconstruct: Callable[[Sequence[Reconstruction]], None]
    """Replaces every gradient by the mean, in place, and writes to its error what was not sent.

    That includes what a 16-bit gradient can't hold of the mean. What was sent is this process's own
    projection, P̂ · own, not the mean one. So differences between processes leave the residual, which stays
    bounded, and the mean of the residuals is the same.
    """

    write: Callable[[Sequence[Write]], None]
    """Writes a step's new state, in place."""

    orthonormal_rows: Callable[[Sequence[Rows]], list[torch.Tensor]]
    """Returns an orthonormal basis of the rows of every matrix: new tensors of the same shapes and dtypes.

    A row that depends on earlier rows becomes zero: the number of nonzero rows is the matrix rank. So
    projecting on the rows is right for any matrix rank, including zero. Finite input never gives NaN.
    """

    all_finite: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Returns whether every element is finite, as a tensor of one bool, not read back.

    Takes nonempty contiguous tensors of one dtype and device.
    """


class MeanArgs(NamedTuple):
    """All members' messages with some blocks, whose mean is to be encoded."""

    received: Coded  # a row from each member
    blocks: Blocks  # the bucket's
    own: slice  # which of the blocks were received
    codebook: Codebook
    # Receives what encoding the mean has lost, shape (blocks, block), with arbitrary values after the end of
    # a short block. None to discard it.
    lost: torch.Tensor | None
    dtype: torch.dtype  # of the computation, fp32 or fp64


class ResidualArgs(NamedTuple):
    """The mean of a bucket, and the inputs of its residual."""

    messages: Sequence[Coded]  # the coded mean; or what each of two members has sent
    blocks: Blocks
    codebook: Codebook
    flat: torch.Tensor  # the gradients, which become the mean
    values: torch.Tensor  # the values that this member has encoded, fp32 or fp64; may be the gradients
    sent: Coded  # their codes
    lost: torch.Tensor | None  # as in `MeanArgs`; None if there are two members
    own: slice  # the blocks of `lost`
    loss_scale: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class CodeKernels:
    """The arithmetic of averaging flat tensors in few bits, in fp32 or fp64; gradients may have 16 bits.

    Decoding gives the same bits with every backend, since members may have different ones: a level times the
    scale, rounded once. Encoding may differ in a scale's last bit: all members receive the scale.
    """

    encoded: Callable[[torch.Tensor, Blocks, Codebook], Coded]
    """Encodes all blocks of a flat tensor to the nearest levels: a row for each member, which averages it."""

    averaged: Callable[[MeanArgs], Coded]
    """Averages what members have sent of some blocks, and encodes the mean: one row."""

    decode: Callable[[Sequence[Coded], Blocks, Codebook, torch.Tensor], None]
    """Decodes all blocks into gradients; of two messages, their mean. NaN if a scale is not finite."""

    decode_and_keep: Callable[[ResidualArgs], torch.Tensor]
    """The same, and returns the residual: what this member has not sent, what encoding its mean has lost,
    and what the gradients' dtype can't hold.

    So the mean residual and the mean in few bits add up to the true mean.
    """


@dataclass(eq=False)
class TopKQuery:
    """A bucket in a step that averages few of its entries."""

    layout: EntryLayout
    flat: torch.Tensor  # gradients; in the end the mean
    error: torch.Tensor  # residuals, fp32 or fp64, same length; in the end what was not sent
    decay: float  # the factor for residuals
    loss_scale: torch.Tensor | None  # gradients are divided by it
    rank: int  # this member's
    by_senders: bool  # whether sums are divided by the members that have sent something, not by all
    wanted: torch.Tensor | None = None  # gradient plus residual, if `encode` keeps it for `merge`


@dataclass(frozen=True, eq=False)
class EntryKernels:
    """The arithmetic of averaging few entries. `encode` may overwrite gradients."""

    serves: Callable[[EntryLayout], bool]
    """Returns whether chunks are short enough."""

    encode: Callable[[TopKQuery], torch.Tensor]
    """Returns this member's message, uint8: each chunk's entries of largest magnitude."""

    decode: Callable[[TopKQuery, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Returns the places of all members' entries, in the form for `merge`, and values, (members, entries).

    If an entry of a chunk is not finite, none of its values is. A value of zero was not sent.
    """

    merge: Callable[[TopKQuery, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor | None], None]
    """Writes the mean of what was sent to gradients, what was not sent to residuals, and how much sending has
    reduced each chunk's squared residual. If a given bool is false, it only writes NaN to gradients.
    """

    commits_on_device: bool = False
    """Whether `merge` takes this bool."""


@dataclass(frozen=True, eq=False)
class Tables:
    """All functions of a backend; those it does not implement are PyTorch's."""

    low_rank: Kernels
    codes: CodeKernels
    entries: EntryKernels
