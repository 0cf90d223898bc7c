"""The same passes for matrix rank 1, where factors are single rows."""

from __future__ import annotations

import numpy as np

from thinwire.algorithms.kernels.numba.compiler import Addresses, FactorBatch, Matrix, compiled, matrix_at
from thinwire.algorithms.kernels.numba.rows import FLOAT_BYTES
from thinwire.algorithms.kernels.numba.vectors import (
    LANES,
    VECTOR_BYTES,
    first_lanes,
    load,
    splat,
    store,
    stream,
    streamed,
)

__all__ = ["all_products", "all_projections", "reconstruct_all"]

# Of so many columns, several rows are projected together: the factor does not stay in a core's first cache.
WIDE_COLUMNS = 4096


@compiled
def all_products(
    matrices: Addresses, errors: Addresses, scale: float, rights: FactorBatch, lefts: FactorBatch
) -> None:
    """As `four.all_products`, for single rows: add `scale` times its error to every M, and write M q."""
    rows, columns = lefts.shape[2], rights.shape[2]
    for k in range(len(matrices)):
        matrix, error = matrix_at(matrices[k], rows, columns), matrix_at(errors[k], rows, columns)
        _products(matrix, error, np.float32(scale), rights[k], lefts[k])


@compiled
def _products(matrix: Matrix, error: Matrix, scale: np.float32, right: Matrix, left: Matrix) -> None:
    rows, columns = matrix.shape
    q, p = right[0], left[0]
    for i in range(rows):
        m, e = matrix[i], error[i]
        total = np.float32(0)
        for j in range(columns):
            x = m[j] + scale * e[j]
            m[j] = x
            total += x * q[j]
        p[i] = total


@compiled
def all_projections(lefts: FactorBatch, matrices: Addresses, owns: FactorBatch) -> None:
    """As `four.all_projections`, for single rows: write p̂ᵀ M of every M."""
    rows, columns = lefts.shape[2], owns.shape[2]
    for k in range(len(matrices)):
        _projections(lefts[k], matrix_at(matrices[k], rows, columns), owns[k])


@compiled
def _projections(left: Matrix, matrix: Matrix, own: Matrix) -> None:
    rows, columns = matrix.shape
    p, t = left[0], own[0]
    t[:] = 0
    together = rows - rows % 4 if columns >= WIDE_COLUMNS else 0
    for i in range(0, together, 4):
        m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
        a, b, c, d = p[i], p[i + 1], p[i + 2], p[i + 3]
        for j in range(columns):
            t[j] += a * m0[j] + b * m1[j] + c * m2[j] + d * m3[j]
    for i in range(together, rows):
        m, a = matrix[i], p[i]
        for j in range(columns):
            t[j] += a * m[j]


@compiled
def reconstruct_all(
    matrices: Addresses,
    errors: Addresses,
    inverse_scale: float,
    sent_lefts: FactorBatch,
    sent_rights: FactorBatch,
    mean_lefts: FactorBatch,
    mean_rights: FactorBatch,
) -> None:
    """As `four.reconstruct_all`, for single rows."""
    rows, line = sent_lefts.shape[2], FLOAT_BYTES * sent_rights.shape[2]
    inverse, every = splat(np.float32(inverse_scale)), first_lanes(LANES)
    whole = line - line % VECTOR_BYTES
    some = first_lanes((line - whole) // FLOAT_BYTES)
    for k in range(len(matrices)):
        p, q = sent_rights.ctypes.data + k * line, mean_rights.ctypes.data + k * line
        # As in `four`: only whole lines can be written so.
        past_caches = (errors[k] | line) % VECTOR_BYTES == 0
        for i in range(rows):
            m, e = matrices[k] + i * line, errors[k] + i * line
            a, b = splat(sent_lefts[k, 0, i]), splat(mean_lefts[k, 0, i])
            for at in range(0, whole, VECTOR_BYTES):
                residual = (load(m + at, every) - a * load(p + at, every)) * inverse
                if past_caches:
                    stream(e + at, residual)
                else:
                    store(e + at, residual, every)
                store(m + at, b * load(q + at, every), every)
            if whole < line:
                store(e + whole, (load(m + whole, some) - a * load(p + whole, some)) * inverse, some)
                store(m + whole, b * load(q + whole, some), some)
    streamed()
