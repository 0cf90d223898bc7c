"""Numba's kernels: fp32 on the CPU, low rank up to 4 on one thread, codes to the nearest level.

Compiled passes read and write each element once; PyTorch's operations take several passes. What is not
compiled here, PyTorch's functions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from thinwire.kernels import torch_codes, torch_kernels
from thinwire.kernels.base import NUMBA_FACTOR_ROWS, MeanArgs, Tables
from thinwire.kernels.matrices import MatmulBatch, MatrixGroup, Reconstruction, Rows
from thinwire.kernels.numba import code_passes, low_rank_passes
from thinwire.kernels.numba.compiler import Addresses, FactorBatch, addresses
from thinwire.kernels.torch_entries import ENTRIES
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded, packed_bytes
from thinwire.tensors.rounding import RandomBits


def _addresses_of(group: MatrixGroup) -> tuple[Addresses, Addresses | None]:
    """Return where the matrices and residuals of a group lie; no residuals unless each has one."""
    bound: tuple[Addresses, Addresses | None] | None = group.bound.get("numba")
    if bound is None:
        errors = [error for error in group.errors if error is not None]
        known = addresses(errors) if len(errors) == len(group.errors) else None
        bound = group.bound["numba"] = addresses(group.matrices), known
    return bound


def products(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Read and write every matrix once; unless each of a group has a residual, PyTorch's products do it."""
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
    """Read every matrix once; its residual is added in a pass before."""
    owns = []
    for item in items:
        group, left = item.group, item.factor
        # Only `alternating` asks for that: every other step a pass more, and no more code to compile.
        if item.add_error:
            torch_kernels.add_errors(group, item.loss_scale)
        own = left.new_empty(len(left), NUMBA_FACTOR_ROWS, group.matrices[0].shape[1])
        low_rank_passes.all_projections(_filled(left), _addresses_of(group)[0], own.numpy())
        owns.append(own[:, : group.matrix_rank])
    return owns


def reconstruct(items: Sequence[Reconstruction]) -> None:
    """Read and write every matrix once; several terms, or no residuals, are left to PyTorch's products."""
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
        # Without drawn rows a dead one becomes what it is: zeros.
        instead = rows.new_zeros(rows.shape[1:]) if item.drawn is None else item.drawn
        low_rank_passes.orthonormal(rows.contiguous().numpy(), instead.numpy(), bases[-1].numpy())
    return bases


def _number(loss_scale: torch.Tensor | None) -> float:
    # Compiled code takes a number. Here, on the CPU, `.item()` waits for nothing.
    return 1.0 if loss_scale is None else loss_scale.item()


def _filled(factors: torch.Tensor) -> FactorBatch:
    """Return factors with rows of zeros up to four: one kind of code serves all matrix ranks."""
    missing = NUMBA_FACTOR_ROWS - factors.shape[1]
    filled: FactorBatch = (pad(factors, (0, 0, 0, missing)) if missing else factors.contiguous()).numpy()
    return filled


def encoded(flat: torch.Tensor, blocks: Blocks, codebook: Codebook, draws: RandomBits | None) -> Coded:
    """Read all numbers once; stochastic rounding is left to PyTorch's operations."""
    if draws is not None:
        return torch_codes.encoded(flat, blocks, codebook, draws)
    size = packed_bytes(blocks.block, codebook.bits)
    coded = Coded.empty(blocks.total, blocks.num_members, blocks.share, size)
    flat = flat.float().contiguous()
    code_passes.encode(flat.data_ptr(), *_rows(coded), *_blocks(blocks, codebook))
    return coded


def averaged(item: MeanArgs) -> Coded:
    """Read what was sent once; stochastic rounding is left to PyTorch's operations."""
    received, blocks, own, codebook, draws, lost, _ = item
    if draws is not None:
        return torch_codes.averaged(item)
    size = packed_bytes(blocks.block, codebook.bits)
    coded = Coded.empty(own.stop - own.start, 1, blocks.share, size)
    # Compiled code writes fp32 to its address, whatever torch's default type.
    room = torch.empty(max(code_passes.TOGETHER, blocks.block), dtype=torch.float32) if lost is None else lost
    code_passes.average(
        *_rows(received),
        len(received.message),
        # Blocks can be fewer than members: those without any have no row.
        own.start // blocks.share if own.stop > own.start else -1,
        room.data_ptr(),
        lost is not None,
        coded.message.data_ptr(),
        *_blocks(blocks, codebook),
    )
    return coded


def decode(coded: Coded, blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
    """Write all numbers once."""
    code_passes.decode(flat.data_ptr(), *_rows(coded), *_blocks(blocks, codebook))


def remainder(flat: torch.Tensor, coded: Coded, blocks: Blocks, codebook: Codebook) -> torch.Tensor:
    """Read and write all numbers once."""
    rest = torch.empty_like(flat)
    code_passes.subtract(flat.data_ptr(), *_rows(coded), rest.data_ptr(), *_blocks(blocks, codebook))
    return rest


def _rows(coded: Coded) -> tuple[int, int]:
    """Return the address of the first row, and the bytes from one to the next."""
    # If several buckets' messages travelled as one, rows lie further apart than they are long.
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
    torch_codes.code_kernels(encoded, averaged, decode, remainder),
    ENTRIES,
)
