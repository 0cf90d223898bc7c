"""The passes of a step over its matrices, compiled by Numba: each element is read and written once.

Matrices are fp32, contiguous and on the CPU. Inside, factors have one row or four: those beyond the matrix
rank are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch.nn.functional import pad

from thinwire.algorithms.matrices import MatrixGroup

__all__ = ["FACTOR_ROWS", "products", "projections", "settle"]

Matrix: TypeAlias = NDArray[np.float32]

FACTOR_ROWS = 4

# The factors of wider matrices do not stay in a core's first cache from one row to the next: take four rows
# of those together.
NARROW_COLUMNS = 1024

# Rows of which the error is written before the mean.
TILE_ROWS = 16

# Sums may be reordered, so that they can be vectorised. Infinity and NaN keep their meaning.
compiled = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True, error_model="numpy", cache=True)


def products(
    group: MatrixGroup, errors: Sequence[torch.Tensor], right: torch.Tensor, scale: float
) -> torch.Tensor:
    """Add its error, if there are any, times `scale` to every matrix; (M Q)ᵀ, (matrices, r, rows)."""
    filled = _filled(right)
    left = right.new_empty(*filled.shape[:2], group.matrices[0].shape[0])
    # Not the matrix itself: where the two overlap, nothing is vectorised.
    added = errors or [torch.zeros_like(group.matrices[0])] * len(group.matrices)
    run = _products_of_one if group.matrix_rank == 1 else _products
    for matrix, error, q, p in zip(group.matrices, added, filled, left, strict=True):
        run(matrix.numpy(), error.numpy(), np.float32(scale), q.numpy(), p.numpy())
    return left[:, : group.matrix_rank]


def projections(group: MatrixGroup, left: torch.Tensor) -> torch.Tensor:
    """P̂ᵀ M of every matrix, (matrices, r, columns)."""
    filled = _filled(left)
    own = left.new_empty(*filled.shape[:2], group.matrices[0].shape[1])
    run = _projections_of_one if group.matrix_rank == 1 else _projections
    for matrix, p, projection in zip(group.matrices, filled, own, strict=True):
        run(p.numpy(), matrix.numpy(), projection.numpy())
    return own[:, : group.matrix_rank]


def settle(
    group: MatrixGroup,
    errors: Sequence[torch.Tensor],
    sent: tuple[torch.Tensor, torch.Tensor],
    mean: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> None:
    """Write what was not sent of every M, over `scale`, to its error, and turn M into the mean."""
    factors = [_filled(factor) for factor in (*sent, *mean)]
    run = _settle_of_one if group.matrix_rank == 1 else _settle
    for matrix, error, *of_one in zip(group.matrices, errors, *factors, strict=True):
        run(matrix.numpy(), error.numpy(), np.float32(1 / scale), *[factor.numpy() for factor in of_one])


def _filled(factors: torch.Tensor) -> torch.Tensor:
    """With rows of zeros up to four; a single row as it is."""
    if factors.shape[1] in (1, FACTOR_ROWS):
        return factors.contiguous()
    return pad(factors, (0, 0, 0, FACTOR_ROWS - factors.shape[1]))


@compiled
def _products(matrix: Matrix, error: Matrix, scale: np.float32, right: Matrix, left: Matrix) -> None:
    """Add `scale` times the error to M, and write (M Q)ᵀ to `left`."""
    rows, columns = matrix.shape
    q0, q1, q2, q3 = _rows(right)
    fours = _rows_taken_by_four(rows, columns)
    for i in range(0, fours, 4):
        _add(matrix[i : i + 4].reshape(-1), error[i : i + 4].reshape(-1), scale)
        m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
        for k in range(0, FACTOR_ROWS, 2):
            q, u = right[k], right[k + 1]
            s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = np.float32(0)
            for j in range(columns):
                x, y = q[j], u[j]
                s0 += m0[j] * x
                s1 += m1[j] * x
                s2 += m2[j] * x
                s3 += m3[j] * x
                t0 += m0[j] * y
                t1 += m1[j] * y
                t2 += m2[j] * y
                t3 += m3[j] * y
            left[k, i], left[k, i + 1], left[k, i + 2], left[k, i + 3] = s0, s1, s2, s3
            left[k + 1, i], left[k + 1, i + 1], left[k + 1, i + 2], left[k + 1, i + 3] = t0, t1, t2, t3
    for i in range(fours, rows):
        m, e = matrix[i], error[i]
        s0 = s1 = s2 = s3 = np.float32(0)
        for j in range(columns):
            x = m[j] + scale * e[j]
            m[j] = x
            s0 += x * q0[j]
            s1 += x * q1[j]
            s2 += x * q2[j]
            s3 += x * q3[j]
        left[0, i], left[1, i], left[2, i], left[3, i] = s0, s1, s2, s3


@compiled
def _projections(left: Matrix, matrix: Matrix, own: Matrix) -> None:
    """Write P̂ᵀ M to `own`."""
    rows, columns = matrix.shape
    own[:] = 0
    t0, t1, t2, t3 = _rows(own)
    fours = _rows_taken_by_four(rows, columns)
    for i in range(0, fours, 4):
        m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
        a0, b0, c0, d0 = _column(left, i)
        a1, b1, c1, d1 = _column(left, i + 1)
        a2, b2, c2, d2 = _column(left, i + 2)
        a3, b3, c3, d3 = _column(left, i + 3)
        for j in range(columns):
            w, x, y, z = m0[j], m1[j], m2[j], m3[j]
            t0[j] += a0 * w + a1 * x + a2 * y + a3 * z
            t1[j] += b0 * w + b1 * x + b2 * y + b3 * z
            t2[j] += c0 * w + c1 * x + c2 * y + c3 * z
            t3[j] += d0 * w + d1 * x + d2 * y + d3 * z
    for i in range(fours, rows):
        m = matrix[i]
        a, b, c, d = _column(left, i)
        for j in range(columns):
            x = m[j]
            t0[j] += a * x
            t1[j] += b * x
            t2[j] += c * x
            t3[j] += d * x


@compiled
def _settle(
    matrix: Matrix,
    error: Matrix,
    inverse_scale: np.float32,
    sent_left: Matrix,
    sent_right: Matrix,
    mean_left: Matrix,
    mean_right: Matrix,
) -> None:
    """Write what was not sent of M to `error`, and turn M into the mean."""
    rows = len(matrix)
    for first in range(0, rows, TILE_ROWS):
        last = min(first + TILE_ROWS, rows)
        _write_error(matrix, error, inverse_scale, sent_left, sent_right, first, last)
        _write_mean(matrix, mean_left, mean_right, first, last)


@compiled
def _write_error(
    matrix: Matrix,
    error: Matrix,
    inverse_scale: np.float32,
    left: Matrix,
    right: Matrix,
    first: int,
    last: int,
) -> None:
    columns = matrix.shape[1]
    q0, q1, q2, q3 = _rows(right)
    fours = first + _rows_taken_by_four(last - first, columns)
    for i in range(first, fours, 4):
        m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
        e0, e1, e2, e3 = error[i], error[i + 1], error[i + 2], error[i + 3]
        a0, b0, c0, d0 = _column(left, i)
        a1, b1, c1, d1 = _column(left, i + 1)
        a2, b2, c2, d2 = _column(left, i + 2)
        a3, b3, c3, d3 = _column(left, i + 3)
        for j in range(columns):
            w, x, y, z = q0[j], q1[j], q2[j], q3[j]
            e0[j] = (m0[j] - (a0 * w + b0 * x + c0 * y + d0 * z)) * inverse_scale
            e1[j] = (m1[j] - (a1 * w + b1 * x + c1 * y + d1 * z)) * inverse_scale
            e2[j] = (m2[j] - (a2 * w + b2 * x + c2 * y + d2 * z)) * inverse_scale
            e3[j] = (m3[j] - (a3 * w + b3 * x + c3 * y + d3 * z)) * inverse_scale
    for i in range(fours, last):
        m, e = matrix[i], error[i]
        a, b, c, d = _column(left, i)
        for j in range(columns):
            e[j] = (m[j] - (a * q0[j] + b * q1[j] + c * q2[j] + d * q3[j])) * inverse_scale


@compiled
def _write_mean(matrix: Matrix, left: Matrix, right: Matrix, first: int, last: int) -> None:
    columns = matrix.shape[1]
    q0, q1, q2, q3 = _rows(right)
    fours = first + _rows_taken_by_four(last - first, columns)
    for i in range(first, fours, 4):
        m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
        a0, b0, c0, d0 = _column(left, i)
        a1, b1, c1, d1 = _column(left, i + 1)
        a2, b2, c2, d2 = _column(left, i + 2)
        a3, b3, c3, d3 = _column(left, i + 3)
        for j in range(columns):
            w, x, y, z = q0[j], q1[j], q2[j], q3[j]
            m0[j] = a0 * w + b0 * x + c0 * y + d0 * z
            m1[j] = a1 * w + b1 * x + c1 * y + d1 * z
            m2[j] = a2 * w + b2 * x + c2 * y + d2 * z
            m3[j] = a3 * w + b3 * x + c3 * y + d3 * z
    for i in range(fours, last):
        m = matrix[i]
        a, b, c, d = _column(left, i)
        for j in range(columns):
            m[j] = a * q0[j] + b * q1[j] + c * q2[j] + d * q3[j]


@compiled
def _products_of_one(matrix: Matrix, error: Matrix, scale: np.float32, right: Matrix, left: Matrix) -> None:
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
def _projections_of_one(left: Matrix, matrix: Matrix, own: Matrix) -> None:
    rows, columns = matrix.shape
    p, t = left[0], own[0]
    t[:] = 0
    fours = rows - rows % 4
    for i in range(0, fours, 4):
        m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
        a, b, c, d = p[i], p[i + 1], p[i + 2], p[i + 3]
        for j in range(columns):
            t[j] += a * m0[j] + b * m1[j] + c * m2[j] + d * m3[j]
    for i in range(fours, rows):
        m, a = matrix[i], p[i]
        for j in range(columns):
            t[j] += a * m[j]


@compiled
def _settle_of_one(
    matrix: Matrix,
    error: Matrix,
    inverse_scale: np.float32,
    sent_left: Matrix,
    sent_right: Matrix,
    mean_left: Matrix,
    mean_right: Matrix,
) -> None:
    rows, columns = matrix.shape
    sent, mean = sent_right[0], mean_right[0]
    for i in range(rows):
        m, e = matrix[i], error[i]
        a, b = sent_left[0, i], mean_left[0, i]
        for j in range(columns):
            e[j] = (m[j] - a * sent[j]) * inverse_scale
            m[j] = b * mean[j]


@compiled
def _rows_taken_by_four(rows: int, columns: int) -> int:
    return 0 if columns <= NARROW_COLUMNS else rows - rows % 4


@compiled
def _rows(factor: Matrix) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    return factor[0], factor[1], factor[2], factor[3]


@compiled
def _column(factor: Matrix, i: int) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    return factor[0, i], factor[1, i], factor[2, i], factor[3, i]


@compiled
def _add(x: Matrix, y: Matrix, scale: np.float32) -> None:
    for j in range(len(x)):
        x[j] += scale * y[j]
