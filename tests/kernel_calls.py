"""Calls of kernels with a list for each argument, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.kernels import dispatch
from thinwire.kernels.matrices import Factors, MatmulBatch, MatrixGroup, Reconstruction, Rows, Terms


def asked(
    groups: Sequence[MatrixGroup],
    factors: Sequence[torch.Tensor],
    loss_scale: torch.Tensor | None,
    *,
    add_error: bool,
) -> list[MatmulBatch]:
    return [MatmulBatch(*each, loss_scale, add_error) for each in zip(groups, factors, strict=True)]


def wanted(
    groups: Sequence[MatrixGroup],
    errors: Sequence[Sequence[torch.Tensor] | None],
    terms: Sequence[Terms],
    loss_scale: torch.Tensor | None,
    is_healthy: torch.Tensor | None = None,
) -> list[Reconstruction]:
    return [Reconstruction(*each, loss_scale, is_healthy) for each in zip(groups, errors, terms, strict=True)]


def orthonormal_rows(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    kernels = dispatch.kernels_for(batches[0], max(batch.shape[1] for batch in batches))
    return kernels.orthonormal_rows([Rows(batch) for batch in batches])


def iteration(
    basis: torch.Tensor, own: torch.Tensor, mean: torch.Tensor, *, basis_is_left: bool = True
) -> Factors:
    """The factors of an iteration that has projected on a basis."""
    if basis_is_left:
        return Factors((basis, own), (basis, mean))
    return Factors((own, basis), (mean, basis), projection=0)
