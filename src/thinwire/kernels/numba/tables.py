"""Numba's kernels: fp32 on the CPU, low rank up to 4 on one thread, codes.

Compiled passes read and write each element once; PyTorch's operations take several passes. Functions that are
not compiled here are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from thinwire.kernels import torch_codes, torch_kernels
from thinwire.kernels.backend import NUMBA_FACTOR_ROWS, CodeKernels, MeanArgs, Tables
from thinwire.kernels.matrices import MatmulBatch, MatrixGroup, Reconstruction, Rows, round_into
from thinwire.kernels.numba import code_passes, low_rank_passes
from thinwire.kernels.numba.compiler import Addresses, FactorBatch, addresses
from thinwire.kernels.torch_entries import ENTRIES
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded, packed_bytes


def _addresses_of(group: MatrixGroup) -> tuple[Addresses, Addresses | None]:
    """Return the addresses of a group's matrices and residuals; no residuals unless each matrix has one."""
    bound: tuple[Addresses, Addresses | None] | None = group.bound.get("numba")
    if bound is None:
        errors = [error for error in group.errors if error is not None]
        known = addresses(errors) if len(errors) == len(group.errors) else None
        bound = group.bound["numba"] = addresses(group.matrices), known
    return bound


def products(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Read and write every matrix once; use PyTorch's products unless each of a group has a residual."""
    scale, lefts = _number(items[0].loss_scale), []
    for item in items:
        group, right = item.group, item.factor
        matrices, errors = _addresses_of(group)
        if errors is None or not item.add_error:
            lefts += torch_kernels.products([item])
            continue
        left = right.new_empty(len(right), NUMBA_FACTOR_ROWS, group.matrices[0].shape[0])
        low_rank_passes.all_products(matrices, errors, scale, _filled(right), left.numpy())
        lefts.append(left[:, : group.matrix_rank])
    return lefts


def projections(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Read every matrix once; add its residual in an earlier pass."""
    owns = []
    for item in items:
        group, left = item.group, item.factor
        # Only `alternating` needs this: an extra pass every other step saves more code to compile.
        if item.add_error:
            torch_kernels.add_errors(group, item.loss_scale)
        own = left.new_empty(len(left), NUMBA_FACTOR_ROWS, group.matrices[0].shape[1])
        low_rank_passes.all_projections(_filled(left), _addresses_of(group)[0], own.numpy())
        owns.append(own[:, : group.matrix_rank])
    return owns


def reconstruct(items: Sequence[Reconstruction]) -> None:
    """Read and write every matrix once; use PyTorch's products for several terms or without residuals."""
    inverse_scale = 1 / _number(items[0].loss_scale)
    for item in items:
        if item.errors is None or len(item.terms) > 1 or item.is_healthy is not None:
            torch_kernels.reconstruct([item])
            continue
        matrices, known = _addresses_of(item.group)
        errors = known if item.errors is item.group.errors else None
        # Kept in a list: NumPy's arrays keep their tensors alive while compiled code reads them.
        factors = list(map(_filled, (*item.terms[0].sent, *item.terms[0].mean)))
        low_rank_passes.reconstruct_all(
            matrices, addresses(item.errors) if errors is None else errors, inverse_scale, *factors
        )


def orthonormal_rows(items: Sequence[Rows]) -> list[torch.Tensor]:
    """Make one matrix after the other orthonormal."""
    bases = []
    for item in items:
        rows = item.rows
        bases.append(torch.empty_like(rows, memory_format=torch.contiguous_format))
        # Without drawn rows, zero rows are replaced by zeros.
        instead = rows.new_zeros(rows.shape[1:]) if item.drawn is None else item.drawn
        low_rank_passes.orthonormal(rows.contiguous().numpy(), instead.numpy(), bases[-1].numpy())
    return bases


def _number(loss_scale: torch.Tensor | None) -> float:
    # Compiled code takes a number. On the CPU, `.item()` does not wait.
    return 1.0 if loss_scale is None else loss_scale.item()


def _filled(factors: torch.Tensor) -> FactorBatch:
    """Return factors padded with zero rows to four, so that one compiled version serves all matrix ranks."""
    missing = NUMBA_FACTOR_ROWS - factors.shape[1]
    filled: FactorBatch = (pad(factors, (0, 0, 0, missing)) if missing else factors.contiguous()).numpy()
    return filled


def encoded(flat: torch.Tensor, blocks: Blocks, codebook: Codebook) -> Coded:
    """Read all numbers once."""
    size = packed_bytes(blocks.block, codebook.bits)
    coded = Coded.empty(blocks.total, blocks.num_members, blocks.share, size)
    flat = flat.float().contiguous()
    code_passes.encode(flat.data_ptr(), *_rows(coded), *_blocks(blocks, codebook))
    return coded


def averaged(item: MeanArgs) -> Coded:
    """Read all messages once."""
    received, blocks, own, codebook, lost, _ = item
    size = packed_bytes(blocks.block, codebook.bits)
    coded = Coded.empty(own.stop - own.start, 1, blocks.share, size)
    # fp32 whatever torch's default dtype: compiled code writes fp32 to its address.
    room = (
        torch.empty(max(code_passes.TOGETHER, blocks.block), dtype=torch.float32, device="cpu")
        if lost is None
        else lost
    )
    code_passes.average(
        *_rows(received),
        len(received.message),
        # There can be fewer blocks than members: members without blocks have no row.
        own.start // blocks.share if own.stop > own.start else -1,
        room.data_ptr(),
        lost is not None,
        coded.message.data_ptr(),
        *_blocks(blocks, codebook),
    )
    return coded


def decode(messages: Sequence[Coded], blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
    """Write all numbers once; round those of 16 bits."""
    values = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
    to, layout = values.data_ptr(), _blocks(blocks, codebook)
    if len(messages) == 1:
        code_passes.decode(to, *_rows(messages[0]), *layout)
    else:
        code_passes.decode_two(to, *_rows(messages[0]), *_rows(messages[1]), *layout)
    if values is not flat:
        round_into(flat, values, None, None)


def remainder(flat: torch.Tensor, coded: Coded, blocks: Blocks, codebook: Codebook) -> torch.Tensor:
    """Read and write all numbers once."""
    rest = torch.empty_like(flat)
    code_passes.subtract(flat.data_ptr(), *_rows(coded), rest.data_ptr(), *_blocks(blocks, codebook))
    return rest


def _rows(coded: Coded) -> tuple[int, int]:
    """Return the address of the first row, and the bytes from one to the next."""
    # If several buckets' messages were sent as one, rows are further apart than their length.
    return coded.message.data_ptr(), coded.message.stride(0)


def _blocks(blocks: Blocks, codebook: Codebook) -> tuple[NDArray[np.int64], code_passes.Layout]:
    layout = code_passes.Layout(
        blocks.block, codebook.bits, codebook.levels[-1], codebook.reach, blocks.share
    )
    return np.array(blocks.numels, np.int64), layout


TABLES = Tables(
    replace(
        torch_kernels.LOW_RANK,
        gradient_types=frozenset({torch.float32}),
        products=products,
        projections=projections,
        reconstruct=reconstruct,
        orthonormal_rows=orthonormal_rows,
    ),
    CodeKernels(
        encoded, averaged, decode, partial(torch_codes.decode_and_keep, remainder=remainder, decode=decode)
    ),
    ENTRIES,
)
