"""The kernels of low-rank steps. Each serves many matrices: a program looks up which tile of which it has.

M, which no memory holds, is a gradient plus its residual times the loss scale: every kernel adds them as it
reads them. So no kernel but `reconstruct` writes to either, and 16-bit gradients need no copy in fp32.

Parameters, where a kernel has them:
    table: For each matrix a row of int64, addresses and sizes, as `triton_kernels` writes them.
    tiles: For each program, int32: its matrix, and which tile of that.
    is_healthy: One bool; None for true.
    G: Type of the gradients, a letter: f is fp32, h is fp16, b is bf16.
    R: Rows of a factor, the next power of two; those beyond the matrix rank are zeros.
    ROWS, COLUMNS: Of a tile.
    SPLIT: Rows of a matrix that one program adds up.
    ALIGNED: Whether all rows begin at a multiple of 16 bytes.
    DOT: How `tl.dot` multiplies fp32, "tf32x3" or "ieee"; "" where the rows of factors are too few for it.
    TERMS: Iterations of the step, whose approximations add up.
    LIMIT: The largest number of type G; 0 where that is fp32.
    DEPENDENT: A row is dependent on those before it if its squared sine to their span is below this.
"""

# Types of parameters are Triton's own, evaluated when a kernel is compiled.
import triton
import triton.language as tl

__all__ = [
    "add_splits",
    "finite",
    "gram",
    "gram_again",
    "orthonormal",
    "products",
    "projections",
    "reconstruct",
    "write",
]


@triton.jit
def _pointer(address, G: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address as a pointer to numbers of a type."""
    TYPE: tl.constexpr = tl.float32 if G == "f" else (tl.float16 if G == "h" else tl.bfloat16)
    if ALIGNED:
        found = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
    else:
        found = address.to(tl.pointer_type(TYPE))
    return found


@triton.jit
def _scale_at(address):
    """Return the loss scale; 1 where there is none."""
    # As a block of one, since only blocks are loaded under a mask; address 0 must not be read.
    at = address.to(tl.pointer_type(tl.float32)) + tl.arange(0, 1)
    none = address + tl.zeros((1,), tl.int64) == 0
    return tl.sum(tl.load(at, ~none, other=1.0), axis=0)


@triton.jit
def _matrix(table, m, WIDTH: tl.constexpr, G: tl.constexpr, ALIGNED: tl.constexpr):
    """Return gradient, residual, rows that have one, loss scale, rows, columns and matrix rank."""
    row = table + m * WIDTH
    # An address from memory says nothing of alignment or type; the compiler must be given what is known.
    g = _pointer(tl.load(row), G, ALIGNED)
    address = tl.load(row + 1)
    e = _pointer(address, "f", ALIGNED)
    scale = _scale_at(tl.load(row + 2))
    rows = tl.load(row + 3)
    columns = tl.load(row + 4)
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
    return g, e, tl.where(address == 0, 0, rows), scale, rows, columns, tl.load(row + 5)


@triton.jit
def _tile(g, e, known, scale, rows, columns, i, j):
    """Return a tile of M."""
    at = i[:, None] * columns + j[None, :]
    x = tl.load(g + at, (i < rows)[:, None] & (j < columns)[None, :], other=0.0).to(tl.float32)
    return x + tl.load(e + at, (i < known)[:, None] & (j < columns)[None, :], other=0.0) * scale


@triton.jit
def _factor(factor, rank, length, k, R: tl.constexpr):
    """Return some columns of a factor, (R, columns)."""
    r = tl.arange(0, R)
    return tl.load(
        factor + r[:, None] * length + k[None, :], (r < rank)[:, None] & (k < length)[None, :], other=0.0
    )


@triton.jit
def products(
    table, tiles,
    G: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Multiply: (M Q)ᵀ. Rows of the table: what `_matrix` reads, Qᵀ, the result. A tile has all columns."""
    pid = tl.program_id(0)
    # 64 bits from here on: a matrix may have more elements than 32 can count.
    m = tl.load(tiles + 2 * pid).to(tl.int64)
    g, e, known, scale, rows, columns, rank = _matrix(table, m, 8, G, ALIGNED)
    q = _pointer(tl.load(table + m * 8 + 6), "f", False)
    p = _pointer(tl.load(table + m * 8 + 7), "f", False)
    i = tl.load(tiles + 2 * pid + 1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, R)
    inside = (r < rank)[:, None] & (i < rows)[None, :]
    if DOT == "":
        # Added up element by element, and over the columns of a tile only at the end.
        sums = tl.zeros((R, ROWS, COLUMNS), tl.float32)
        for k in range(0, columns, COLUMNS):
            j = k + tl.arange(0, COLUMNS)
            x = _factor(q, rank, columns, j, R)
            sums += x[:, None, :] * _tile(g, e, known, scale, rows, columns, i, j)[None, :, :]
        tl.store(p + r[:, None] * rows + i[None, :], tl.sum(sums, axis=2), inside)
    else:
        total = tl.zeros((ROWS, R), tl.float32)
        for k in range(0, columns, COLUMNS):
            j = k + tl.arange(0, COLUMNS)
            x = _factor(q, rank, columns, j, R)
            w = _tile(g, e, known, scale, rows, columns, i, j)
            total = tl.dot(w, tl.trans(x), total, input_precision=DOT)
        tl.store(p + r[:, None] * rows + i[None, :], tl.trans(total), inside)


@triton.jit
def projections(
    table, tiles,
    G: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Project: P̂ᵀ M, of SPLIT rows each. Rows of the table: what `_matrix` reads, P̂ᵀ, the result's parts."""
    pid = tl.program_id(0)
    m = tl.load(tiles + 2 * pid).to(tl.int64)
    g, e, known, scale, rows, columns, rank = _matrix(table, m, 8, G, ALIGNED)
    left = _pointer(tl.load(table + m * 8 + 6), "f", False)
    part = _pointer(tl.load(table + m * 8 + 7), "f", False)
    tile = tl.load(tiles + 2 * pid + 1).to(tl.int64)
    # Tiles side by side first: they share the rows of the left factor, which then stay in cache.
    across = (columns + COLUMNS - 1) // COLUMNS
    split = tile // across
    j = (tile - split * across) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, R)
    at = part + (split * rank + r[:, None]) * columns + j[None, :]
    inside = (r < rank)[:, None] & (j < columns)[None, :]
    if DOT == "":
        sums = tl.zeros((R, ROWS, COLUMNS), tl.float32)
        for k in range(0, tl.minimum(rows - split * SPLIT, SPLIT), ROWS):
            i = split * SPLIT + k + tl.arange(0, ROWS)
            x = _factor(left, rank, rows, i, R)
            sums += x[:, :, None] * _tile(g, e, known, scale, rows, columns, i, j)[None, :, :]
        tl.store(at, tl.sum(sums, axis=1), inside)
    else:
        total = tl.zeros((R, COLUMNS), tl.float32)
        for k in range(0, tl.minimum(rows - split * SPLIT, SPLIT), ROWS):
            i = split * SPLIT + k + tl.arange(0, ROWS)
            x = _factor(left, rank, rows, i, R)
            w = _tile(g, e, known, scale, rows, columns, i, j)
            total = tl.dot(x, w, total, input_precision=DOT)
        tl.store(at, total, inside)


@triton.jit
def add_splits(table, tiles, COLUMNS: tl.constexpr):
    """Add up parts, in their order. Rows of the table: parts, how many, elements of each, the result."""
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 4
    part = _pointer(tl.load(row), "f", False)
    elements = tl.load(row + 2)
    at = tl.load(tiles + 2 * pid + 1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for split in range(tl.load(row + 1)):
        total += tl.load(part + split * elements + at, at < elements, other=0.0)
    tl.store(_pointer(tl.load(row + 3), "f", False) + at, total, at < elements)


@triton.jit
def reconstruct(
    table, tiles, is_healthy,
    G: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
    LIMIT: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Turn gradients into the mean, and write what was not sent.

    Rows of the table: what `_matrix` reads, the new residual (0 to forget it), the left and right factor that
    this process has sent last, and those of the mean of each term.
    """
    WIDTH: tl.constexpr = 9 + 2 * TERMS
    pid = tl.program_id(0)
    m = tl.load(tiles + 2 * pid).to(tl.int64)
    row = table + m * WIDTH
    g, e, known, scale, rows, columns, rank = _matrix(table, m, WIDTH, G, ALIGNED)
    address = tl.load(row + 6)
    new = _pointer(address, "f", ALIGNED)
    tile = tl.load(tiles + 2 * pid + 1).to(tl.int64)
    across = (columns + COLUMNS - 1) // COLUMNS
    down = tile // across
    i = down * ROWS + tl.arange(0, ROWS)
    j = (tile - down * across) * COLUMNS + tl.arange(0, COLUMNS)
    # Read before either is written: the new residual mostly lies where the old one does.
    w = _tile(g, e, known, scale, rows, columns, i, j)
    left = _pointer(tl.load(row + 7), "f", False)
    own = _pointer(tl.load(row + 8), "f", False)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if DOT == "":
        for r in tl.static_range(R):
            to_i = tl.where(r < rank, rows, 0)
            a = tl.load(left + r * rows + i, i < to_i, other=0.0)
            b = tl.load(own + r * columns + j, j < tl.where(r < rank, columns, 0), other=0.0)
            w -= a[:, None] * b[None, :]
        for term in tl.static_range(TERMS):
            lefts = _pointer(tl.load(row + 9 + 2 * term), "f", False)
            rights = _pointer(tl.load(row + 10 + 2 * term), "f", False)
            for r in tl.static_range(R):
                a = tl.load(lefts + r * rows + i, i < tl.where(r < rank, rows, 0), other=0.0)
                b = tl.load(rights + r * columns + j, j < tl.where(r < rank, columns, 0), other=0.0)
                total += a[:, None] * b[None, :]
    else:
        a = _factor(left, rank, rows, i, R)
        w -= tl.dot(tl.trans(a), _factor(own, rank, columns, j, R), input_precision=DOT)
        for term in tl.static_range(TERMS):
            a = _factor(_pointer(tl.load(row + 9 + 2 * term), "f", False), rank, rows, i, R)
            b = _factor(_pointer(tl.load(row + 10 + 2 * term), "f", False), rank, columns, j, R)
            total = tl.dot(tl.trans(a), b, total, input_precision=DOT)
    at = i[:, None] * columns + j[None, :]
    kept = tl.where(address == 0, 0, rows)
    if is_healthy is not None:
        good = tl.load(is_healthy) != 0
        kept = tl.where(good, kept, 0)
        total = tl.where(good, total, float("nan"))
    if LIMIT > 0:
        # What the type can't hold of a mean stays here. A NaN stays one: minimum and maximum would drop it.
        fitting = tl.where(total == total, tl.minimum(tl.maximum(total, -LIMIT), LIMIT), total)
        rounded = fitting.to(g.dtype.element_ty)
        w += total - rounded.to(tl.float32)
    else:
        rounded = total
    # In units of the unscaled loss, by a division that is rounded alike on every GPU.
    one = tl.full(w.shape, 1.0, tl.float32)
    tl.store(new + at, w * tl.div_rn(one, one * scale), (i < kept)[:, None] & (j < columns)[None, :])
    tl.store(g + at, rounded, (i < rows)[:, None] & (j < columns)[None, :])


@triton.jit
def write(table, tiles, is_healthy, G: tl.constexpr, SOURCE: tl.constexpr, COLUMNS: tl.constexpr):
    """Write what a step leaves.

    Rows of the table: target; what it becomes in a healthy step, of type SOURCE (0: it stays); what in any
    other, of the target's type (0: NaN); elements.
    """
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 4
    new, old, elements = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    at = tl.load(tiles + 2 * pid + 1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    # Nothing is read of what is not to be written, nor written of what stays.
    from_new = tl.where(new == 0, 0, elements)
    from_old = 0 * elements
    if is_healthy is not None:
        good = tl.load(is_healthy) != 0
        from_old = tl.where(good, 0, elements)
        from_new = tl.where(good, from_new, 0)
    x = tl.load(_pointer(new, SOURCE, False) + at, at < from_new, other=0.0).to(tl.float32)
    there = at < tl.where(old == 0, 0, from_old)
    y = tl.load(_pointer(old, G, False) + at, there, other=float("nan")).to(tl.float32)
    target = _pointer(tl.load(row), G, False)
    found = tl.where(at < from_old, y, x).to(target.dtype.element_ty)
    tl.store(target + at, found, at < tl.maximum(from_new, from_old))


@triton.jit
def _gram(y, R: tl.constexpr):
    """Return the products of all rows with each other, (R, R)."""
    # Row by row, and not by `tl.dot`: tensor cores have fp64 on some GPUs only, with other last bits.
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
    # Of rows of length one: whether a row depends on others is a question of angles.
    cosines = grams * scale[:, None] * scale[None, :]
    inverse = eye
    for row in range(R):
        here = r == row
        pivots = tl.sum(tl.where(here[:, None], cosines, 0.0), axis=0)
        line = tl.sum(tl.where(here[:, None], inverse, 0.0), axis=0)
        pivot = tl.sum(tl.where(here, pivots, 0.0), axis=0)
        column = tl.sum(tl.where(here[None, :], cosines, 0.0), axis=1)
        safe = tl.where(pivot > DEPENDENT, pivot, 1.0)
        # A dependent row takes nothing from those below it.
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
    # In the order of `_added_up`, or a row could be dead in one kernel and not in the next.
    r = tl.arange(0, R)
    total = tl.zeros((R,), tl.float64)
    for chunk in range(chunks):
        total += tl.load(parts + chunk * R * R + r * (R + 1))
    return total


@triton.jit
def _live(x, drawn, dead, rank, length, k, R: tl.constexpr):
    """Return some columns of a factor in fp64, with drawn rows in place of dead ones."""
    r = tl.arange(0, R)
    there = (r < tl.where(dead, 0, rank))[:, None] & (k < length)[None, :]
    y = tl.load(x + r[:, None] * length + k[None, :], there, other=0.0)
    instead = (r < tl.where(dead, rank, 0))[:, None] & (k < length)[None, :]
    return (y + tl.load(drawn + r[:, None] * length + k[None, :], instead, other=0.0)).to(tl.float64)


@triton.jit
def gram(table, tiles, R: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Store the Gram matrices of chunks of rows.

    Rows of the table: factor, drawn rows (0 for none), result, its Gram matrices (of chunks; of chunks once
    they are nearly orthonormal; the first transform), length, matrix rank, chunks.
    """
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 7
    chunk = tl.load(tiles + 2 * pid + 1).to(tl.int64)
    x = _pointer(tl.load(row), "f", False)
    parts = tl.load(row + 3).to(tl.pointer_type(tl.float64))
    length = tl.load(row + 4)
    rank = tl.load(row + 5)
    r = tl.arange(0, R)
    # In float64: the products of nearly dependent rows cancel.
    total = tl.zeros((R, R), tl.float64)
    for k in range(0, tl.minimum(length - chunk * CHUNK, CHUNK), COLUMNS):
        y = _factor(x, rank, length, chunk * CHUNK + k + tl.arange(0, COLUMNS), R).to(tl.float64)
        total += _gram(y, R)
    tl.store(parts + chunk * R * R + r[:, None] * R + r[None, :], total)


@triton.jit
def gram_again(
    table, tiles,
    R: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Store those of chunks of rows made nearly orthonormal, and the transform that makes them so."""
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 7
    chunk = tl.load(tiles + 2 * pid + 1).to(tl.int64)
    x = _pointer(tl.load(row), "f", False)
    drawn_at = tl.load(row + 1)
    drawn = _pointer(drawn_at, "f", False)
    parts = tl.load(row + 3).to(tl.pointer_type(tl.float64))
    length = tl.load(row + 4)
    rank = tl.load(row + 5)
    chunks = tl.load(row + 6)
    r = tl.arange(0, R)
    # Every program adds up all chunks: to wait for one that has done it, it would need another launch.
    grams = _added_up(parts, chunks, R)
    eye = tl.where(r[:, None] == r[None, :], 1.0, 0.0).to(tl.float64)
    dead = (tl.sum(grams * eye, axis=1) == 0) & (r < tl.where(drawn_at == 0, 0, rank))
    if tl.max(dead.to(tl.int32), axis=0) > 0:
        # Rare, and short where it is not: every program looks at the whole factor.
        grams = tl.zeros((R, R), tl.float64)
        for k in range(0, length, COLUMNS):
            grams += _gram(_live(x, drawn, dead, rank, length, k + tl.arange(0, COLUMNS), R), R)
    weights = _inverse_root(grams, DEPENDENT, False, R)
    total = tl.zeros((R, R), tl.float64)
    for k in range(0, tl.minimum(length - chunk * CHUNK, CHUNK), COLUMNS):
        at = chunk * CHUNK + k + tl.arange(0, COLUMNS)
        total += _gram(_applied(weights, _live(x, drawn, dead, rank, length, at, R), R), R)
    place = r[:, None] * R + r[None, :]
    tl.store(parts + (chunks + chunk) * R * R + place, total)
    # All programs of a matrix store the same bits.
    tl.store(parts + 2 * chunks * R * R + place, weights)


@triton.jit
def orthonormal(
    table, tiles,
    R: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Make rows orthonormal by both transforms."""
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 7
    chunk = tl.load(tiles + 2 * pid + 1).to(tl.int64)
    x = _pointer(tl.load(row), "f", False)
    drawn_at = tl.load(row + 1)
    drawn = _pointer(drawn_at, "f", False)
    out = _pointer(tl.load(row + 2), "f", False)
    parts = tl.load(row + 3).to(tl.pointer_type(tl.float64))
    length = tl.load(row + 4)
    rank = tl.load(row + 5)
    chunks = tl.load(row + 6)
    r = tl.arange(0, R)
    dead = (_diagonal(parts, chunks, R) == 0) & (r < tl.where(drawn_at == 0, 0, rank))
    second = _inverse_root(_added_up(parts + chunks * R * R, chunks, R), DEPENDENT, True, R)
    first = tl.load(parts + 2 * chunks * R * R + r[:, None] * R + r[None, :])
    # Both at once, so that the rows are read a third time and not a fourth.
    weights = _applied(second, first, R)
    for k in range(0, tl.minimum(length - chunk * CHUNK, CHUNK), COLUMNS):
        at = chunk * CHUNK + k + tl.arange(0, COLUMNS)
        y = _applied(weights, _live(x, drawn, dead, rank, length, at, R), R)
        inside = (r < rank)[:, None] & (at < length)[None, :]
        tl.store(out + r[:, None] * length + at[None, :], y.to(tl.float32), inside)


@triton.jit
def finite(table, tiles, flags, G: tl.constexpr, COLUMNS: tl.constexpr):
    """Store whether tiles are finite. Rows of the table: a tensor, its elements."""
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 2
    x = _pointer(tl.load(row), G, False)
    at = tl.load(tiles + 2 * pid + 1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    # Below infinity, of which NaN is neither side.
    values = tl.abs(tl.load(x + at, at < tl.load(row + 1), other=0.0).to(tl.float32))
    tl.store(flags + pid, tl.min((values < float("inf")).to(tl.int32), axis=0).to(tl.int8))
