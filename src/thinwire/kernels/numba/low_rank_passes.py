"""The passes over one matrix after the other: each element is read and written once.

A matrix is processed four rows at a time where that is faster, with sixteen of their columns in a tile. Each
loaded number of a factor serves all four rows, and later rows are prefetched from memory. Factors have four
rows; rows beyond the matrix rank are zero. Addresses and distances are in bytes: `line` is the distance of a
matrix's rows, `stride` that of a factor's. Right factors are used in copies padded to whole vectors, which
live as long as the loop that fills them.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.matrices import DEPENDENT_BELOW
from thinwire.kernels.numba.compiler import Addresses, FactorBatch, Matrix, compiled, inlined
from thinwire.kernels.numba.vectors import (
    VECTOR_BYTES,
    WIDTH,
    Tile,
    fetch,
    first_lanes,
    load,
    rows_of,
    splat,
    spread,
    store,
    stream,
    streamed,
    tile_of,
    total,
)

Tiles: TypeAlias = tuple[Tile, Tile, Tile, Tile]

Coefficients: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[Any]
"""fp32 or float64."""

FLOAT_BYTES = 4

# Rows shorter than this are multiplied one at a time, in memory order: summing sixteen lanes then costs more
# than loading factors again.
WIDE_BYTES = 4096

# About how far ahead memory is prefetched, or four rows if that is further.
AHEAD_BYTES = 16 * 1024


@compiled
def all_products(
    matrices: Addresses, errors: Addresses, scale: float, rights: FactorBatch, lefts: FactorBatch
) -> None:
    """Add `scale` times its error to every M and write (M Q)ᵀ to its `left`."""
    rows, line = lefts.shape[2], FLOAT_BYTES * rights.shape[2]
    scales, right = spread(splat(np.float32(scale))), _room(line)
    # An address keeps nothing alive: `right` must be used until the end of the loop that copies into it.
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
def _products(m: int, e: int, line: int, scale: Tile, q: int, stride: int, count: int) -> Tiles:
    """Add errors to four rows of M, or one; return M Q of each as lanes, not summed yet."""
    none = spread(splat(np.float32(0)))
    p = (none, none, none, none)
    whole = line - line % VECTOR_BYTES
    # Whole vectors first, then the rest of the row under a mask: memory after it is not touched.
    for at in range(0, whole, VECTOR_BYTES):
        p = _add_products(m + at, e + at, line, scale, q + at, stride, p, count, WIDTH)
    if whole < line:
        num_lanes = (line - whole) // FLOAT_BYTES
        p = _add_products(m + whole, e + whole, line, scale, q + whole, stride, p, count, num_lanes)
    return p


@inlined
def _add_products(
    m: int, e: int, line: int, scale: Tile, q: int, stride: int, p: Tiles, count: int, num_lanes: int
) -> Tiles:
    _fetch_rows(m, line, count)
    _fetch_rows(e, line, count)
    rows = _load_rows(m, line, count, num_lanes) + scale * _load_rows(e, line, count, num_lanes)
    _store_rows(m, line, rows, count, num_lanes)
    right = _load_rows(q, stride, 4, WIDTH)
    a, b, c, d = rows_of(rows)
    p0, p1, p2, p3 = p
    return p0 + spread(a) * right, p1 + spread(b) * right, p2 + spread(c) * right, p3 + spread(d) * right


@inlined
def _write_totals(sums: Tile, lefts: FactorBatch, k: int, i: int) -> None:
    a, b, c, d = rows_of(sums)
    lefts[k, 0, i], lefts[k, 1, i], lefts[k, 2, i], lefts[k, 3, i] = total(a), total(b), total(c), total(d)


@compiled
def all_projections(lefts: FactorBatch, matrices: Addresses, owns: FactorBatch) -> None:
    """Write P̂ᵀ M of every M to its `own`."""
    rows, line = lefts.shape[2], FLOAT_BYTES * owns.shape[2]
    own = _room(line)
    t, stride = own.ctypes.data, FLOAT_BYTES * own.shape[1]
    # Four rows at a time, however short they are: nothing is summed across columns.
    together = rows - rows % 4
    for k in range(len(matrices)):
        own[:] = 0
        for i in range(0, together, 4):
            p, q = _column(lefts, k, i), _column(lefts, k, i + 1)
            r, s = _column(lefts, k, i + 2), _column(lefts, k, i + 3)
            _project(matrices[k] + i * line, line, (p, q, r, s), t, stride, 4)
        for i in range(together, rows):
            # The other three rows are loaded as zeros, so their factors do not matter.
            p = _column(lefts, k, i)
            _project(matrices[k] + i * line, line, (p, p, p, p), t, stride, 1)
        _copy(own, owns[k])


@inlined
def _column(factors: FactorBatch, k: int, i: int) -> Tile:
    """Return a column of a factor, one number in each row."""
    a, b = splat(factors[k, 0, i]), splat(factors[k, 1, i])
    return tile_of(a, b, splat(factors[k, 2, i]), splat(factors[k, 3, i]))


@inlined
def _project(m: int, line: int, p: Tiles, t: int, stride: int, count: int) -> None:
    """Add P̂ᵀ M of four rows of M, or of one."""
    whole = line - line % VECTOR_BYTES
    for at in range(0, whole, VECTOR_BYTES):
        _fetch_rows(m + at, line, count)
        own = _load_rows(t + at, stride, 4, WIDTH)
        own = _plus_products(own, p, _load_rows(m + at, line, count, WIDTH))
        _store_rows(t + at, stride, own, 4, WIDTH)
    if whole < line:
        own = _load_rows(t + whole, stride, 4, WIDTH)
        own = _plus_products(own, p, _load_rows(m + whole, line, count, (line - whole) // FLOAT_BYTES))
        _store_rows(t + whole, stride, own, 4, WIDTH)


@inlined
def _plus_products(sums: Tile, tiles: Tiles, rows: Tile) -> Tile:
    """Add each of four tiles, multiplied by a row."""
    a, b, c, d = rows_of(rows)
    return sums + tiles[0] * spread(a) + tiles[1] * spread(b) + tiles[2] * spread(c) + tiles[3] * spread(d)


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
    """Write what was not sent of every M, times `inverse_scale`, to its error, and replace M by the mean."""
    rows, line = sent_lefts.shape[2], FLOAT_BYTES * sent_rights.shape[2]
    inverse, own, mean = spread(splat(np.float32(inverse_scale))), _room(line), _room(line)
    stride, together = FLOAT_BYTES * own.shape[1], rows - rows % 4
    for k in range(len(matrices)):
        _copy(sent_rights[k], own)
        _copy(mean_rights[k], mean)
        for i in range(0, together, 4):
            m, e = matrices[k] + i * line, errors[k] + i * line
            p = _by_factor_row(sent_lefts, k, i, 4), own.ctypes.data
            q = _by_factor_row(mean_lefts, k, i, 4), mean.ctypes.data
            # Non-temporal stores: the old values are not read first, and nothing reads the new ones before
            # the next step. Decide here, so that the choice is compiled in, not made every sixteen numbers.
            if (errors[k] | line) % VECTOR_BYTES == 0:
                _reconstruct(m, e, line, inverse, p, q, stride, 4, True)
            else:
                _reconstruct(m, e, line, inverse, p, q, stride, 4, False)
        for i in range(together, rows):
            m, e = matrices[k] + i * line, errors[k] + i * line
            p = _by_factor_row(sent_lefts, k, i, 1), own.ctypes.data
            q = _by_factor_row(mean_lefts, k, i, 1), mean.ctypes.data
            _reconstruct(m, e, line, inverse, p, q, stride, 1, False)
    streamed()


@inlined
def _by_factor_row(factors: FactorBatch, k: int, i: int, count: int) -> Tiles:
    """Return, for each row of a factor, its numbers for four rows of M, or for one."""
    return (
        _numbers(factors[k, 0], i, count),
        _numbers(factors[k, 1], i, count),
        _numbers(factors[k, 2], i, count),
        _numbers(factors[k, 3], i, count),
    )


@inlined
def _numbers(row: Rows, i: int, count: int) -> Tile:
    if count == 1:
        return spread(splat(row[i]))
    return tile_of(splat(row[i]), splat(row[i + 1]), splat(row[i + 2]), splat(row[i + 3]))


@inlined
def _reconstruct(
    m: int,
    e: int,
    line: int,
    inverse: Tile,
    sent: tuple[Tiles, int],
    mean: tuple[Tiles, int],
    stride: int,
    count: int,
    past_caches: bool,
) -> None:
    """Reconstruct four rows of M, or one. `past_caches`: write the error with non-temporal stores."""
    whole = line - line % VECTOR_BYTES
    for at in range(0, whole, VECTOR_BYTES):
        _fetch_rows(m + at, line, count)
        rest = (_load_rows(m + at, line, count, WIDTH) - _combined(sent, at, stride)) * inverse
        if past_caches:
            _stream_rows(e + at, line, rest)
        else:
            _fetch_rows(e + at, line, count)
            _store_rows(e + at, line, rest, count, WIDTH)
        _store_rows(m + at, line, _combined(mean, at, stride), count, WIDTH)
    if whole < line:
        num_lanes = (line - whole) // FLOAT_BYTES
        rest = (_load_rows(m + whole, line, count, num_lanes) - _combined(sent, whole, stride)) * inverse
        _store_rows(e + whole, line, rest, count, num_lanes)
        _store_rows(m + whole, line, _combined(mean, whole, stride), count, num_lanes)


@inlined
def _combined(pair: tuple[Tiles, int], at: int, stride: int) -> Tile:
    """Return sixteen columns of the product of a left and a right factor."""
    left, right = pair
    a, b, c, d = rows_of(_load_rows(right + at, stride, 4, WIDTH))
    return left[0] * spread(a) + left[1] * spread(b) + left[2] * spread(c) + left[3] * spread(d)


@compiled
def _room(line: int) -> Matrix:
    """Return a buffer for a factor's copy: whole vectors, and one more."""
    # One more, so that rows of a multiple of 1024 columns are not a multiple of 4 KiB apart: an L1 cache
    # keeps only a few such rows at a time.
    return np.zeros((4, (line // VECTOR_BYTES + 2) * WIDTH), np.float32)


@compiled
def _copy(factor: Matrix, to: Matrix) -> None:
    """Copy as many columns as both have."""
    for r in range(len(factor)):
        for j in range(min(factor.shape[1], to.shape[1])):
            to[r, j] = factor[r, j]


@inlined
def _load_rows(address: int, stride: int, count: int, num_lanes: int) -> Tile:
    """Return the first `num_lanes` of sixteen columns of four rows, or of one; zeros for the rest."""
    # For a single row, the others are masked out: their addresses are out of bounds, and are not touched.
    mask, others = first_lanes(num_lanes), first_lanes(num_lanes if count > 1 else 0)
    a, b = load(address, mask), load(address + stride, others)
    return tile_of(a, b, load(address + 2 * stride, others), load(address + 3 * stride, others))


@inlined
def _store_rows(address: int, stride: int, rows: Tile, count: int, num_lanes: int) -> None:
    """Write sixteen columns of four rows, or of one."""
    mask, others = first_lanes(num_lanes), first_lanes(num_lanes if count > 1 else 0)
    a, b, c, d = rows_of(rows)
    store(address, a, mask)
    store(address + stride, b, others)
    store(address + 2 * stride, c, others)
    store(address + 3 * stride, d, others)


@inlined
def _stream_rows(address: int, stride: int, rows: Tile) -> None:
    """Write four rows with non-temporal stores. Address and stride are multiples of 64."""
    a, b, c, d = rows_of(rows)
    stream(address, a)
    stream(address + stride, b)
    stream(address + 2 * stride, c)
    stream(address + 3 * stride, d)


@inlined
def _fetch_rows(address: int, line: int, count: int) -> None:
    """Prefetch four later rows; not a single row, which the processor prefetches itself."""
    address += max(4 * line, AHEAD_BYTES // line * line)
    if count > 1:
        fetch(address)
        fetch(address + line)
        fetch(address + 2 * line)
        fetch(address + 3 * line)


# Orthonormal rows, as in `torch_kernels.orthonormal_rows` for all matrices together.


@compiled
def orthonormal(batch: FactorBatch, drawn: Matrix, bases: FactorBatch) -> None:
    """Write an orthonormal basis of the rows of every matrix, with drawn rows instead of zero rows."""
    count, columns = batch.shape[1:]
    gram, weights = np.empty((count, count)), np.empty((count, count))
    once, twice = np.empty((count, columns)), np.empty((count, columns))
    # Twice: the second pass removes what the first one leaves of nearly dependent rows.
    for i in range(len(batch)):
        for k in range(count):
            if not np.any(batch[i, k]):
                batch[i, k] = drawn[k]
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
            # In float64: nearly dependent rows differ only in digits that fp32 does not have.
            total = 0.0
            for j in range(len(x)):
                total += np.float64(x[j]) * np.float64(y[j])
            gram[k, m] = gram[m, k] = total


@compiled
def _write_inverse_cholesky(gram: Coefficients, inverse: Coefficients) -> None:
    """Write the lower triangular W with W G Wᵀ = I, except for zero rows of W where G is dependent.

    The Gram matrix is overwritten, first by cosines and then during elimination.
    """
    count = len(gram)
    inverse[:] = 0
    # Normalise rows first: whether a row depends on others is a question of angles, not of lengths.
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
