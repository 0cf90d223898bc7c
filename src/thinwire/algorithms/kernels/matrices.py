"""Matrices on their way through a step, and the factors found of them.

Notation of the PowerSGD paper (arXiv 1905.13727, algorithm 1): M (rows × columns) is gradient plus error,
P (rows × r) the left and Q (columns × r) the right factor. Factors are held row by row, as Pᵀ and Qᵀ:
skinny products are several times faster that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = [
    "DEPENDENT_BELOW",
    "Factors",
    "MatrixGroup",
    "Terms",
    "add_errors",
    "add_scaled",
    "round_into",
    "stacked",
]

# A row is dependent on those before it if the squared sine of its angle to their span is below this.
# fp32 noise in a dependent row is about 1e-14. Many nearly dependent rows amplify float64's rounding in
# the coefficients; a second pass over rows that are nearly orthonormal takes out what the first left.
DEPENDENT_BELOW = 1e-10

# So many are rounded at a time on the CPU: they stay in a core's cache with what is lost of them.
ROUNDED_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices of one shape and matrix rank.

    Attributes:
        labels: One for each matrix, the key of its factor in memory.
        matrices: M, fp32 or fp64, each (rows, columns); on entry the gradients alone.
        errors: The residual of each, (rows, columns); None if there is none.
        matrix_rank: r.
    """

    labels: Sequence[str]
    matrices: Sequence[torch.Tensor]
    errors: Sequence[torch.Tensor | None]
    matrix_rank: int


@dataclass(frozen=True)
class Factors:
    """What one iteration makes known of a group.

    Attributes:
        basis: Orthonormal rows, the same on all processes: P̂ᵀ (matrices, r, rows), or Q̂ᵀ (matrices, r,
            columns).
        own: The projection of this process's M on it, as it travelled: P̂ᵀ M (matrices, r, columns), or
            Q̂ᵀ Mᵀ (matrices, r, rows).
        mean: The mean of `own` over the processes.
        basis_is_left: Whether the basis is P̂ᵀ.
    """

    basis: torch.Tensor
    own: torch.Tensor
    mean: torch.Tensor
    basis_is_left: bool = True

    def pair(self, projection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (left, right): leftᵀ right approximates what `projection`, own or mean, is of."""
        return (self.basis, projection) if self.basis_is_left else (projection, self.basis)


Terms: TypeAlias = Sequence[Factors]
"""The iterations of a step; their approximations add up."""


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors of one shape as a batch, a view of them; None if they don't lie at equal distances."""
    first = tensors[0]
    offsets = [each.storage_offset() for each in tensors]
    step = offsets[1] - offsets[0] if len(tensors) > 1 else first.numel()
    is_even = (
        offsets == list(range(offsets[0], offsets[0] + step * len(tensors), step)) if step > 0 else False
    )
    is_one = len({each.untyped_storage().data_ptr() for each in tensors}) == 1
    if not (is_even and is_one and all(each.is_contiguous() for each in tensors)):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def add_scaled(matrix: torch.Tensor, error: torch.Tensor, loss_scale: torch.Tensor | None) -> None:
    """Add a residual, in units of the unscaled loss, to a gradient in units of the scaled one.

    Args:
        matrix: The gradient, in place.
        error: The residual, of the same shape.
        loss_scale: What the loss was multiplied by, None for 1.
    """
    matrix.add_(error if loss_scale is None else error * loss_scale)


def add_errors(group: MatrixGroup, loss_scale: torch.Tensor | None) -> None:
    """Add its residual to every matrix of a group, in units of the scaled loss.

    Args:
        group: Its matrices are changed in place.
        loss_scale: What the loss was multiplied by, None for 1.
    """
    for matrix, error in zip(group.matrices, group.errors, strict=True):
        if error is not None:
            add_scaled(matrix, error, loss_scale)


def round_into(
    gradient: torch.Tensor, mean: torch.Tensor, error: torch.Tensor | None, loss_scale: torch.Tensor | None
) -> None:
    """Store the mean in a gradient of another type; what its type can't hold goes to the residual.

    Args:
        gradient: Flat, of any floating type, written.
        mean: Flat, of the same length, in fp32 or fp64.
        error: Flat, in the type of `mean`, takes up what rounding and the range lose; None to forget it.
        loss_scale: What the loss was multiplied by, None for 1.
    """
    limit = min(torch.finfo(gradient.dtype).max, torch.finfo(mean.dtype).max)
    together = ROUNDED_ELEMENTS if mean.device.type == "cpu" else max(1, len(mean))
    for start in range(0, len(mean), together):
        some = slice(start, start + together)
        gradient[some] = mean[some].clamp(-limit, limit)
        if error is not None:
            lost = mean[some] - gradient[some].to(mean.dtype)
            error[some] += lost if loss_scale is None else lost.div_(loss_scale)
