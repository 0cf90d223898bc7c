"""The matrices of a step, and their factors.

Notation of the PowerSGD paper (arXiv 1905.13727, algorithm 1): M (rows × columns) is gradient plus error,
P (rows × r) the left and Q (columns × r) the right factor. Factors are stored transposed, as Pᵀ and Qᵀ:
skinny products are several times faster that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

# A row is dependent on earlier rows if the squared sine of its angle to their span is below this. fp32 noise
# in a dependent row is about 1e-14. Many nearly dependent rows amplify float64's rounding in the
# coefficients; a second pass, over nearly orthonormal rows, removes what the first one left.
DEPENDENT_BELOW = 1e-10

# How many elements are rounded at a time on the CPU: they and their losses stay in a core's cache.
ROUNDED_ELEMENTS = 1 << 16


@dataclass(eq=False)
class MatrixGroup:
    """Matrices of one shape and matrix rank.

    A plan keeps it from step to step while matrices and residuals keep their addresses, so that kernels
    compute `bound` only once. The views of the gradients are made in each step, since they would keep an
    unused bucket alive.
    """

    labels: Sequence[str]  # the key of each matrix's factor in memory
    # M, each (rows, columns), in fp32, fp64 or one of the backend's gradient dtypes; on entry only the
    # gradients.
    matrices: Sequence[torch.Tensor]
    errors: Sequence[torch.Tensor | None]  # the residual of each matrix, (rows, columns), if there is one
    matrix_rank: int  # r
    bound: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Left and right factors: Pᵀ (matrices, r, rows) and Qᵀ (matrices, r, columns), for M ≈ P Qᵀ."""


class Factors(NamedTuple):
    """The results of one iteration for a group.

    One side is a basis: orthonormal rows, the same on all processes. The other side is the projection on it.
    """

    sent: Pair  # for this process's M, as it was sent
    mean: Pair  # for the mean over processes
    projection: int = 1  # the index of the projection in each pair


Terms: TypeAlias = Sequence[Factors]
"""The iterations of a step; their approximations add up."""


@dataclass(eq=False)
class MatmulBatch:
    """A group to multiply by a factor."""

    group: MatrixGroup
    factor: torch.Tensor  # each matrix's Qᵀ, (matrices, r, columns), or P̂ᵀ, (matrices, r, rows)
    # The loss scale, one tensor per device in a step; None for 1.
    loss_scale: torch.Tensor | None
    add_error: bool  # whether this is the step's first product; the same for all items of a call
    out: torch.Tensor | None = None  # a buffer for the result, used by backends of accelerators


@dataclass(eq=False)
class Reconstruction:
    """A group to replace by the mean: every matrix is M minus what all terms but the last have sent."""

    group: MatrixGroup
    # Receives the new residual of each matrix, (rows, columns); may be the group's own `errors`. None to
    # discard it.
    errors: Sequence[torch.Tensor] | None
    terms: Terms
    loss_scale: torch.Tensor | None  # as in `MatmulBatch`
    # One bool for the step, not read back: if false, errors stay and gradients become NaN.
    is_healthy: torch.Tensor | None = None


@dataclass(eq=False)
class Write:
    """A write to a tensor at the end of a step; both are contiguous."""

    target: torch.Tensor
    healthy: torch.Tensor  # the new value, in any floating dtype
    stays: bool  # whether the target stays as it is in a step that is not healthy; otherwise it becomes NaN
    is_healthy: torch.Tensor | None  # as in `Reconstruction`


@dataclass(eq=False)
class Rows:
    """Factors whose rows to make orthonormal."""

    # fp32 or fp64, (matrices, rows, columns), few rows, many columns; overwritten if any rows are drawn.
    rows: torch.Tensor
    # Replaces rows of zeros, (rows, columns), the same for items of one shape; None to leave them.
    drawn: torch.Tensor | None = None
    out: torch.Tensor | None = None  # as in `MatmulBatch`


def round_into(
    gradient: torch.Tensor,
    mean: torch.Tensor,
    error: torch.Tensor | None,
    loss_scale: torch.Tensor | None,
    is_healthy: torch.Tensor | None = None,
) -> None:
    """Store the mean in a gradient of another dtype; add what that can't hold to the residual."""
    # Clamp to the range: the excess stays in the residual; an infinite gradient would be lost.
    limit = min(torch.finfo(gradient.dtype).max, torch.finfo(mean.dtype).max)
    together = ROUNDED_ELEMENTS if mean.device.type == "cpu" else max(1, len(mean))
    for start in range(0, len(mean), together):
        some = slice(start, start + together)
        gradient[some] = mean[some].clamp(-limit, limit)
        if error is not None:
            lost = mean[some] - gradient[some].to(mean.dtype)
            if loss_scale is not None:
                lost.div_(loss_scale)
            # Select, don't multiply by zero: a NaN would stay and spoil the residual.
            error[some] += lost if is_healthy is None else torch.where(is_healthy, lost, 0)
