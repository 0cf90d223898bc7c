"""The passes of a step over the matrices of a group, which are fp32, contiguous and on the CPU.

Inside, factors have one row or four: those beyond the matrix rank are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch.nn.functional import pad

from thinwire.algorithms.kernels.matrices import MatrixGroup
from thinwire.algorithms.kernels.numba import four, single
from thinwire.algorithms.kernels.numba.compiler import addresses
from thinwire.algorithms.kernels.numba.limits import FACTOR_ROWS

__all__ = ["products", "projections", "reconstruct"]

# Of zeros, so many rows as stay in a core's cache; a multiple of four rows, which are multiplied together.
BLOCK_BYTES = 512 * 1024


def products(
    group: MatrixGroup, errors: Sequence[torch.Tensor], right: torch.Tensor, scale: float
) -> torch.Tensor:
    """Add its error, times `scale`, to every matrix; return (M Q)ᵀ, shape (matrices, r, rows).

    Args:
        group: The matrices, in place.
        errors: One for each matrix, or none to add nothing.
        right: Qᵀ, shape (matrices, r, columns).
        scale: What the loss was multiplied by.
    """
    # Single rows and four are two kinds of code to compile; else it were one for each matrix rank.
    filled, kernels = _filled(right), _kernels(group)
    rows, columns = group.matrices[0].shape
    left = right.new_empty(*filled.shape[:2], rows)
    if errors:
        added = addresses(errors)
        kernels.all_products(addresses(group.matrices), added, scale, filled.numpy(), left.numpy())
        return left[:, : group.matrix_rank]
    # Zeros, and not the matrix itself: where the two overlap, a plain loop is not vectorised.
    together = min(rows, max(1, BLOCK_BYTES // (16 * columns)) * 4)
    zeros = right.new_zeros(together, columns)
    for start in range(0, rows, together):
        blocks = [matrix[start : start + together] for matrix in group.matrices]
        part = left.new_empty(*filled.shape[:2], len(blocks[0]))
        added = addresses([zeros] * len(blocks))
        kernels.all_products(addresses(blocks), added, 0.0, filled.numpy(), part.numpy())
        left[:, :, start : start + together] = part
    return left[:, : group.matrix_rank]


def projections(group: MatrixGroup, left: torch.Tensor) -> torch.Tensor:
    """Return P̂ᵀ M of every matrix, shape (matrices, r, columns).

    Args:
        group: The matrices.
        left: P̂ᵀ, shape (matrices, r, rows).
    """
    filled = _filled(left)
    own = left.new_empty(*filled.shape[:2], group.matrices[0].shape[1])
    _kernels(group).all_projections(filled.numpy(), addresses(group.matrices), own.numpy())
    return own[:, : group.matrix_rank]


def reconstruct(
    group: MatrixGroup,
    errors: Sequence[torch.Tensor],
    sent: tuple[torch.Tensor, torch.Tensor],
    mean: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> None:
    """Write what was not sent of every M, over `scale`, to its error, and turn M into the mean.

    Args:
        group: The matrices, in place.
        errors: Written, one for each matrix.
        sent: Left and right factors of what this process sent.
        mean: Those of the mean.
        scale: What the loss was multiplied by.
    """
    # Kept in a list: NumPy's arrays keep their tensors alive while compiled code reads them.
    factors = [_filled(factor).numpy() for factor in (*sent, *mean)]
    _kernels(group).reconstruct_all(addresses(group.matrices), addresses(errors), 1 / scale, *factors)


def _kernels(group: MatrixGroup) -> ModuleType:
    return single if group.matrix_rank == 1 else four


def _filled(factors: torch.Tensor) -> torch.Tensor:
    """Return factors with rows of zeros up to four; a single row as it is."""
    if factors.shape[1] in (1, FACTOR_ROWS):
        return factors.contiguous()
    return pad(factors, (0, 0, 0, FACTOR_ROWS - factors.shape[1]))
