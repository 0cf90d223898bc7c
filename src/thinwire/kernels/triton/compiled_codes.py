"""The kernels of averaging in few bits. A program has some blocks that one member averages.

Its numbers are a tile of four rows: each column has four adjacent codes, of one thread. Columns are `ROWS`
blocks of `INNER` columns, in adjacent threads; this repeats `OUTER` times, in which a thread continues in the
same blocks. So numbers are read 16 bytes at a time, nothing is packed through shared memory, and a block's
scale is computed once for several numbers. Compilers choose this layout themselves, as long as a tile has no
more dimensions.

A scale is handled as the 16 bits that are sent, so that rounding to bf16 is the same on every device.

Parameters, if a kernel has them:
    flat, out: Numbers, fp32, fp16 or bf16, one tensor after the other.
    message, stride, share: As in `Coded`; the stride of its rows is in bytes. `received` has members' rows.
    tiles: The number of programs for the blocks of one member.
    starts, lengths: Each block's start in `flat`, and its number of elements, int64; None if no block is
        shorter than others.
    levels: The codebook's levels, fp32; LAST, LEVELS: the last one and their number.
    lost: What encoding the mean loses, fp32, a row for each block; `own` is the first of those blocks, and
        `until` the one after them.
    rest: The new residual, fp32, one tensor after the other.
    loss_scale: The residual is divided by it; None for one.
    count, members: The numbers of blocks and of members.
    STATISTIC, CUBIC, BITS: As in `Codebook`; LEAST, MOST: its reach.
    BLOCK: Elements of a block.
    LIMIT: The largest number of the dtype of `out`; 0 if that is fp32.
    ALIGNED: Whether all blocks start at a multiple of four elements, and have a multiple of four.
"""

# Types of parameters are Triton's own, evaluated when a kernel is compiled.
import triton
import triton.language as tl

from thinwire.kernels.triton.compiled_levels import level_of, nearest

# Triton specialises on whether a number is one, and whether 16 divides it or an address. Buckets of different
# sizes would have different kernels, each of which takes seconds in the first step. It helps only gradients
# and residuals: codes start at any even byte.
ONE_KERNEL = {
    "do_not_specialize": [
        "stride", "other_stride", "sent_stride", "received_stride", "share", "tiles", "count", "own", "until",
        "members",
    ],
    "do_not_specialize_on_alignment": ["starts", "lengths", "levels", "message", "other", "sent", "received"],
}  # fmt: skip


@triton.jit
def _bf16_bits(x):
    """Return the bits of the nearest bf16, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    # Half to even: add half of the last kept bit, minus one, plus that bit. A carry raises the exponent,
    # which gives the next number as well, up to infinity.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)  # of a NaN the sum above could overflow to zero


@triton.jit
def _widened(bits):
    """Return the bits of a bf16 as an fp32 number."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _usable(bits):
    """Return a scale; NaN if it is not finite, or infinity could become a large number."""
    scale = _widened(bits)
    return tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))


# Codes of a column.
CODES = tl.constexpr(4)


@triton.jit
def _columns(OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr):
    """Return each column's block in the program, and its index in the block."""
    n = tl.arange(0, OUTER * ROWS * INNER)
    return n // INNER % ROWS, n // (ROWS * INNER) * INNER + n % INNER


@triton.jit
def _inside(column):
    """Return the positions in their block of the numbers of columns."""
    return tl.arange(0, CODES)[:, None] + (column * CODES)[None, :]


@triton.jit
def _spread(x, OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr):
    """Return the value of each block, for each of its columns."""
    return tl.reshape(tl.broadcast_to(x[None, :, None], (OUTER, ROWS, INNER)), (OUTER * ROWS * INNER,))


@triton.jit
def _largest(x, OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr):
    """Return for each column the largest number of its block."""
    of_columns = tl.reshape(tl.max(x, axis=0), (OUTER, ROWS, INNER))
    return _spread(tl.max(tl.max(of_columns, axis=2), axis=0), OUTER, ROWS, INNER)


@triton.jit
def _sums(x, OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr):
    """Return for each column the sum of its block."""
    of_columns = tl.reshape(tl.sum(x, axis=0), (OUTER, ROWS, INNER))
    return _spread(tl.sum(tl.sum(of_columns, axis=2), axis=0), OUTER, ROWS, INNER)


@triton.jit
def _scale_bits(
    x, lengths, LAST: tl.constexpr, STATISTIC: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Return for each column the bits of its block's scale, before it is fitted to codes."""
    TINY: tl.constexpr = 1.1754943508222875e-38
    # Bits of positive numbers are ordered like the numbers, followed by infinity and NaN.
    top = _largest(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, OUTER, ROWS, INNER)
    largest = top.to(tl.float32, bitcast=True)
    if STATISTIC == "largest":
        wanted = tl.div_rn(largest, tl.full(largest.shape, LAST, tl.float32))
        # Round up, or the largest number would be clipped.
        bits = (wanted.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    else:
        # From values relative to the largest: squares of the numbers themselves could overflow.
        one = tl.full(largest.shape, 1.0, tl.float32)
        shares = tl.abs(x) * tl.where(largest < TINY, 0.0, tl.div_rn(one, largest))[None, :]
        root = tl.sqrt_rn(tl.div_rn(_sums(shares * shares, OUTER, ROWS, INNER), lengths))
        bits = _bf16_bits(largest * tl.minimum(tl.maximum(root, 1 / MOST), 1 / LEAST))
    return tl.where(top > 0x7F800000, 0x7FC0, _usable_bits(bits))


@triton.jit
def _usable_bits(bits):
    """Return zero for a scale below the least normal number: its reciprocal would not be finite."""
    return tl.where(bits < 0x80, 0, bits)


@triton.jit
def _fitted_bits(bits, units, coded, OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr):
    """Return the bits of the scale that fits a block's codes best."""
    squares = _sums(coded * coded, OUTER, ROWS, INNER)
    factor = tl.div_rn(_sums(units * coded, OUTER, ROWS, INNER), squares)
    scale = _widened(bits)
    # A padding block has no squares, and no scale.
    return tl.where(scale > 0, _usable_bits(_bf16_bits(scale * factor)), bits)


@triton.jit
def _scales_at(row, start):
    """Return the address of the scales of a member's blocks from `start` on, in its row of a message."""
    return (row + 2 * start.to(tl.int64)).to(tl.pointer_type(tl.int16))


@triton.jit
def _codes_at(row, share, start, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Return the address of their codes: in units of two bytes if BITS is a power of two, else in bytes."""
    UNIT: tl.constexpr = tl.uint8 if BITS & (BITS - 1) else tl.uint16
    return (row + 2 * share + start.to(tl.int64) * (BLOCK * BITS // 8)).to(tl.pointer_type(UNIT))


@triton.jit
def _write_codes(
    positions, codes, start, share, rows,
    BLOCK: tl.constexpr, BITS: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Store codes; zeros in padding blocks."""
    # The columns of a program fill whole units: two of 5 bits fill five bytes.
    UNIT_BITS: tl.constexpr = 8 if BITS & (BITS - 1) else 16
    COLUMNS: tl.constexpr = 4 if BITS == 1 else (2 if BITS < 4 or BITS == 5 else 1)
    UNITS: tl.constexpr = CODES * COLUMNS * BITS // UNIT_BITS
    shifts = (BITS * tl.arange(0, CODES)).to(tl.uint32)
    packed = tl.where(rows, tl.sum(positions << shifts[:, None], axis=0), 0)
    if COLUMNS > 1:
        WORD: tl.constexpr = tl.uint64 if UNITS * UNIT_BITS > 32 else tl.uint32
        shifts = (tl.arange(0, COLUMNS) * (CODES * BITS)).to(WORD)
        parts = tl.reshape(packed, (OUTER * ROWS * INNER // COLUMNS, COLUMNS)).to(WORD)
        packed = tl.sum(parts << shifts[None, :], axis=1)
    r, column = _columns(OUTER, ROWS, INNER // COLUMNS)
    inside = (start + r < share) & (column < BLOCK // CODES // COLUMNS)
    at = codes + (r * (BLOCK * BITS // UNIT_BITS) + column * UNITS)
    for unit in tl.static_range(UNITS):
        tl.store(at + unit, (packed >> (UNIT_BITS * unit)).to(codes.dtype.element_ty), inside)


@triton.jit
def _read_codes(codes, r, column, rows, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Load codes stored by `_write_codes`, uint32."""
    UNIT_BITS: tl.constexpr = 8 if BITS & (BITS - 1) else 16
    shifts = (BITS * tl.arange(0, CODES)).to(tl.uint32)
    inside = rows & (column < BLOCK // CODES)
    first_bit = column * (CODES * BITS)
    at = codes + (r * (BLOCK * BITS // UNIT_BITS) + first_bit // UNIT_BITS)
    packed = tl.load(at, inside, other=0).to(tl.uint32)
    # A column starts at the beginning or in the middle of a unit.
    for unit in tl.static_range(1, (CODES * BITS + UNIT_BITS - 1) // UNIT_BITS):
        packed |= tl.load(at + unit, inside, other=0).to(tl.uint32) << (UNIT_BITS * unit)
    packed = packed >> (first_bit % UNIT_BITS).to(tl.uint32)
    return (packed[None, :] >> shifts[:, None]) & ((1 << BITS) - 1)


@triton.jit
def _in_units(x, bits):
    """Return numbers divided by their block's scale; zeros if that is zero."""
    scale = _widened(bits)
    one = tl.full(scale.shape, 1.0, tl.float32)
    return x * tl.where(scale > 0, tl.div_rn(one, scale), 0.0)[None, :]


@triton.jit
def _code(
    x, real, lengths, r, column, rows, levels, row, share, start,
    LAST: tl.constexpr, STATISTIC: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    CUBIC: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Store scales and codes of some blocks, padded with zeros, and return the decoded numbers."""
    bits = _scale_bits(x, lengths, LAST, STATISTIC, LEAST, MOST, OUTER, ROWS, INNER)
    units = _in_units(x, bits)
    positions = nearest(units, levels, BITS, LEVELS, CUBIC)
    if STATISTIC == "least squares":
        coded = tl.where(real, level_of(positions, levels, BITS, LEVELS, CUBIC), 0.0)
        bits = _fitted_bits(bits, units, coded, OUTER, ROWS, INNER)
    # Including padding blocks of the last member's row: they are sent.
    tl.store(_scales_at(row, start) + r, bits.to(tl.int16), (start + r < share) & (column == 0))
    codes = _codes_at(row, share, start, BLOCK, BITS)
    _write_codes(positions, codes, start, share, rows, BLOCK, BITS, OUTER, ROWS, INNER)
    return level_of(positions, levels, BITS, LEVELS, CUBIC) * _usable(bits)[None, :]


@triton.jit
def _decoded(
    row, levels, share, start, r, column, rows, divisor,
    CUBIC: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the numbers of some blocks of a row of a message, divided by `divisor` if it is given."""
    scale = _usable(tl.load(_scales_at(row, start) + r, rows, other=0))
    positions = _read_codes(_codes_at(row, share, start, BLOCK, BITS), r, column, rows, BLOCK, BITS)
    if divisor is not None:
        # Divide scales, not sums: once per block, and rounded as in PyTorch's kernels.
        scale = tl.div_rn(scale, tl.full(scale.shape, 1.0, tl.float32) * divisor)
    return level_of(positions, levels, BITS, LEVELS, CUBIC) * scale[None, :]


@triton.jit
def _member_and_start(tiles, ROWS: tl.constexpr):
    """Return the member whose blocks a program has, and the first one's index among them."""
    member = tl.program_id(0) // tiles
    return member, (tl.program_id(0) - member * tiles) * ROWS


@triton.jit
def _at(numbers, starts, first, r, rows, inside, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the addresses of the elements of blocks."""
    if starts is None:
        # Only the first position may need more than 32 bits.
        at = numbers + first.to(tl.int64) * BLOCK + ((r * BLOCK)[None, :] + inside)
    else:
        begin = tl.load(starts + first + r, rows, other=0)
        if ALIGNED:
            begin = tl.multiple_of(begin, CODES)
        at = numbers + (begin[None, :] + inside)
    return at


@triton.jit
def _in_one_thread(flat, starts, lengths, b, column, rows):
    """Load unaligned numbers, with those of a column in one thread instead of four."""
    at = flat + (tl.load(starts + b, rows, other=0) + column * CODES)
    count = tl.load(lengths + b, rows, other=0) - column * CODES
    evens = tl.join(tl.load(at, count > 0, other=0.0), tl.load(at + 2, count > 2, other=0.0))
    odds = tl.join(tl.load(at + 1, count > 1, other=0.0), tl.load(at + 3, count > 3, other=0.0))
    return tl.trans(tl.reshape(tl.join(evens, odds), (column.shape[0], CODES)))


@triton.jit
def _real(lengths, first, r, rows, inside, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return which elements of blocks exist, and how many in each block."""
    if lengths is None:
        real = rows[None, :] & (inside < BLOCK)
        length = tl.full(r.shape, BLOCK, tl.float32)
    else:
        numbers = tl.load(lengths + first + r, rows, other=CODES)
        if ALIGNED:
            numbers = tl.multiple_of(numbers, CODES)
        real = rows[None, :] & (inside < numbers[None, :])
        length = numbers.to(tl.float32)
    return real, length


@triton.jit(**ONE_KERNEL)
def encode(
    flat, starts, lengths, levels, message, stride, share, tiles, count,
    LAST: tl.constexpr, STATISTIC: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    CUBIC: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Encode blocks of a flat tensor."""
    r, column = _columns(OUTER, ROWS, INNER)
    inside = _inside(column)
    member, start = _member_and_start(tiles, ROWS)
    first = member * share + start
    rows = (start + r < share) & (first + r < count)
    real, length = _real(lengths, first, r, rows, inside, BLOCK, ALIGNED)
    if ALIGNED:
        x = tl.load(_at(flat, starts, first, r, rows, inside, BLOCK, ALIGNED), real, other=0.0)
    else:
        x = _in_one_thread(flat, starts, lengths, first + r, column, rows)
    x = x.to(tl.float32)
    _code(
        x, real, length, r, column, rows, levels, message + member.to(tl.int64) * stride, share, start,
        LAST, STATISTIC, LEAST, MOST, CUBIC, LEVELS, BITS, BLOCK, OUTER, ROWS, INNER,
    )  # fmt: skip


@triton.jit(**ONE_KERNEL)
def average(
    received, received_stride, lengths, levels, message, lost, share, count, own, members,
    LAST: tl.constexpr, STATISTIC: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    CUBIC: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum what members have sent of blocks, in rank order, and encode the mean."""
    r, column = _columns(OUTER, ROWS, INNER)
    inside = _inside(column)
    start = tl.program_id(0) * ROWS
    rows = start + r < count
    mean = tl.zeros(inside.shape, tl.float32)
    # Step from row to row: for a large model, rank times bytes would overflow 32 bits.
    row = received
    for _ in range(members):
        mean += _decoded(row, levels, share, start, r, column, rows, members, CUBIC, LEVELS, BITS, BLOCK)
        row += received_stride
    real, length = _real(lengths, own + start, r, rows, inside, BLOCK, ALIGNED)
    # Below four bits a zero is decoded as a small number, which after a short block would affect its scale.
    if lengths is not None or BLOCK < OUTER * INNER * CODES:
        mean = tl.where(real, mean, 0.0)
    coded = _code(
        mean, real, length, r, column, rows, levels, message, share, start,
        LAST, STATISTIC, LEAST, MOST, CUBIC, LEVELS, BITS, BLOCK, OUTER, ROWS, INNER,
    )  # fmt: skip
    if lost is not None:
        at = _at(lost, None, start, r, rows, inside, BLOCK, ALIGNED)
        tl.store(at, mean - coded, rows[None, :] & (inside < BLOCK))


@triton.jit
def _rounded(values, out, LIMIT: tl.constexpr):
    """Return the nearest numbers in the dtype of `out`, within its range."""
    if LIMIT > 0:
        # Keep NaN: minimum and maximum would drop it.
        fitting = tl.where(values == values, tl.minimum(tl.maximum(values, -LIMIT), LIMIT), values)
        rounded = fitting.to(out.dtype.element_ty)
    else:
        rounded = values
    return rounded


@triton.jit(**ONE_KERNEL)
def decode(
    message, stride, other, other_stride, starts, lengths, levels, out, share, tiles, count,
    LIMIT: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write decoded blocks; if there is another message, the mean of both."""
    r, column = _columns(OUTER, ROWS, INNER)
    inside = _inside(column)
    member, start = _member_and_start(tiles, ROWS)
    first = member * share + start
    rows = (start + r < share) & (first + r < count)
    row = message + member.to(tl.int64) * stride
    if other is None:
        values = _decoded(row, levels, share, start, r, column, rows, None, CUBIC, LEVELS, BITS, BLOCK)
    else:
        values = _decoded(row, levels, share, start, r, column, rows, 2, CUBIC, LEVELS, BITS, BLOCK)
        row = other + member.to(tl.int64) * other_stride
        values += _decoded(row, levels, share, start, r, column, rows, 2, CUBIC, LEVELS, BITS, BLOCK)
    real, _ = _real(lengths, first, r, rows, inside, BLOCK, ALIGNED)
    tl.store(_at(out, starts, first, r, rows, inside, BLOCK, ALIGNED), _rounded(values, out, LIMIT), real)


@triton.jit(**ONE_KERNEL)
def decode_and_keep(
    message, stride, sent, sent_stride, starts, lengths, levels, flat, lost, loss_scale, out, rest,
    share, tiles, count, own, until, members,
    LIMIT: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write decoded blocks, and the residual: what was not sent, was lost, or does not fit.

    If nothing was lost, `message` is another member's, and the mean of both is written.
    """
    r, column = _columns(OUTER, ROWS, INNER)
    inside = _inside(column)
    member, start = _member_and_start(tiles, ROWS)
    first = member * share + start
    rows = (start + r < share) & (first + r < count)
    real, _ = _real(lengths, first, r, rows, inside, BLOCK, ALIGNED)
    row = sent + member.to(tl.int64) * sent_stride
    values = _decoded(row, levels, share, start, r, column, rows, None, CUBIC, LEVELS, BITS, BLOCK)
    at = _at(flat, starts, first, r, rows, inside, BLOCK, ALIGNED)
    left = tl.load(at, real, other=0.0) - values
    if lost is None:
        values = _decoded(row, levels, share, start, r, column, rows, 2, CUBIC, LEVELS, BITS, BLOCK)
        row = message + member.to(tl.int64) * stride
        values += _decoded(row, levels, share, start, r, column, rows, 2, CUBIC, LEVELS, BITS, BLOCK)
    else:
        mine = (first + r >= own) & (first + r < until)
        at = _at(lost, None, first - own, r, rows, inside, BLOCK, ALIGNED)
        # Times the number of members: only this member keeps it, so it counts by that much less in the mean.
        left += tl.load(at, real & mine[None, :], other=0.0) * members
        row = message + member.to(tl.int64) * stride
        values = _decoded(row, levels, share, start, r, column, rows, None, CUBIC, LEVELS, BITS, BLOCK)
    rounded = _rounded(values, out, LIMIT)
    # `out` may be the numbers' own memory: each was read before, and only by this program.
    tl.store(_at(out, starts, first, r, rows, inside, BLOCK, ALIGNED), rounded, real)
    if LIMIT > 0:
        left += values - rounded.to(tl.float32)
    if loss_scale is not None:
        left = tl.div_rn(left, tl.full(left.shape, 1.0, tl.float32) * tl.load(loss_scale))
    tl.store(_at(rest, starts, first, r, rows, inside, BLOCK, ALIGNED), left, real)


@triton.jit
def probe(number):
    """Store a one."""
    tl.store(number, 1.0)
