"""Orthonormal rows of one matrix after the other, as `TorchKernels.orthonormal_rows` finds them of all."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.kernels.matrices import DEPENDENT_BELOW
from thinwire.kernels.numba.compiler import Matrix, compiled

Coefficients: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[Any]
"""fp32 or float64."""


def orthonormal_rows(batch: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the rows of every matrix, a new tensor like `batch`."""
    basis = torch.empty_like(batch, memory_format=torch.contiguous_format)
    _orthonormal(batch.contiguous().numpy(), basis.numpy())
    return basis


@compiled
def _orthonormal(batch: Matrix, bases: Matrix) -> None:
    count, columns = batch.shape[1:]
    gram, weights = np.empty((count, count)), np.empty((count, count))
    once, twice = np.empty((count, columns)), np.empty((count, columns))
    # Twice: what one pass leaves of nearly dependent rows, the second takes out.
    for i in range(len(batch)):
        _write_gram(batch[i], gram)
        _write_inverse_cholesky(gram, weights)
        _combine(weights, batch[i], once)
        _write_gram(once, gram)
        _write_inverse_cholesky(gram, weights)
        _combine(weights, once, twice)
        _copy(twice, bases[i])


@compiled
def _write_gram(rows: Rows, gram: Coefficients) -> None:
    for k in range(len(rows)):
        x = rows[k]
        for m in range(k + 1):
            y = rows[m]
            # In float64, or nearly dependent rows would differ in digits that there are not.
            total = 0.0
            for j in range(len(x)):
                total += np.float64(x[j]) * np.float64(y[j])
            gram[k, m] = gram[m, k] = total


@compiled
def _write_inverse_cholesky(gram: Coefficients, inverse: Coefficients) -> None:
    """Write the lower triangular W with W G Wᵀ = I, except for zero rows of W where G is dependent.

    The Gram matrix is overwritten: it becomes one of cosines, and of what is left of them.
    """
    count = len(gram)
    inverse[:] = 0
    # Rows of length one first: whether one depends on others is a question of angles, not of lengths.
    for k in range(count):
        inverse[k, k] = 1 / math.sqrt(gram[k, k]) if gram[k, k] > 0 else 0.0
    for k in range(count):
        for m in range(count):
            gram[k, m] *= inverse[k, k] * inverse[m, m]
    for row in range(count):
        pivot = gram[row, row]
        root = 1 / math.sqrt(pivot) if pivot > DEPENDENT_BELOW else 0.0
        for m in range(row + 1):
            inverse[row, m] *= root
        for k in range(row + 1, count):
            below = gram[k, row] * root
            for m in range(row + 1):
                inverse[k, m] -= below * inverse[row, m]
            for m in range(row + 1, count):
                gram[k, m] -= below * gram[m, row] * root


@compiled
def _combine(weights: Coefficients, rows: Rows, combined: Coefficients) -> None:
    """Write W X for a lower triangular W."""
    combined[:] = 0
    for k in range(len(rows)):
        line = combined[k]
        for m in range(k + 1):
            weight, x = weights[k, m], rows[m]
            for j in range(len(line)):
                line[j] += weight * x[j]


@compiled
def _copy(rows: Coefficients, rounded: Matrix) -> None:
    for k in range(len(rows)):
        x, y = rows[k], rounded[k]
        for j in range(len(x)):
            y[j] = x[j]
