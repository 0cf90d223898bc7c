"""The protocol of kernels: what a low-rank step computes between its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from thinwire.algorithms.kernels.matrices import Factors, MatrixGroup, Terms

__all__ = ["Kernels"]


class Kernels(Protocol):
    """The arithmetic of a low-rank step, for the groups that its backend serves.

    Every method takes all groups at once, so that a backend on which each launch costs may serve groups of
    many shapes with one. Inside a group, all matrices have one shape, type and device; groups may differ in
    all three. A backend does all of the protocol for what it serves, and hands on itself what it has no code
    for. The loss scale stays a tensor down to the backend: to read it on the host waits for an accelerator.
    """

    def products(
        self,
        groups: Sequence[MatrixGroup],
        rights: Sequence[torch.Tensor],
        loss_scale: torch.Tensor | None,
        *,
        add_error: bool,
    ) -> list[torch.Tensor]:
        """Return (M Q)ᵀ of every matrix, for each group (matrices, r, rows).

        Args:
            groups: The matrices; with `add_error`, its residual is added to each of them first, in place.
            rights: Of each group Qᵀ, (matrices, r, columns).
            loss_scale: What the loss was multiplied by, None for 1.
            add_error: Whether that has not been done yet.
        """

    def projections(
        self,
        groups: Sequence[MatrixGroup],
        lefts: Sequence[torch.Tensor],
        loss_scale: torch.Tensor | None,
        *,
        add_error: bool,
    ) -> list[torch.Tensor]:
        """Return P̂ᵀ M of every matrix, for each group (matrices, r, columns).

        Args:
            groups: The matrices; with `add_error`, its residual is added to each of them first, in place.
            lefts: Of each group P̂ᵀ, (matrices, r, rows).
            loss_scale: What the loss was multiplied by, None for 1.
            add_error: Whether that has not been done yet.
        """

    def reconstruct(
        self,
        groups: Sequence[MatrixGroup],
        errors: Sequence[Sequence[torch.Tensor] | None],
        terms: Sequence[Terms],
        loss_scale: torch.Tensor | None,
        is_healthy: torch.Tensor | None = None,
    ) -> None:
        """Turn every M into the mean gradient, in place, and write to its error what was not sent.

        What it sent is its own projection, P̂ · own, and not the mean one. Differences between processes
        then leave the residual, which so stays bounded; the mean of the residuals is the same.

        Args:
            groups: Every matrix is M less the own projections of all terms but the last.
            errors: Of each group, where to write the new residual of each matrix, (rows, columns); None to
                forget it. They may be the tensors that the group itself has as `errors`.
            terms: Of each group the iterations of the step; their approximations add up.
            loss_scale: What the loss was multiplied by, None for 1.
            is_healthy: One bool, not read back: if it is false, errors stay as they were. None for true.
        """

    def subtract_own(self, groups: Sequence[MatrixGroup], factors: Sequence[Factors]) -> None:
        """Leave in every matrix what an iteration did not send of it.

        Args:
            groups: The matrices, updated in place.
            factors: Of each group those of the iteration.
        """

    def orthonormal_rows(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return an orthonormal basis of the rows of every matrix.

        A row that depends on those before it becomes zero: the basis has as many rows that are not zero
        as the matrix has rank. So projecting on the rows is right whatever the matrix rank, zero included.
        Finite input never gives NaN.

        Args:
            batches: fp32 or fp64 tensors of shape (matrices, rows, columns), few rows and many columns; they
                may differ in all three, in type and in device.

        Returns:
            A new tensor of the same shape and type for each batch.
        """
