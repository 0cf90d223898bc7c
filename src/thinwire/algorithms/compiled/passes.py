"""The passes of a step over its matrices, compiled by Numba: each element is read and written once.

Matrices are fp32, contiguous and on the CPU. Inside, factors have one row or four: those beyond the matrix
rank are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.functional import pad

from thinwire.algorithms.compiled.compiler import (
    FACTOR_ROWS,
    Addresses,
    Matrix,
    addresses,
    compiled,
    matrix_at,
)
from thinwire.algorithms.matrices import MatrixGroup

__all__ = ["products", "projections", "settle"]

Rows: TypeAlias = tuple[Matrix, Matrix, Matrix, Matrix]

# Where so many numbers of a factor belong to one row of a matrix, they do not stay in a core's first cache
# from one row to the next: take some rows together. Others are fastest in the order they lie in memory.
WIDE_FACTOR = 4096

# Rows of a tile: one product goes over them, then another.
TILE_ROWS = 16

# Numbers in a line of a cache.
LINE = 16


def products(
    group: MatrixGroup, errors: Sequence[torch.Tensor], right: torch.Tensor, scale: float
) -> torch.Tensor:
    """Add its error, if there are any, times `scale` to every matrix; (M Q)ᵀ, (matrices, r, rows)."""
    filled = _filled(right)
    left = right.new_empty(*filled.shape[:2], group.matrices[0].shape[0])
    # Not the matrix itself: where the two overlap, nothing is vectorised.
    added = errors or [torch.zeros_like(group.matrices[0])] * len(group.matrices)
    _all_products(addresses(group.matrices), addresses(added), scale, filled.numpy(), left.numpy())
    return left[:, : group.matrix_rank]


def projections(group: MatrixGroup, left: torch.Tensor) -> torch.Tensor:
    """P̂ᵀ M of every matrix, (matrices, r, columns)."""
    filled = _filled(left)
    own = left.new_empty(*filled.shape[:2], group.matrices[0].shape[1])
    _all_projections(filled.numpy(), addresses(group.matrices), own.numpy())
    return own[:, : group.matrix_rank]


def settle(
    group: MatrixGroup,
    errors: Sequence[torch.Tensor],
    sent: tuple[torch.Tensor, torch.Tensor],
    mean: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> None:
    """Write what was not sent of every M, over `scale`, to its error, and turn M into the mean."""
    factors = [_filled(factor).numpy() for factor in (*sent, *mean)]
    _settle_all(addresses(group.matrices), addresses(errors), 1 / scale, *factors)


def _filled(factors: torch.Tensor) -> torch.Tensor:
    """With rows of zeros up to four; a single row as it is."""
    if factors.shape[1] in (1, FACTOR_ROWS):
        return factors.contiguous()
    return pad(factors, (0, 0, 0, FACTOR_ROWS - factors.shape[1]))


@compiled
def _all_products(
    matrices: Addresses, errors: Addresses, scale: float, rights: Matrix, lefts: Matrix
) -> None:
    rows, columns = lefts.shape[2], rights.shape[2]
    for i in range(len(matrices)):
        matrix, error = matrix_at(matrices[i], rows, columns), matrix_at(errors[i], rows, columns)
        if lefts.shape[1] == 1:
            _products_of_one(matrix, error, np.float32(scale), rights[i], lefts[i])
        else:
            _products(matrix, error, np.float32(scale), rights[i], lefts[i])


@compiled
def _all_projections(lefts: Matrix, matrices: Addresses, owns: Matrix) -> None:
    rows, columns = lefts.shape[2], owns.shape[2]
    for i in range(len(matrices)):
        matrix = matrix_at(matrices[i], rows, columns)
        if lefts.shape[1] == 1:
            _projections_of_one(lefts[i], matrix, owns[i])
        else:
            _projections(lefts[i], matrix, owns[i])


@compiled
def _settle_all(
    matrices: Addresses,
    errors: Addresses,
    inverse_scale: float,
    sent_lefts: Matrix,
    sent_rights: Matrix,
    mean_lefts: Matrix,
    mean_rights: Matrix,
) -> None:
    rows, columns = sent_lefts.shape[2], sent_rights.shape[2]
    for i in range(len(matrices)):
        matrix, error = matrix_at(matrices[i], rows, columns), matrix_at(errors[i], rows, columns)
        sent, mean = (sent_lefts[i], sent_rights[i]), (mean_lefts[i], mean_rights[i])
        if sent_lefts.shape[1] == 1:
            _settle_of_one(matrix, error, np.float32(inverse_scale), *sent, *mean)
        else:
            _settle(matrix, error, np.float32(inverse_scale), *sent, *mean)


@compiled
def _products(matrix: Matrix, error: Matrix, scale: np.float32, right: Matrix, left: Matrix) -> None:
    """Add `scale` times the error to M, and write (M Q)ᵀ to `left`."""
    rows, columns = matrix.shape
    q0, q1, q2, q3 = _spread(right)
    tiled = rows - rows % TILE_ROWS if FACTOR_ROWS * columns >= WIDE_FACTOR else 0
    for first in range(0, tiled, TILE_ROWS):
        tile = slice(first, first + TILE_ROWS)
        _add(matrix[tile].reshape(-1), error[tile].reshape(-1), scale)
        for i in range(first, first + TILE_ROWS, 2):
            m, n = matrix[i], matrix[i + 1]
            s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = np.float32(0)
            for j in range(columns):
                s0 += m[j] * q0[j]
                s1 += m[j] * q1[j]
                s2 += m[j] * q2[j]
                s3 += m[j] * q3[j]
                t0 += n[j] * q0[j]
                t1 += n[j] * q1[j]
                t2 += n[j] * q2[j]
                t3 += n[j] * q3[j]
            left[0, i], left[1, i], left[2, i], left[3, i] = s0, s1, s2, s3
            left[0, i + 1], left[1, i + 1], left[2, i + 1], left[3, i + 1] = t0, t1, t2, t3
    for i in range(tiled, rows):
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
    t0, t1, t2, t3 = _spread(own)
    together = _rows_together(rows, FACTOR_ROWS * columns)
    for i in range(0, together, 4):
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
    for i in range(together, rows):
        m = matrix[i]
        a, b, c, d = _column(left, i)
        for j in range(columns):
            t0[j] += a * m[j]
            t1[j] += b * m[j]
            t2[j] += c * m[j]
            t3[j] += d * m[j]
    for j in range(columns):
        own[0, j], own[1, j], own[2, j], own[3, j] = t0[j], t1[j], t2[j], t3[j]


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
    sent, mean = _spread(sent_right), _spread(mean_right)
    rows, columns = matrix.shape
    if 2 * FACTOR_ROWS * columns <= WIDE_FACTOR:
        _settle_row_by_row(matrix, error, inverse_scale, sent_left, sent, mean_left, mean)
        return
    for first in range(0, rows, TILE_ROWS):
        last = min(first + TILE_ROWS, rows)
        _write_error(matrix, error, inverse_scale, sent_left, sent, first, last)
        _write_mean(matrix, mean_left, mean, first, last)


@compiled
def _settle_row_by_row(
    matrix: Matrix,
    error: Matrix,
    inverse_scale: np.float32,
    sent_left: Matrix,
    sent_right: Rows,
    mean_left: Matrix,
    mean_right: Rows,
) -> None:
    # The same loops as those at the ends of the next two: as functions of a row they cost 2 to 4 % of a step.
    rows, columns = matrix.shape
    p0, p1, p2, p3 = sent_right
    q0, q1, q2, q3 = mean_right
    for i in range(rows):
        m, e = matrix[i], error[i]
        a, b, c, d = _column(sent_left, i)
        for j in range(columns):
            e[j] = (m[j] - (a * p0[j] + b * p1[j] + c * p2[j] + d * p3[j])) * inverse_scale
        a, b, c, d = _column(mean_left, i)
        for j in range(columns):
            m[j] = a * q0[j] + b * q1[j] + c * q2[j] + d * q3[j]


@compiled
def _write_error(
    matrix: Matrix,
    error: Matrix,
    inverse_scale: np.float32,
    left: Matrix,
    right: Rows,
    first: int,
    last: int,
) -> None:
    columns = matrix.shape[1]
    q0, q1, q2, q3 = right
    together = first + _rows_together(last - first, FACTOR_ROWS * columns)
    for i in range(first, together, 4):
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
    for i in range(together, last):
        m, e = matrix[i], error[i]
        a, b, c, d = _column(left, i)
        for j in range(columns):
            e[j] = (m[j] - (a * q0[j] + b * q1[j] + c * q2[j] + d * q3[j])) * inverse_scale


@compiled
def _write_mean(matrix: Matrix, left: Matrix, right: Rows, first: int, last: int) -> None:
    columns = matrix.shape[1]
    q0, q1, q2, q3 = right
    together = first + _rows_together(last - first, FACTOR_ROWS * columns)
    for i in range(first, together, 4):
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
    for i in range(together, last):
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
    together = _rows_together(rows, columns)
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
def _rows_together(rows: int, factor: int) -> int:
    """How many of the first rows are taken by four, with so many numbers of a factor to a row."""
    return rows - rows % 4 if factor >= WIDE_FACTOR else 0


@compiled
def _spread(factor: Matrix) -> Rows:
    """Copies of the rows that take different places in a core's first cache, whatever their length."""
    columns = factor.shape[1]
    rows = np.empty((FACTOR_ROWS, columns + LINE), np.float32)
    for k in range(FACTOR_ROWS):
        for j in range(columns):
            rows[k, j] = factor[k, j]
    return rows[0, :columns], rows[1, :columns], rows[2, :columns], rows[3, :columns]


@compiled
def _column(factor: Matrix, i: int) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    return factor[0, i], factor[1, i], factor[2, i], factor[3, i]


@compiled
def _add(x: Matrix, y: Matrix, scale: np.float32) -> None:
    for j in range(len(x)):
        x[j] += scale * y[j]
