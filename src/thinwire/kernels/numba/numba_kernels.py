"""Kernels compiled by Numba: for fp32 and matrix ranks up to 4, on one thread of the CPU.

They read and write each element once per pass, where PyTorch's products take several passes. What they have
no code for, PyTorch's kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from thinwire.kernels.base import FACTOR_ROWS, Kernels
from thinwire.kernels.matrices import Asked, Factors, MatrixGroup, Reconstruction, Write, add_errors, replaced
from thinwire.kernels.numba import bases, low_rank_passes
from thinwire.kernels.numba.compiler import FactorBatch, addresses
from thinwire.kernels.torch_kernels import TorchKernels


class NumbaKernels(Kernels):
    """Compiled passes, a group after the other; see `Kernels` for what each method does."""

    gradient_types = (torch.float32,)

    def __init__(self) -> None:
        self._others = TorchKernels()

    def products(self, items: Sequence[Asked]) -> list[torch.Tensor]:
        """As `Kernels.products`; PyTorch's products do it unless each matrix of a group has a residual."""
        scale, lefts = _number(items[0].loss_scale), []
        for item in items:
            group, right = item.group, item.factor
            errors = [error for error in group.errors if item.add_error and error is not None]
            if len(errors) < len(group.matrices):
                lefts += self._others.products([item])
                continue
            left = right.new_empty(len(right), FACTOR_ROWS, group.matrices[0].shape[0])
            low_rank_passes.all_products(
                addresses(group.matrices), addresses(errors), scale, _filled(right), left.numpy()
            )
            lefts.append(left[:, : group.matrix_rank])
        return lefts

    def projections(self, items: Sequence[Asked]) -> list[torch.Tensor]:
        """As `Kernels.projections`; residuals are added in a separate pass."""
        owns = []
        for group, left, loss_scale, add_error in items:
            # Only `alternating` asks for that: every other step a pass more, and no more code to compile.
            if add_error:
                add_errors(group, loss_scale)
            own = left.new_empty(len(left), FACTOR_ROWS, group.matrices[0].shape[1])
            low_rank_passes.all_projections(_filled(left), addresses(group.matrices), own.numpy())
            owns.append(own[:, : group.matrix_rank])
        return owns

    def reconstruct(self, items: Sequence[Reconstruction]) -> None:
        """As `Kernels.reconstruct`; by PyTorch's products with several terms, or without residuals."""
        inverse_scale = 1 / _number(items[0].loss_scale)
        for item in items:
            if item.errors is None or len(item.terms) > 1 or item.is_healthy is not None:
                self._others.reconstruct([item])
                continue
            (term,) = item.terms
            # Kept in a list: NumPy's arrays keep their tensors alive while compiled code reads them.
            factors = [_filled(each) for each in (*term.pair(term.own), *term.pair(term.mean))]
            low_rank_passes.reconstruct_all(
                addresses(item.group.matrices), addresses(item.errors), inverse_scale, *factors
            )

    def subtract_own(self, groups: Sequence[MatrixGroup], factors: Sequence[Factors]) -> None:
        """As `Kernels.subtract_own`, by PyTorch's products."""
        self._others.subtract_own(groups, factors)

    def write(self, items: Sequence[Write], is_healthy: torch.Tensor | None) -> list[torch.Tensor]:
        """As `Kernels.write`, by PyTorch's."""
        return self._others.write(items, is_healthy)

    def orthonormal_rows(
        self, batches: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As `Kernels.orthonormal_rows`, of one matrix after the other."""
        if drawn is not None:
            batches = [replaced(batch, rows) for batch, rows in zip(batches, drawn, strict=True)]
        return [bases.orthonormal_rows(batch) for batch in batches]

    def all_finite(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `Kernels.all_finite`, by PyTorch's."""
        return self._others.all_finite(tensors)


def _number(loss_scale: torch.Tensor | None) -> float:
    # Compiled code takes a number. On CUDA `.item()` would be a host synchronisation: these kernels serve the
    # CPU only.
    return 1.0 if loss_scale is None else loss_scale.item()


def _filled(factors: torch.Tensor) -> FactorBatch:
    """Return factors with rows of zeros up to four: one kind of code serves all matrix ranks."""
    missing = FACTOR_ROWS - factors.shape[1]
    filled: FactorBatch = (
        pad(factors, (0, 0, 0, missing)).numpy() if missing else factors.contiguous().numpy()
    )
    return filled
