"""The passes over one matrix after the other: each element is read and written once.

A matrix is taken four rows at a time if that serves: a number of a factor that is loaded serves all four,
sixteen columns of them at a time, and later rows are already on their way from memory. Factors have four
rows; those beyond the matrix rank are zero. Addresses and distances are in bytes: `line` is that from one
row of a matrix to the next, `stride` that of a factor. Right factors are worked on in copies with room for
whole vectors, which live as long as the loop that fills them.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.matrices import DEPENDENT_BELOW
from thinwire.kernels.numba.compiler import Addresses, FactorBatch, Matrix, compiled, inlined
from thinwire.kernels.numba.vectors import (
    LANES,
    VECTOR_BYTES,
    Vector,
    fetch,
    first_lanes,
    load,
    splat,
    store,
    stream,
    streamed,
    total,
)

Four: TypeAlias = tuple[Vector, Vector, Vector, Vector]
"""Sixteen columns of four rows of a matrix or a factor."""
FourRows: TypeAlias = tuple[Four, Four, Four, Four]

Coefficients: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[Any]
"""fp32 or float64."""

FLOAT_BYTES = 4

# Rows shorter than this are multiplied one at a time, as they lie in memory: adding up sixteen lanes then
# costs more than loading factors again.
WIDE_BYTES = 4096

# About how far ahead memory is asked for, or four rows if that is further.
AHEAD_BYTES = 16 * 1024


@compiled
def all_products(
    matrices: Addresses, errors: Addresses, scale: float, rights: FactorBatch, lefts: FactorBatch
) -> None:
    """Add `scale` times its error to every M and write (M Q)ᵀ to its `left`."""
    rows, line = lefts.shape[2], FLOAT_BYTES * rights.shape[2]
    scales, right = splat(np.float32(scale)), _room(line)
    # An address keeps nothing alive: `right` must be used until the loop has ended, which copies into it.
    q, stride = right.ctypes.data, FLOAT_BYTES * right.shape[1]
    together = rows - rows % 4 if line >= WIDE_BYTES else 0
    for k in range(len(matrices)):
        _copy(rights[k], right)
        for i in range(0, together, 4):
            m, e = matrices[k] + i * line, errors[k] + i * line
            p = _products(m, e, line, scales, q, stride, 4)
            _write_totals(p[0], lefts, k, i)
            _write_totals(p[1], lefts, k, i + 1)
            _write_totals(p[2], lefts, k, i + 2)
            _write_totals(p[3], lefts, k, i + 3)
        for i in range(together, rows):
            m, e = matrices[k] + i * line, errors[k] + i * line
            _write_totals(_products(m, e, line, scales, q, stride, 1)[0], lefts, k, i)


@inlined
def _products(m: int, e: int, line: int, scale: Vector, q: int, stride: int, count: int) -> FourRows:
    """Add to four rows of M, or to one; M Q of each, still to be totalled."""
    none = splat(np.float32(0))
    nothing = (none, none, none, none)
    p = (nothing, nothing, nothing, nothing)
    whole = line - line % VECTOR_BYTES
    # Whole vectors first, then what is left of the row under a mask: memory behind it is not touched.
    for at in range(0, whole, VECTOR_BYTES):
        p = _add_products(m + at, e + at, line, scale, q + at, stride, p, count, LANES)
    if whole < line:
        lanes = (line - whole) // FLOAT_BYTES
        p = _add_products(m + whole, e + whole, line, scale, q + whole, stride, p, count, lanes)
    return p


@inlined
def _add_products(
    m: int,
    e: int,
    line: int,
    scale: Vector,
    q: int,
    stride: int,
    p: FourRows,
    count: int,
    lanes: int,
) -> FourRows:
    _fetch_rows(m, line, count)
    _fetch_rows(e, line, count)
    a, b, c, d = _load_rows(m, line, count, lanes)
    w, x, y, z = _load_rows(e, line, count, lanes)
    a, b, c, d = a + scale * w, b + scale * x, c + scale * y, d + scale * z
    _store_rows(m, line, (a, b, c, d), count, lanes)
    right = _load_rows(q, stride, 4, LANES)
    return _plus(p[0], a, right), _plus(p[1], b, right), _plus(p[2], c, right), _plus(p[3], d, right)


@inlined
def _plus(sums: Four, x: Vector, q: Four) -> Four:
    return sums[0] + x * q[0], sums[1] + x * q[1], sums[2] + x * q[2], sums[3] + x * q[3]


@inlined
def _write_totals(sums: Four, lefts: FactorBatch, k: int, i: int) -> None:
    lefts[k, 0, i], lefts[k, 1, i] = total(sums[0]), total(sums[1])
    lefts[k, 2, i], lefts[k, 3, i] = total(sums[2]), total(sums[3])


@compiled
def all_projections(lefts: FactorBatch, matrices: Addresses, owns: FactorBatch) -> None:
    """Write P̂ᵀ M of every M to its `own`."""
    rows, line = lefts.shape[2], FLOAT_BYTES * owns.shape[2]
    own = _room(line)
    t, stride = own.ctypes.data, FLOAT_BYTES * own.shape[1]
    # Four rows at a time however short they are: here nothing is added up across lanes.
    together = rows - rows % 4
    for k in range(len(matrices)):
        own[:] = 0
        for i in range(0, together, 4):
            _project(matrices[k] + i * line, line, _columns(lefts, k, i), t, stride, 4)
        for i in range(together, rows):
            # The other three rows are loaded as zeros, so it does not matter what they are multiplied with.
            p = _column(lefts, k, i)
            _project(matrices[k] + i * line, line, (p, p, p, p), t, stride, 1)
        _copy(own, owns[k])


@inlined
def _project(m: int, line: int, p: FourRows, t: int, stride: int, count: int) -> None:
    """Add P̂ᵀ M of four rows of M, or of one."""
    whole = line - line % VECTOR_BYTES
    for at in range(0, whole, VECTOR_BYTES):
        _fetch_rows(m + at, line, count)
        _add_projections(_load_rows(m + at, line, count, LANES), p, t + at, stride)
    if whole < line:
        lanes = (line - whole) // FLOAT_BYTES
        _add_projections(_load_rows(m + whole, line, count, lanes), p, t + whole, stride)


@inlined
def _add_projections(m: Four, p: FourRows, t: int, stride: int) -> None:
    a, b, c, d = _load_rows(t, stride, 4, LANES)
    w, x, y, z = m
    p0, p1, p2, p3 = p
    a = a + p0[0] * w + p1[0] * x + p2[0] * y + p3[0] * z
    b = b + p0[1] * w + p1[1] * x + p2[1] * y + p3[1] * z
    c = c + p0[2] * w + p1[2] * x + p2[2] * y + p3[2] * z
    d = d + p0[3] * w + p1[3] * x + p2[3] * y + p3[3] * z
    _store_rows(t, stride, (a, b, c, d), 4, LANES)


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
    """Write what was not sent of every M, times `inverse_scale`, to its error, and turn M into the mean."""
    rows, line = sent_lefts.shape[2], FLOAT_BYTES * sent_rights.shape[2]
    inverse, sent, mean = splat(np.float32(inverse_scale)), _room(line), _room(line)
    sent_at, mean_at, stride = sent.ctypes.data, mean.ctypes.data, FLOAT_BYTES * sent.shape[1]
    together = rows - rows % 4
    for k in range(len(matrices)):
        _copy(sent_rights[k], sent)
        _copy(mean_rights[k], mean)
        for i in range(0, together, 4):
            m, e = matrices[k] + i * line, errors[k] + i * line
            p, q = _columns(sent_lefts, k, i), _columns(mean_lefts, k, i)
            # Past the caches: what was there is not read first, and nobody reads it before the next step.
            # Asked out here, where the answer is compiled in, and not for every sixteen numbers.
            if (errors[k] | line) % VECTOR_BYTES == 0:
                _reconstruct(m, e, line, inverse, p, sent_at, q, mean_at, stride, 4, True)
            else:
                _reconstruct(m, e, line, inverse, p, sent_at, q, mean_at, stride, 4, False)
        for i in range(together, rows):
            m, e = matrices[k] + i * line, errors[k] + i * line
            a, b = _column(sent_lefts, k, i), _column(mean_lefts, k, i)
            _reconstruct(m, e, line, inverse, (a, a, a, a), sent_at, (b, b, b, b), mean_at, stride, 1, False)
    streamed()


@inlined
def _reconstruct(
    m: int,
    e: int,
    line: int,
    inverse: Vector,
    sent_left: FourRows,
    sent_right: int,
    mean_left: FourRows,
    mean_right: int,
    stride: int,
    count: int,
    past_caches: bool,
) -> None:
    """Reconstruct four rows of M, or one. `past_caches`: whether the error is written so."""
    whole = line - line % VECTOR_BYTES
    for at in range(0, whole, VECTOR_BYTES):
        _fetch_rows(m + at, line, count)
        residual = _residual(m + at, line, inverse, sent_left, sent_right + at, stride, count, LANES)
        if past_caches:
            _stream_rows(e + at, line, residual)
        else:
            _fetch_rows(e + at, line, count)
            _store_rows(e + at, line, residual, count, LANES)
        _write_mean(m + at, line, mean_left, mean_right + at, stride, count, LANES)
    if whole < line:
        m, e, lanes = m + whole, e + whole, (line - whole) // FLOAT_BYTES
        residual = _residual(m, line, inverse, sent_left, sent_right + whole, stride, count, lanes)
        _store_rows(e, line, residual, count, lanes)
        _write_mean(m, line, mean_left, mean_right + whole, stride, count, lanes)


@inlined
def _residual(
    m: int, line: int, inverse: Vector, left: FourRows, q: int, stride: int, count: int, lanes: int
) -> Four:
    """Return what was not sent of four rows of M, or of one."""
    a, b, c, d = _load_rows(m, line, count, lanes)
    right = _load_rows(q, stride, 4, LANES)
    a, b = (a - _combined(left[0], right)) * inverse, (b - _combined(left[1], right)) * inverse
    return a, b, (c - _combined(left[2], right)) * inverse, (d - _combined(left[3], right)) * inverse


@inlined
def _write_mean(m: int, line: int, left: FourRows, q: int, stride: int, count: int, lanes: int) -> None:
    right = _load_rows(q, stride, 4, LANES)
    a, b = _combined(left[0], right), _combined(left[1], right)
    c, d = _combined(left[2], right), _combined(left[3], right)
    _store_rows(m, line, (a, b, c, d), count, lanes)


@inlined
def _combined(coefficients: Four, vectors: Four) -> Vector:
    a, b, c, d = coefficients
    w, x, y, z = vectors
    return a * w + b * x + c * y + d * z


@inlined
def _column(factors: FactorBatch, k: int, i: int) -> Four:
    return splat(factors[k, 0, i]), splat(factors[k, 1, i]), splat(factors[k, 2, i]), splat(factors[k, 3, i])


@inlined
def _columns(factors: FactorBatch, k: int, i: int) -> FourRows:
    a, b = _column(factors, k, i), _column(factors, k, i + 1)
    return a, b, _column(factors, k, i + 2), _column(factors, k, i + 3)


@compiled
def _room(line: int) -> Matrix:
    """Return room for a factor's copy: whole vectors, and one more."""
    # One more, so that rows of 1024 columns or a multiple are not some times 4 KiB apart: of such, a first
    # cache keeps but a few at a time.
    return np.zeros((4, (line // VECTOR_BYTES + 2) * LANES), np.float32)


@compiled
def _copy(factor: Matrix, to: Matrix) -> None:
    """Copy as many columns as both have."""
    for r in range(len(factor)):
        for j in range(min(factor.shape[1], to.shape[1])):
            to[r, j] = factor[r, j]


@inlined
def _load_rows(address: int, stride: int, count: int, lanes: int) -> Four:
    """Return the first `lanes` of sixteen columns of four rows, or of one; zeros for the rest."""
    # For a single row the others are masked out: their addresses are not its, and are never touched.
    mask, others = first_lanes(lanes), first_lanes(lanes if count > 1 else 0)
    return (
        load(address, mask),
        load(address + stride, others),
        load(address + 2 * stride, others),
        load(address + 3 * stride, others),
    )


@inlined
def _store_rows(address: int, stride: int, rows: Four, count: int, lanes: int) -> None:
    """Write sixteen columns of four rows, or of one."""
    mask, others = first_lanes(lanes), first_lanes(lanes if count > 1 else 0)
    store(address, rows[0], mask)
    store(address + stride, rows[1], others)
    store(address + 2 * stride, rows[2], others)
    store(address + 3 * stride, rows[3], others)


@inlined
def _stream_rows(address: int, stride: int, rows: Four) -> None:
    """Write four rows past the caches: what was there is not read first. Both are multiples of 64."""
    stream(address, rows[0])
    stream(address + stride, rows[1])
    stream(address + 2 * stride, rows[2])
    stream(address + 3 * stride, rows[3])


@inlined
def _fetch_rows(address: int, line: int, count: int) -> None:
    """Ask for four rows that come later; not for one, which the processor foresees by itself."""
    address += max(4 * line, AHEAD_BYTES // line * line)
    if count > 1:
        fetch(address)
        fetch(address + line)
        fetch(address + 2 * line)
        fetch(address + 3 * line)


# Orthonormal rows, as `torch_kernels.orthonormal_rows` makes them of all matrices at once.


@compiled
def orthonormal(batch: FactorBatch, bases: FactorBatch) -> None:
    """Write an orthonormal basis of the rows of every matrix."""
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
        bases[i] = twice


@compiled
def _write_gram(rows: Rows, gram: Coefficients) -> None:
    for k in range(len(rows)):
        x = rows[k]
        for m in range(k + 1):
            y = rows[m]
            # In float64: nearly dependent rows differ in digits that fp32 does not have.
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
