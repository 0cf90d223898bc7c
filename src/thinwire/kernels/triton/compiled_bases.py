"""The kernels that make the rows of factors orthonormal: by Gram–Schmidt in coefficients, twice, in fp64.

Each serves many factors; a program has a chunk of a factor's columns. Between kernels, Gram matrices are in
memory: programs of one launch can't wait for each other, but the next launch starts after all of them.

Parameters, if a kernel has them:
    table: For each factor a row of int64, as `gram` describes it.
    tiles: For each program, int32: its factor, and its chunk.
    R: Rows of a factor, the next power of two; those beyond the matrix rank are zeros.
    CHUNK: Columns of a factor per program; COLUMNS: the columns that it holds at a time.
    DEPENDENT: A row is dependent on earlier ones if its squared sine to their span is below this.
"""

# Types of parameters are Triton's own, evaluated when a kernel is compiled.
import triton
import triton.language as tl

from thinwire.kernels.triton.compiled_matrices import pointer, some_columns


@triton.jit
def _gram(y, R: tl.constexpr):
    """Return the products of all rows with each other, (R, R)."""
    # Row by row, not with `tl.dot`: only some GPUs have fp64 tensor cores, with other last bits.
    r = tl.arange(0, R)
    found = tl.zeros((R, R), tl.float64)
    for a in range(R):
        line = tl.sum(tl.where((r == a)[:, None], y, 0.0), axis=0)
        found += tl.where((r == a)[:, None], tl.sum(y * line[None, :], axis=1)[None, :], 0.0)
    return found


@triton.jit
def _applied(weights, y, R: tl.constexpr):
    """Return weights @ y, for weights (R, R) and y (R, columns)."""
    r = tl.arange(0, R)
    found = tl.zeros(y.shape, tl.float64)
    for b in range(R):
        weight = tl.sum(tl.where((r == b)[None, :], weights, 0.0), axis=1)
        line = tl.sum(tl.where((r == b)[:, None], y, 0.0), axis=0)
        found += weight[:, None] * line[None, :]
    return found


@triton.jit
def _inverse_root(grams, DEPENDENT: tl.constexpr, ARE_SCALED: tl.constexpr, R: tl.constexpr):
    """Return the lower triangular W with W G Wᵀ = I, except for zero rows where G is dependent."""
    r = tl.arange(0, R)
    eye = tl.where(r[:, None] == r[None, :], 1.0, 0.0).to(tl.float64)
    lengths = tl.sum(grams * eye, axis=1)
    if ARE_SCALED:
        scale = tl.full((R,), 1.0, tl.float64)
    else:
        scale = tl.where(lengths > 0, 1.0 / tl.sqrt(tl.where(lengths > 0, lengths, 1.0)), 0.0)
    # For rows of length one: whether a row depends on others is a question of angles.
    cosines = grams * scale[:, None] * scale[None, :]
    inverse = eye
    for row in range(R):
        here = r == row
        pivots = tl.sum(tl.where(here[:, None], cosines, 0.0), axis=0)
        line = tl.sum(tl.where(here[:, None], inverse, 0.0), axis=0)
        pivot = tl.sum(tl.where(here, pivots, 0.0), axis=0)
        column = tl.sum(tl.where(here[None, :], cosines, 0.0), axis=1)
        # Divide by one if it is dependent: a division by zero would give NaN, which times zero stays NaN.
        safe = tl.where(pivot > DEPENDENT, pivot, 1.0)
        # A dependent row subtracts nothing from the rows below it.
        below = tl.where(r > row, column / safe, 0.0) * tl.where(pivot > DEPENDENT, 1.0, 0.0)
        cosines -= below[:, None] * pivots[None, :]
        inverse -= below[:, None] * line[None, :]
    left = tl.sum(cosines * eye, axis=1)
    roots = tl.where(left > DEPENDENT, 1.0 / tl.sqrt(tl.where(left > DEPENDENT, left, 1.0)), 0.0)
    return inverse * roots[:, None] * scale[None, :]


@triton.jit
def _added_up(parts, chunks, R: tl.constexpr):
    """Return the sum of Gram matrices of chunks, in their order."""
    r = tl.arange(0, R)
    total = tl.zeros((R, R), tl.float64)
    for chunk in range(chunks):
        total += tl.load(parts + chunk * R * R + r[:, None] * R + r[None, :])
    return total


@triton.jit
def _diagonal(parts, chunks, R: tl.constexpr):
    # In the order of `_added_up`, or a row could be zero in one kernel and not in the next.
    r = tl.arange(0, R)
    total = tl.zeros((R,), tl.float64)
    for chunk in range(chunks):
        total += tl.load(parts + chunk * R * R + r * (R + 1))
    return total


@triton.jit
def _live(x, drawn, dead, rank, length, k, R: tl.constexpr):
    """Return some columns of a factor in fp64, with drawn rows in place of zero rows."""
    r = tl.arange(0, R)
    there = (r < tl.where(dead, 0, rank))[:, None] & (k < length)[None, :]
    y = tl.load(x + r[:, None] * length + k[None, :], there, other=0.0)
    instead = (r < tl.where(dead, rank, 0))[:, None] & (k < length)[None, :]
    # One of the two is loaded as zeros, so the sum is not rounded.
    return (y + tl.load(drawn + r[:, None] * length + k[None, :], instead, other=0.0)).to(tl.float64)


@triton.jit
def _own_chunk(table, tiles):
    """Return this program's row of the table, its chunk of columns, and the entries of the row.

    These are the factor, its Gram matrices, its length, its matrix rank and its number of chunks.
    """
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 7
    chunk = tl.load(tiles + 2 * pid + 1).to(tl.int64)
    x = pointer(tl.load(row), "f", False)
    parts = tl.load(row + 3).to(tl.pointer_type(tl.float64))
    return row, chunk, x, parts, tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)


@triton.jit
def gram(table, tiles, R: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Store the Gram matrices of chunks of rows.

    Rows of the table: factor, drawn rows (0 for none), result, its Gram matrices (of chunks; of chunks once
    they are nearly orthonormal; the first transform), length, matrix rank, chunks.
    """
    _row, chunk, x, parts, length, rank, _chunks = _own_chunk(table, tiles)
    r = tl.arange(0, R)
    # In float64: the products of nearly dependent rows cancel.
    total = tl.zeros((R, R), tl.float64)
    for k in range(0, tl.minimum(length - chunk * CHUNK, CHUNK), COLUMNS):
        y = some_columns(x, rank, length, chunk * CHUNK + k + tl.arange(0, COLUMNS), R).to(tl.float64)
        total += _gram(y, R)
    tl.store(parts + chunk * R * R + r[:, None] * R + r[None, :], total)


@triton.jit
def gram_again(
    table, tiles,
    R: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Store Gram matrices of nearly orthonormal chunks of rows, and the transform that makes them so."""
    row, chunk, x, parts, length, rank, chunks = _own_chunk(table, tiles)
    drawn_at = tl.load(row + 1)
    drawn = pointer(drawn_at, "f", False)
    r = tl.arange(0, R)
    # Every program sums all chunks: waiting for one program's sum would take a second launch.
    grams = _added_up(parts, chunks, R)
    eye = tl.where(r[:, None] == r[None, :], 1.0, 0.0).to(tl.float64)
    dead = (tl.sum(grams * eye, axis=1) == 0) & (r < tl.where(drawn_at == 0, 0, rank))
    if tl.max(dead.to(tl.int32), axis=0) > 0:
        # This is rare, and otherwise short, so every program reads the whole factor.
        grams = tl.zeros((R, R), tl.float64)
        for k in range(0, length, COLUMNS):
            grams += _gram(_live(x, drawn, dead, rank, length, k + tl.arange(0, COLUMNS), R), R)
    weights = _inverse_root(grams, DEPENDENT, False, R)
    total = tl.zeros((R, R), tl.float64)
    for k in range(0, tl.minimum(length - chunk * CHUNK, CHUNK), COLUMNS):
        at = chunk * CHUNK + k + tl.arange(0, COLUMNS)
        total += _gram(_applied(weights, _live(x, drawn, dead, rank, length, at, R), R), R)
    place = r[:, None] * R + r[None, :]
    # After everything that this kernel reads: other programs of this launch may not have read it yet.
    tl.store(parts + (chunks + chunk) * R * R + place, total)
    # All programs of a matrix store the same bits.
    tl.store(parts + 2 * chunks * R * R + place, weights)


@triton.jit
def orthonormal(
    table, tiles,
    R: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Make rows orthonormal by both transforms."""
    row, chunk, x, parts, length, rank, chunks = _own_chunk(table, tiles)
    drawn_at = tl.load(row + 1)
    drawn = pointer(drawn_at, "f", False)
    out = pointer(tl.load(row + 2), "f", False)
    r = tl.arange(0, R)
    dead = (_diagonal(parts, chunks, R) == 0) & (r < tl.where(drawn_at == 0, 0, rank))
    # The rows nearly have length one: dividing by their lengths again would only round once more.
    second = _inverse_root(_added_up(parts + chunks * R * R, chunks, R), DEPENDENT, True, R)
    first = tl.load(parts + 2 * chunks * R * R + r[:, None] * R + r[None, :])
    # Apply both together, so that the rows are read a third time, but not a fourth.
    weights = _applied(second, first, R)
    for k in range(0, tl.minimum(length - chunk * CHUNK, CHUNK), COLUMNS):
        at = chunk * CHUNK + k + tl.arange(0, COLUMNS)
        y = _applied(weights, _live(x, drawn, dead, rank, length, at, R), R)
        inside = (r < rank)[:, None] & (at < length)[None, :]
        tl.store(out + r[:, None] * length + at[None, :], y.to(tl.float32), inside)
