"""The kernels of low-rank steps. Each serves many matrices: a program looks up its matrix and its tile.

M is a gradient plus its residual times the loss scale. In fp32, the first kernel that reads both writes the
sum to the gradient, and later kernels read only that. 16-bit gradients can't hold the sum: every kernel adds
both as it reads them, and there is no copy in fp32. Only `reconstruct` writes to residuals.

Parameters, if a kernel has them:
    table: For each matrix a row of int64, addresses and sizes, as `triton_kernels` writes them.
    tiles: For each program, int32: its matrix, and its tile.
    is_healthy: One bool; None for true.
    G: Dtype of the gradients, a letter: f is fp32, h is fp16, b is bf16.
    R: Rows of a factor, the next power of two; those beyond the matrix rank are zeros.
    ROWS, COLUMNS: The size of a tile.
    SPLIT: Rows of a matrix that one program sums; a multiple of ROWS, so that no two programs share a row.
    KEEPS: Whether M is written to the gradient, which must be fp32.
    ALIGNED: Whether all rows start at a multiple of 16 bytes.
    DOT: How `tl.dot` multiplies fp32, "tf32x3" or "ieee"; "" if the rows of factors are too few for it.
    STAGES: Tiles of a loop that are loaded ahead.
    TERMS: Iterations of the step, whose approximations add up.
    LIMIT: The largest number of dtype G; 0 if that is fp32.
"""

# Types of parameters are Triton's own, evaluated when a kernel is compiled.
import triton
import triton.language as tl


@triton.jit
def pointer(address, G: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address as a pointer to numbers of dtype G."""
    TYPE: tl.constexpr = tl.float32 if G == "f" else (tl.float16 if G == "h" else tl.bfloat16)
    if ALIGNED:
        found = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
    else:
        found = address.to(tl.pointer_type(TYPE))
    return found


@triton.jit
def _scale_at(address):
    """Return the loss scale; 1 if there is none."""
    # Load it as a block of one: only blocks have masks, and address 0 must not be read.
    at = address.to(tl.pointer_type(tl.float32)) + tl.arange(0, 1)
    none = address + tl.zeros((1,), tl.int64) == 0
    return tl.sum(tl.load(at, ~none, other=1.0), axis=0)


@triton.jit
def _matrix(table, m, WIDTH: tl.constexpr, G: tl.constexpr, ALIGNED: tl.constexpr):
    """Return gradient, residual, rows with a residual, loss scale, rows, columns and matrix rank."""
    row = table + m * WIDTH
    # An address from memory has no alignment or dtype; tell the compiler what is known.
    g = pointer(tl.load(row), G, ALIGNED)
    address = tl.load(row + 1)
    e = pointer(address, "f", ALIGNED)
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
    # Widen before adding: a residual is often below the last bit of a 16-bit gradient. A matrix without a
    # residual has address 0 and no row under the mask, so nothing is read there.
    x = tl.load(g + at, (i < rows)[:, None] & (j < columns)[None, :], other=0.0).to(tl.float32)
    return x + tl.load(e + at, (i < known)[:, None] & (j < columns)[None, :], other=0.0) * scale


@triton.jit
def _tile_kept(g, e, known, scale, rows, columns, i, j, KEEPS: tl.constexpr):
    """Return a tile of M, which no other program reads; write it to the gradient if KEEPS."""
    w = _tile(g, e, known, scale, rows, columns, i, j)
    if KEEPS:
        tl.store(g + i[:, None] * columns + j[None, :], w, (i < rows)[:, None] & (j < columns)[None, :])
    return w


@triton.jit
def some_columns(factor, rank, length, k, R: tl.constexpr):
    """Return some columns of a factor, (R, columns)."""
    # Zeros beyond the matrix rank add nothing to sums, so a kernel serves all ranks up to a power of two.
    r = tl.arange(0, R)
    return tl.load(
        factor + r[:, None] * length + k[None, :], (r < rank)[:, None] & (k < length)[None, :], other=0.0
    )


@triton.jit
def products(
    table, tiles,
    G: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEEPS: tl.constexpr,
    ALIGNED: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply: (M Q)ᵀ. Rows of the table: input of `_matrix`, Qᵀ, the result. A tile has all columns."""
    pid = tl.program_id(0)
    # 64 bits from here on: a matrix may have more elements than 32 can count.
    m = tl.load(tiles + 2 * pid).to(tl.int64)
    g, e, known, scale, rows, columns, rank = _matrix(table, m, 8, G, ALIGNED)
    # A factor may start at any number of a message: only gradients and residuals are known to be aligned.
    q = pointer(tl.load(table + m * 8 + 6), "f", False)
    p = pointer(tl.load(table + m * 8 + 7), "f", False)
    i = tl.load(tiles + 2 * pid + 1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, R)
    inside = (r < rank)[:, None] & (i < rows)[None, :]
    # Each program has its own sums, so the order does not depend on the number of multiprocessors. Without
    # `tl.dot`, sum element by element, and over the columns of a tile only at the end.
    sums = tl.zeros((R, ROWS, COLUMNS) if DOT == "" else (ROWS, R), tl.float32)
    for k in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        j = k + tl.arange(0, COLUMNS)
        x = some_columns(q, rank, columns, j, R)
        w = _tile_kept(g, e, known, scale, rows, columns, i, j, KEEPS)
        if DOT == "":
            sums += x[:, None, :] * w[None, :, :]
        else:
            sums = tl.dot(w, tl.trans(x), sums, input_precision=DOT)
    found = tl.sum(sums, axis=2) if DOT == "" else tl.trans(sums)
    tl.store(p + r[:, None] * rows + i[None, :], found, inside)


@triton.jit
def projections(
    table, tiles,
    G: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    KEEPS: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Project: P̂ᵀ M, of SPLIT rows each. Rows of the table: input of `_matrix`, P̂ᵀ, the result's parts."""
    pid = tl.program_id(0)
    m = tl.load(tiles + 2 * pid).to(tl.int64)
    g, e, known, scale, rows, columns, rank = _matrix(table, m, 8, G, ALIGNED)
    left = pointer(tl.load(table + m * 8 + 6), "f", False)
    part = pointer(tl.load(table + m * 8 + 7), "f", False)
    tile = tl.load(tiles + 2 * pid + 1).to(tl.int64)
    # Horizontally adjacent tiles first: they share the left factor's rows, which then stay in cache.
    across = (columns + COLUMNS - 1) // COLUMNS
    split = tile // across
    j = (tile - split * across) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, R)
    at = part + (split * rank + r[:, None]) * columns + j[None, :]
    inside = (r < rank)[:, None] & (j < columns)[None, :]
    sums = tl.zeros((R, ROWS, COLUMNS) if DOT == "" else (R, COLUMNS), tl.float32)
    for k in tl.range(0, tl.minimum(rows - split * SPLIT, SPLIT), ROWS, num_stages=STAGES):
        i = split * SPLIT + k + tl.arange(0, ROWS)
        x = some_columns(left, rank, rows, i, R)
        w = _tile_kept(g, e, known, scale, rows, columns, i, j, KEEPS)
        if DOT == "":
            sums += x[:, :, None] * w[None, :, :]
        else:
            sums = tl.dot(x, w, sums, input_precision=DOT)
    if DOT == "":
        sums = tl.sum(sums, axis=1)
    tl.store(at, sums, inside)


@triton.jit
def add_splits(table, tiles, COLUMNS: tl.constexpr):
    """Sum parts, in order. Rows of the table: parts, their number, elements of each, the result."""
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 4
    part = pointer(tl.load(row), "f", False)
    elements = tl.load(row + 2)
    at = tl.load(tiles + 2 * pid + 1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    # One after the other: a tree, or additions in order of arrival, would give other last bits.
    for split in range(tl.load(row + 1)):
        total += tl.load(part + split * elements + at, at < elements, other=0.0)
    tl.store(pointer(tl.load(row + 3), "f", False) + at, total, at < elements)


@triton.jit
def reconstruct(
    table, tiles, is_healthy,
    G: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
    LIMIT: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Replace gradients by the mean, and write what was not sent.

    Rows of the table: input of `_matrix`, the new residual (0 to discard it), the left and right factor that
    this process has sent last, and those of the mean of each term.
    """
    WIDTH: tl.constexpr = 9 + 2 * TERMS
    pid = tl.program_id(0)
    m = tl.load(tiles + 2 * pid).to(tl.int64)
    row = table + m * WIDTH
    g, e, known, scale, rows, columns, rank = _matrix(table, m, WIDTH, G, ALIGNED)
    address = tl.load(row + 6)
    new = pointer(address, "f", ALIGNED)
    tile = tl.load(tiles + 2 * pid + 1).to(tl.int64)
    across = (columns + COLUMNS - 1) // COLUMNS
    down = tile // across
    i = down * ROWS + tl.arange(0, ROWS)
    j = (tile - down * across) * COLUMNS + tl.arange(0, COLUMNS)
    # Read before writing either: the new residual mostly overwrites the old one.
    w = _tile(g, e, known, scale, rows, columns, i, j)
    left = pointer(tl.load(row + 7), "f", False)
    own = pointer(tl.load(row + 8), "f", False)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if DOT == "":
        for r in tl.static_range(R):
            # Mask by the bound: Triton's interpreter does not support masks made of a block and a scalar.
            to_i = tl.where(r < rank, rows, 0)
            a = tl.load(left + r * rows + i, i < to_i, other=0.0)
            b = tl.load(own + r * columns + j, j < tl.where(r < rank, columns, 0), other=0.0)
            w -= a[:, None] * b[None, :]
        for term in tl.static_range(TERMS):
            lefts = pointer(tl.load(row + 9 + 2 * term), "f", False)
            rights = pointer(tl.load(row + 10 + 2 * term), "f", False)
            for r in tl.static_range(R):
                a = tl.load(lefts + r * rows + i, i < tl.where(r < rank, rows, 0), other=0.0)
                b = tl.load(rights + r * columns + j, j < tl.where(r < rank, columns, 0), other=0.0)
                total += a[:, None] * b[None, :]
    else:
        a = some_columns(left, rank, rows, i, R)
        w -= tl.dot(tl.trans(a), some_columns(own, rank, columns, j, R), input_precision=DOT)
        for term in tl.static_range(TERMS):
            a = some_columns(pointer(tl.load(row + 9 + 2 * term), "f", False), rank, rows, i, R)
            b = some_columns(pointer(tl.load(row + 10 + 2 * term), "f", False), rank, columns, j, R)
            total = tl.dot(tl.trans(a), b, total, input_precision=DOT)
    at = i[:, None] * columns + j[None, :]
    kept = tl.where(address == 0, 0, rows)
    if is_healthy is not None:
        good = tl.load(is_healthy) != 0
        kept = tl.where(good, kept, 0)
        # All elements, even finite ones, so that a GradScaler skips the step on every member.
        total = tl.where(good, total, float("nan"))
    if LIMIT > 0:
        # The residual keeps what the dtype can't hold of a mean. Keep NaN, which minimum and maximum drop.
        fitting = tl.where(total == total, tl.minimum(tl.maximum(total, -LIMIT), LIMIT), total)
        rounded = fitting.to(g.dtype.element_ty)
        w += total - rounded.to(tl.float32)
    else:
        rounded = total
    # In units of the unscaled loss, with a division that rounds the same on every GPU.
    one = tl.full(w.shape, 1.0, tl.float32)
    tl.store(new + at, w * tl.div_rn(one, one * scale), (i < kept)[:, None] & (j < columns)[None, :])
    tl.store(g + at, rounded, (i < rows)[:, None] & (j < columns)[None, :])


@triton.jit
def write(table, tiles, is_healthy, G: tl.constexpr, SOURCE: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a step's new state.

    Rows of the table: the target; its value after a healthy step, of dtype SOURCE (0: it stays), and after
    any other step, of the target's dtype (0: NaN); elements.
    """
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 4
    new, old, elements = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    at = tl.load(tiles + 2 * pid + 1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    # Read nothing that is not written, and write nothing that stays.
    from_new = tl.where(new == 0, 0, elements)
    from_old = 0 * elements
    if is_healthy is not None:
        good = tl.load(is_healthy) != 0
        from_old = tl.where(good, 0, elements)
        from_new = tl.where(good, from_new, 0)
    x = tl.load(pointer(new, SOURCE, False) + at, at < from_new, other=0.0).to(tl.float32)
    # Load nothing if there is no earlier value: the mask's default, NaN, is written.
    there = at < tl.where(old == 0, 0, from_old)
    y = tl.load(pointer(old, G, False) + at, there, other=float("nan")).to(tl.float32)
    target = pointer(tl.load(row), G, False)
    found = tl.where(at < from_old, y, x).to(target.dtype.element_ty)
    tl.store(target + at, found, at < tl.maximum(from_new, from_old))


@triton.jit
def finite(table, tiles, flags, G: tl.constexpr, COLUMNS: tl.constexpr):
    """Store whether tiles are finite. Rows of the table: a tensor, its elements."""
    pid = tl.program_id(0)
    row = table + tl.load(tiles + 2 * pid).to(tl.int64) * 2
    x = pointer(tl.load(row), G, False)
    at = tl.load(tiles + 2 * pid + 1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    # Finite means below infinity; the comparison is false for NaN.
    values = tl.abs(tl.load(x + at, at < tl.load(row + 1), other=0.0).to(tl.float32))
    tl.store(flags + pid, tl.min((values < float("inf")).to(tl.int32), axis=0).to(tl.int8))
