"""Orthonormal rows for many matrices at once: safe for dependent rows, never NaN from finite input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from thinwire.algorithms.compilation import compiled_for

__all__ = ["orthonormal_rows"]

# A row is dependent on those before it if the squared sine of its angle to their span is below this.
# fp32 noise in a dependent row is about 1e-14. Many nearly dependent rows amplify float64's rounding in
# the coefficients; a second pass over rows that are nearly orthonormal takes out what the first left.
DEPENDENT_BELOW = 1e-10


def orthonormal_rows(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An orthonormal basis of the rows of every matrix.

    A row that depends on those before it becomes zero: the basis has as many rows that are not zero
    as the matrix has rank. So projecting on the rows is right whatever the matrix rank, zero included.

    Gram–Schmidt in coefficients, twice: the Gram matrices of all batches, in float64, are factorised
    together by one Cholesky recursion over the few rows, none over matrices, and without reading
    anything back from the device.

    Args:
        batches: fp32 or fp64 tensors of shape (matrices, rows, columns), few rows and many columns; they
            may differ in all three.

    Returns:
        A new tensor of the same shape and type for each batch.

    Cost: two float64 copies of each batch, each read twice.
    """
    if not batches:
        return []
    compiled = compiled_for(batches[0], max(batch.shape[1] for batch in batches))
    if compiled is not None:
        return [compiled.orthonormal_rows(batch) for batch in batches]
    once = _pass([batch.double() for batch in batches])
    return [basis.to(batch.dtype) for basis, batch in zip(_pass(once), batches, strict=True)]


def _pass(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One factorisation of all Gram matrices, applied."""
    most_rows = max(batch.shape[1] for batch in batches)
    grams = [_padded(each @ each.mT, most_rows) for each in batches]
    transforms = _inverse_cholesky(torch.cat(grams)).split_with_sizes([len(batch) for batch in batches])
    return [
        transform[:, : each.shape[1], : each.shape[1]] @ each
        for transform, each in zip(transforms, batches, strict=True)
    ]


def _padded(grams: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - grams.shape[-1]
    return pad(grams, (0, missing, 0, missing)) if missing else grams


def _inverse_cholesky(grams: torch.Tensor) -> torch.Tensor:
    """Lower triangular W with W G Wᵀ = I, except for zero rows of W where G is dependent."""
    lengths = grams.diagonal(dim1=1, dim2=2)
    scale = torch.where(lengths > 0, lengths.rsqrt(), 0.0)
    cosines = grams * scale.unsqueeze(2) * scale.unsqueeze(1)
    inverse = torch.diag_embed(scale)
    for row in range(grams.shape[1]):
        pivot = cosines[:, row, row]
        root = torch.where(pivot > DEPENDENT_BELOW, pivot.rsqrt(), 0.0)
        inverse[:, row] *= root.unsqueeze(1)
        below = cosines[:, row + 1 :, row] * root.unsqueeze(1)
        inverse[:, row + 1 :] -= below.unsqueeze(2) * inverse[:, row].unsqueeze(1)
        cosines[:, row + 1 :, row + 1 :] -= below.unsqueeze(2) * below.unsqueeze(1)
    return inverse
