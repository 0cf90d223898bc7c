"""The kernels of averaging few entries. A program has one chunk, or as many rows of entries as fit.

Gradient plus residual is never stored: two kernels compute it from both in the same way. Messages are streams
of unaligned bits, so a word of memory may have bits of several programs: each sets its own, in any order.

Parameters, if a kernel has them:
    flat, error: Gradients, and residuals in fp32, of one bucket, parameter after parameter.
    loss_scale, is_healthy: One number; one bool. None for 1, and for true.
    table: As in `EntryLayout`; count: its number of chunks.
    positions, values: Of the sent entries, int32 positions in their chunks and fp32 values; for each member.
    message, received, stride: Bytes; members' bytes, and the distance from one member to the next.
    first_word, first_scale: The bit at which words start in a message, and the byte at which scales do.
    less: Receives how much each chunk's squared residual was reduced, fp64.
    sums, counts: Uninitialised fp32 buffers of the bucket's size.
    own, members, entries: This member's rank, the number of members, and the entries of each.
    DECAY, LOW, CODE: As in `TopKQuery` and `EntryLayout`.
    LENGTH, KEPT, MARKS: The longest chunk's elements, entries and marks, or the next power of two.
    ROWS: Chunks per program.
    BY_SENDERS: Whether sums are divided by the number of members that have sent something.
    LIMIT: The largest number of the gradients' dtype; 0 if that is fp32.
    ALIGNED: Whether all chunks start and end at a multiple of 16 bytes.
"""

# Types of parameters are Triton's own, evaluated when a kernel is compiled.
import triton
import triton.language as tl

from thinwire.kernels.triton.compiled_codes import _bf16_bits, _widened


@triton.jit
def _chunk(table, count, ALIGNED: tl.constexpr):
    """Return the start of a program's chunk, its elements, its entries, and the start of these."""
    column = table + tl.program_id(0)
    start = tl.load(column)
    length = tl.load(column + 3 * count).to(tl.int32)
    if ALIGNED:
        start, length = tl.multiple_of(start, 8), tl.multiple_of(length, 8)
    return start, length, tl.load(column + 2 * count).to(tl.int32), tl.load(column + 4 * count)


@triton.jit
def _wanted(flat, error, loss_scale, i, inside, DECAY: tl.constexpr):
    """Return gradients in units of the unscaled loss, plus decayed residuals."""
    x = tl.load(flat + i, inside, other=0.0).to(tl.float32)
    if loss_scale is not None:
        x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * tl.load(loss_scale))
    # Rounded once, as in PyTorch's addition of a multiple.
    return tl.fma(tl.load(error + i, inside, other=0.0), tl.full(x.shape, DECAY, tl.float32), x)


@triton.jit(do_not_specialize=["count"])
def select(
    flat, error, loss_scale, table, positions, values, count,
    DECAY: tl.constexpr, LENGTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Find the entries of largest magnitude of each chunk; the first of equal ones."""
    start, length, kept, first = _chunk(table, count, ALIGNED)
    i = tl.arange(0, LENGTH)
    inside = i < length
    # Relative to the chunk's pointers, 32-bit offsets are enough, and take fewer registers.
    x = _wanted(flat + start, error + start, loss_scale, i, inside, DECAY)
    # Bits of magnitudes are ordered like them; one value for all NaN; after the end, below all numbers.
    size = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FC00000)
    size = tl.where(inside, size, -1)
    # Bisect until as many numbers as are kept are at least `low`, or `low` is the smallest of them.
    low = 0 * length
    high = tl.max(size, axis=0) + 1
    number = length
    while (number != kept) & (high - low > 1):
        middle = low + (high - low) // 2
        above = tl.sum((size >= middle).to(tl.int32), axis=0)
        enough = above >= kept
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        number = tl.where(enough, above, number)
    larger, equal = (size > low).to(tl.int32), (size == low).to(tl.int32)
    room = kept - tl.sum(larger, axis=0)
    # Count both in one integer: there are fewer than 2¹⁶ elements.
    both = (larger << 16) + equal
    before = tl.cumsum(both, axis=0) - both
    is_kept = (larger > 0) | ((equal > 0) & ((before & 0xFFFF) < room))
    entry = (before >> 16) + tl.minimum(before & 0xFFFF, room)
    tl.store(positions + first + entry, i, is_kept)
    tl.store(values + first + entry, x, is_kept)


@triton.jit
def _on_the_wire(x):
    """Return the bits of the nearest bf16; finite numbers stay finite."""
    LARGEST: tl.constexpr = 3.3895313892515355e38
    within = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return _bf16_bits(tl.where(tl.abs(x) < float("inf"), within, x))


@triton.jit
def _store_scale(at, bits, mask):
    """Store a bf16 at any byte."""
    tl.store(at, (bits & 0xFF).to(tl.uint8), mask)
    tl.store(at + 1, ((bits >> 8) & 0xFF).to(tl.uint8), mask)


@triton.jit
def _load_scale(at, mask):
    """Return a bf16 from any byte as fp32."""
    return _widened(
        tl.load(at, mask, other=0).to(tl.int32) | (tl.load(at + 1, mask, other=0).to(tl.int32) << 8)
    )


@triton.jit
def _set_bits(words, bit, number, mask, WIDTH: tl.constexpr):
    """Write a number's bits to zero bits of a message, from a given bit on."""
    at, shift = words + (bit >> 5), (bit & 31).to(tl.int32)
    tl.atomic_or(at, number << shift, mask, sem="relaxed")
    if WIDTH > 1:
        # The rest goes into the next word; shift in two steps, since 32 bits can't be shifted by 32.
        tl.atomic_or(at + 1, (number >> 1) >> (31 - shift), mask & (shift + WIDTH > 32), sem="relaxed")


@triton.jit
def _two_means(sizes, peak, kept, inside):
    """Return the two levels of each row with the least squared error of its magnitudes."""
    PARTS: tl.constexpr = 70368744177664.0
    unit = tl.where(peak == 0, 1.0, peak)
    one = tl.full(sizes.shape, 1.0, tl.float32)
    # Elements after the end are sorted after all relative values, which are at most one.
    ordered = tl.sort(tl.where(inside, tl.div_rn(sizes, one * unit[:, None]), 2.0), dim=1)
    k = tl.arange(0, sizes.shape[1])[None, :]
    parts = tl.where(k < kept[:, None], ordered * PARTS, 0.0).to(tl.int64)
    below = tl.cumsum(parts, axis=1).to(tl.float32) * (1 / PARTS)
    above = tl.sum(parts, axis=1).to(tl.float32)[:, None] * (1 / PARTS) - below
    num_below = one * (k + 1)
    num_above = tl.maximum(one * kept[:, None] - num_below, 1.0)
    spread = tl.div_rn(below * below, num_below) + tl.div_rn(above * above, num_above)
    border = tl.argmax(tl.where(k < kept[:, None] - 1, spread, -1.0), axis=1)
    at = k == border[:, None]
    low = tl.sum(tl.where(at, tl.div_rn(below, num_below), 0.0), axis=1)
    high = tl.sum(tl.where(at, tl.div_rn(above, num_above), 0.0), axis=1)
    return low * unit, high * unit


@triton.jit
def _ends(sizes, kept, inside, CODE: tl.constexpr):
    """Return the bits of the lowest and the highest level of each row; NaN if a value is not finite."""
    broken = tl.max((inside & ~(sizes < float("inf"))).to(tl.int32), axis=1) > 0
    peak = tl.max(sizes, axis=1)
    least = tl.min(tl.where(inside, sizes, float("inf")), axis=1)
    low, high = least, peak
    if CODE == 2:
        low, high = _two_means(sizes, peak, kept, inside)
        low, high = tl.where(kept == 1, least, low), tl.where(kept == 1, peak, high)
    return tl.where(broken, 0x7FC0, _on_the_wire(low)), tl.where(broken, 0x7FC0, _on_the_wire(high))


@triton.jit
def _steps(low, high, shape: tl.constexpr, CODE: tl.constexpr):
    """Return the lowest level of each row and the distance between levels, in the shape of its entries."""
    one = tl.full(shape, 1.0, tl.float32)
    return one * low[:, None], tl.div_rn(one * (high - low)[:, None], one * ((1 << CODE - 1) - 1))


@triton.jit(do_not_specialize=["count", "first_word", "first_scale"])
def pack(
    positions, values, table, message, count, first_word, first_scale,
    LOW: tl.constexpr, CODE: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the entries of chunks to a message of zeros."""
    c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = c < count
    k = tl.arange(0, KEPT)[None, :]
    kept = tl.load(table + 2 * count + c, rows, other=0).to(tl.int32)
    inside = k < kept[:, None]
    entry = tl.load(table + 4 * count + c, rows, other=0)[:, None] + k
    position = tl.load(positions + entry, inside, other=0)
    x = tl.load(values + entry, inside, other=0.0)
    words = message.to(tl.pointer_type(tl.int32))
    mark = tl.load(table + count + c, rows, other=0)[:, None] + entry + (position >> LOW)
    _set_bits(words, mark, tl.full(mark.shape, 1, tl.int32), inside, 1)
    word = position & ((1 << LOW) - 1)
    if CODE == 0:
        _store_scale(message + first_scale + 2 * entry, _on_the_wire(x), inside)
    else:
        LAST: tl.constexpr = (1 << CODE - 1) - 1
        low_bits, high_bits = _ends(tl.abs(x), kept, inside, CODE)
        at = message + first_scale + 4 * c
        _store_scale(at, low_bits, rows)
        _store_scale(at + 2, high_bits, rows)
        low, step = _steps(_widened(low_bits), _widened(high_bits), x.shape, CODE)
        units = tl.div_rn(tl.abs(x) - low, tl.where(step > 0, step, 1.0))
        # 1.5 · 2²³: near it there are only integers, so the sum is rounded to one, ties to even.
        whole = (tl.minimum(tl.maximum(units, 0.0), LAST) + 12582912.0) - 12582912.0
        code = tl.where(units == units, whole, 0.0).to(tl.int32) | ((x < 0).to(tl.int32) << CODE - 1)
        word = (word << CODE) | code
    if LOW + CODE > 0:
        _set_bits(words, first_word + entry * (LOW + CODE), word, inside, LOW + CODE)


@triton.jit
def _bits_at(row, bit, mask, WIDTH: tl.constexpr):
    """Load at most 16 bits of a message, from any bit on."""
    at, shift = row + (bit >> 3), (bit & 7).to(tl.int32)
    found = tl.load(at, mask, other=0).to(tl.int32)
    if WIDTH > 1:
        found |= tl.load(at + 1, mask & (shift + WIDTH > 8), other=0).to(tl.int32) << 8
    if WIDTH > 9:
        found |= tl.load(at + 2, mask & (shift + WIDTH > 16), other=0).to(tl.int32) << 16
    return (found >> shift) & ((1 << WIDTH) - 1)


# Messages are read byte by byte, so specialising on their alignment has no use.
@triton.jit(
    do_not_specialize=["stride", "count", "first_word", "first_scale", "members", "entries"],
    do_not_specialize_on_alignment=["received"],
)
def unpack(
    received, stride, table, positions, values, count, first_word, first_scale, members, entries,
    LOW: tl.constexpr, CODE: tl.constexpr, MARKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read the entries of chunks from the messages of all members."""
    c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = c < count
    j = tl.arange(0, MARKS)[None, :]
    kept = tl.load(table + 2 * count + c, rows, other=0).to(tl.int32)[:, None]
    length = tl.load(table + 3 * count + c, rows, other=1).to(tl.int32)[:, None]
    first = tl.load(table + 4 * count + c, rows, other=0)[:, None]
    mark = tl.load(table + count + c, rows, other=0)[:, None] + first + j
    is_mark = rows[:, None] & (j < kept + ((length - 1) >> LOW))
    row = received
    for _ in range(members):
        # The n-th set mark belongs to the n-th entry.
        is_set = _bits_at(row, mark, is_mark, 1)
        n = tl.cumsum(is_set, axis=1) - 1
        inside = (is_set > 0) & (n < kept)
        position, entry = (j - n) << LOW, first + n
        word = tl.zeros(position.shape, tl.int32)
        if LOW + CODE > 0:
            word = _bits_at(row, first_word + entry * (LOW + CODE), inside, LOW + CODE)
        if CODE == 0:
            x = _load_scale(row + first_scale + 2 * entry, inside)
        else:
            LAST: tl.constexpr = (1 << CODE - 1) - 1
            at = row + first_scale + 4 * c
            low, step = _steps(_load_scale(at, rows), _load_scale(at + 2, rows), word.shape, CODE)
            x = low + step * (word & LAST).to(tl.float32)
            x = tl.where((word & (LAST + 1)) > 0, -x, x)
        tl.store(positions + entry, position + (word >> CODE), inside)
        tl.store(values + entry, x, inside)
        row += stride
        positions += entries
        values += entries


@triton.jit
def _entries(positions, values, k, real, length):
    """Load positions, values, and which are valid: a position outside its chunk would be a neighbour's."""
    p = tl.load(positions + k, real, other=-1)
    there = (p >= 0) & (p < length)
    return p, tl.load(values + k, there, other=0.0), there


@triton.jit
def _clear(room, positions, values, k, real, length, members, entries):
    """Write zeros to the positions that members have sent."""
    for _ in range(members):
        p, _value, there = _entries(positions, values, k, real, length)
        tl.store(room + p, 0.0, there)
        positions += entries
        values += entries
    tl.debug_barrier()


@triton.jit
def _count(counts, positions, values, k, real, length, members, entries):
    """Count the members that have sent something for each position."""
    for _ in range(members):
        p, v, there = _entries(positions, values, k, real, length)
        found = tl.load(counts + p, there, other=0.0) + (v != 0).to(tl.float32)
        tl.store(counts + p, found, there)
        tl.debug_barrier()
        positions += entries
        values += entries


@triton.jit
def _add(
    sums, counts, positions, values, k, real, length, members, entries, scale, BY_SENDERS: tl.constexpr
):  # fmt: skip
    """Sum what members have sent."""
    divisor = tl.full(k.shape, 1.0, tl.float32) * members
    for _ in range(members):
        p, v, there = _entries(positions, values, k, real, length)
        if BY_SENDERS:
            divisor = tl.maximum(tl.load(counts + p, there, other=1.0), 1.0)
        found = tl.load(sums + p, there, other=0.0) + tl.div_rn(v * scale, divisor)
        tl.store(sums + p, found, there)
        tl.debug_barrier()
        positions += entries
        values += entries


@triton.jit
def _round(
    flat, error, sums, positions, values, k, real, length, members, entries, scale, LIMIT: tl.constexpr
):  # fmt: skip
    """Write sums to gradients in 16 bits, and what these can't hold of them to the residual."""
    one = tl.full(k.shape, 1.0, tl.float32)
    for _ in range(members):
        p, _value, there = _entries(positions, values, k, real, length)
        total = tl.load(sums + p, there, other=0.0)
        # Zero if an earlier member has sent the same position.
        there = there & (total != 0)
        rounded = tl.minimum(tl.maximum(total, -LIMIT), LIMIT).to(flat.dtype.element_ty)
        lost = tl.div_rn(total - rounded.to(tl.float32), one * scale)
        tl.store(flat + p, rounded, there)
        tl.store(error + p, tl.load(error + p, there, other=0.0) + lost, there)
        tl.store(sums + p, 0.0, there)
        tl.debug_barrier()
        positions += entries
        values += entries


@triton.jit(do_not_specialize=["count", "own", "members", "entries"])
def merge(
    flat, error, loss_scale, is_healthy, table, positions, values, less, sums, counts, count, own, members,
    entries,
    DECAY: tl.constexpr, LIMIT: tl.constexpr, BY_SENDERS: tl.constexpr, LENGTH: tl.constexpr,
    KEPT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Replace gradients by the mean of what members have sent, and residuals by what was not sent.

    Entries are added in memory, member after member: a barrier makes a thread's writes visible to the other
    threads of the program. If the step is not healthy, residuals stay and gradients become NaN.
    """
    start, length, kept, first = _chunk(table, count, ALIGNED)
    flat, error, sums = flat + start, error + start, sums + start
    i = tl.arange(0, LENGTH)
    x = _wanted(flat, error, loss_scale, i, i < length, DECAY)
    zero, written = 0.0, length
    if is_healthy is not None:
        healthy = tl.load(is_healthy) != 0
        zero, written = tl.where(healthy, 0.0, float("nan")), tl.where(healthy, length, 0)
        kept = tl.where(healthy, kept, 0)
    # Elements may be read by other threads than those that write them, and so may the entries below.
    tl.debug_barrier()
    tl.store(error + i, x, i < written)
    tl.store(flat + i, zero, i < length)
    tl.debug_barrier()

    k = tl.arange(0, KEPT)
    real = k < kept
    positions, values, mine = positions + first, values + first, own.to(tl.int64) * entries
    p, v, there = _entries(positions + mine, values + mine, k, real, length)
    before = tl.load(error + p, there, other=0.0)
    tl.debug_barrier()
    tl.store(error + p, before - v, there)
    # In double: the difference of two large squares may be small.
    b, a = before.to(tl.float64), (before - v).to(tl.float64)
    number = tl.load(table + tl.program_id(0) + 5 * count)
    tl.store(less + number, tl.sum(b * b - a * a, axis=0), written > 0)

    scale = 1.0
    if loss_scale is not None:
        scale = tl.load(loss_scale)
    if BY_SENDERS:
        counts += start
        _clear(counts, positions, values, k, real, length, members, entries)
        _count(counts, positions, values, k, real, length, members, entries)
    if LIMIT > 0:
        _clear(sums, positions, values, k, real, length, members, entries)
    _add(sums, counts, positions, values, k, real, length, members, entries, scale, BY_SENDERS)
    if LIMIT > 0:
        _round(flat, error, sums, positions, values, k, real, length, members, entries, scale, LIMIT)
