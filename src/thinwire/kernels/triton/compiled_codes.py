"""The kernels of averaging in few bits. A program has some blocks, a row for each.

A scale is handled as the 16 bits that travel, so that rounding to bf16 is the same on every device.

Parameters, if a kernel has them:
    flat, out: Numbers, fp32, one tensor after the other.
    message, stride, share: As of `Coded`; the stride of its rows is in bytes. `received` is that of members.
    starts, lengths: Of each block: where it begins in `flat`, and its elements, int64.
    keys, firsts: Of each block, as `Draws` has them, int64.
    levels: Of the codebook, fp32; LAST, LEVELS: the last one and their number.
    lost: What coding the mean loses, a row for each block.
    count, filled, members: Of blocks; of those that are sent; of the group.
    STATISTIC, CUBIC, BITS: As of `Codebook`.
    BLOCK, PADDED, ROWS: Elements of a block, the next power of two, and blocks of a program.
    DRAWN, WHOLE, KEEPS, SUBTRACTS: Whether rounding is stochastic, no block is shorter than others, `lost` is
        wanted, what blocks stand for is subtracted from `flat`.
"""

# Types of parameters are Triton's own, evaluated when a kernel is compiled.
import triton
import triton.language as tl

# Triton compiles in whether a number is one and whether 16 divides it: so buckets of unlike sizes would
# have different kernels, and each takes seconds in the first step. No address is made of counts, so that
# nothing would be won.


@triton.jit
def _bf16_bits(x):
    """Return the bits of the nearest bf16, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    # Half to even: half of the last bit that stays, less one, and that bit. What carries over raises the
    # exponent, which is the next number as well, up to infinity.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)  # of a NaN the sum above could overflow to zero


@triton.jit
def _widened(bits):
    """Return the fp32 number that the bits of a bf16 stand for."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scale_bits(x, lengths, LAST: tl.constexpr, STATISTIC: tl.constexpr):
    """Return the bits of each row's scale."""
    TINY: tl.constexpr = 1.1754943508222875e-38
    magnitudes = tl.abs(x)
    # A maximum does not pass on a NaN on every device.
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    largest = tl.max(tl.where(x == x, magnitudes, 0.0), axis=1)
    if STATISTIC == "largest":
        wanted = tl.div_rn(largest, tl.full(largest.shape, LAST, tl.float32))
        bits = _bf16_bits(wanted)
        # Never below what is wanted, or the largest would be cut off.
        # The bits of positive numbers are in the order of the numbers: one more is the next bf16.
        bits += (_widened(bits) < wanted).to(tl.int32)
    else:
        # From shares of the largest: squares of the numbers themselves could leave the range.
        one = tl.full(largest.shape, 1.0, tl.float32)
        shares = magnitudes * tl.where(largest < TINY, 0.0, tl.div_rn(one, largest))[:, None]
        if STATISTIC == "mean magnitude":
            bits = _bf16_bits(largest * tl.div_rn(tl.sum(shares, axis=1), lengths))
        else:
            mean_square = tl.div_rn(tl.sum(shares * shares, axis=1), lengths)
            bits = _bf16_bits(largest * tl.sqrt_rn(mean_square))
    bits = tl.where(_widened(bits) < TINY, 0, bits)  # one over it would not be finite
    return tl.where(has_nan, 0x7FC0, bits)


@triton.jit
def _nearest(units, levels, LAST: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the place of the nearest level."""
    if BITS == 8:
        kept = tl.minimum(tl.maximum(units, -LAST), LAST)
        # 1.5 · 2²³: beyond it there are only whole numbers, so the sum is rounded to one, ties to even.
        whole = (kept + 12582912.0) - 12582912.0
        places = tl.where(units == units, whole + LAST, 0.0).to(tl.int32)
    else:
        places = tl.zeros(units.shape, tl.int32)
        for place in tl.static_range(LEVELS - 1):
            # A number in the middle goes down, as by `bucketize`; a NaN anywhere: its block's scale is NaN.
            middle = (tl.load(levels + place) + tl.load(levels + place + 1)) * 0.5
            places += (units > middle).to(tl.int32)
    return places


@triton.jit
def _drawn(units, uniform, levels, LAST: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the place of one of the two levels around each number, so that their mean is it."""
    if BITS == 8:
        kept = tl.where(units == units, tl.minimum(tl.maximum(units, -LAST), LAST), 0.0)
        lower = tl.minimum(tl.floor(kept) + LAST, LEVELS - 2).to(tl.int32)
    else:
        lower = tl.zeros(units.shape, tl.int32)
        for place in tl.static_range(1, LEVELS - 1):
            lower += (units >= tl.load(levels + place)).to(tl.int32)
    below = tl.load(levels + lower)
    # Beyond the end levels it is below 0 or above 1, and no draw changes the outcome.
    share = tl.div_rn(units - below, tl.load(levels + lower + 1) - below)
    return lower + (uniform < share).to(tl.int32)


@triton.jit
def _uniform(keys, first, j):
    """Return the draws of `Draws.uniform`."""
    places = (first[:, None] + j[None, :]).to(tl.uint32)
    words = places * 0x9E3779B1 + keys.to(tl.uint32)[:, None]
    words ^= words >> 16
    words = words * 0x21F0AAAD
    words ^= words >> 15
    words = words * 0x735A2D97
    words ^= words >> 15
    # As many bits as fp32 holds: so every draw is exact, and below one, on every device.
    return (words >> 8).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _places_of(b, stride, share, BYTES: tl.constexpr):
    """Return where the scales and the codes of blocks lie in a message: bytes, even ones."""
    row = b // share
    i = b - row * share
    return row * stride + 2 * i, row * stride + 2 * share + i * BYTES


@triton.jit
def _write_codes(places, codes, rows, BLOCK: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr):
    """Store codes, several of which are one word, at an address for each row."""
    if BITS == 8:
        j = tl.arange(0, PADDED)
        inside = rows[:, None] & (j < BLOCK)[None, :]
        tl.store(codes[:, None] + j[None, :], places.to(tl.uint8), inside)
    else:
        # No word of four bytes: codes begin at an even byte, which need be no more.
        CODES: tl.constexpr = 4 if BITS == 4 else 8
        several = tl.reshape(places.to(tl.uint32), (places.shape[0], PADDED // CODES, CODES))
        shifts = (BITS * tl.arange(0, CODES)).to(tl.uint32)
        words = tl.sum(several << shifts[None, None, :], axis=2)
        g = tl.arange(0, PADDED // CODES)
        inside = rows[:, None] & (g < BLOCK // CODES)[None, :]
        if BITS == 3:
            for byte in tl.static_range(3):
                part = ((words >> (8 * byte)) & 0xFF).to(tl.uint8)
                tl.store(codes[:, None] + 3 * g[None, :] + byte, part, inside)
        else:
            WORD: tl.constexpr = tl.uint8 if BITS == 1 else tl.uint16
            tl.store(codes.to(tl.pointer_type(WORD))[:, None] + g[None, :], words.to(WORD), inside)


@triton.jit
def _read_codes(codes, rows, BLOCK: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr):
    """Return what `_write_codes` has stored, int32, a row for each block."""
    if BITS == 8:
        j = tl.arange(0, PADDED)
        inside = rows[:, None] & (j < BLOCK)[None, :]
        places = tl.load(codes[:, None] + j[None, :], inside, other=0).to(tl.int32)
    else:
        CODES: tl.constexpr = 4 if BITS == 4 else 8
        g = tl.arange(0, PADDED // CODES)
        inside = rows[:, None] & (g < BLOCK // CODES)[None, :]
        if BITS == 3:
            at = codes[:, None] + 3 * g[None, :]
            words = tl.load(at, inside, other=0).to(tl.uint32)
            for byte in tl.static_range(1, 3):
                words |= tl.load(at + byte, inside, other=0).to(tl.uint32) << (8 * byte)
        else:
            WORD: tl.constexpr = tl.uint8 if BITS == 1 else tl.uint16
            at = codes.to(tl.pointer_type(WORD))[:, None] + g[None, :]
            words = tl.load(at, inside, other=0).to(tl.uint32)
        shifts = (BITS * tl.arange(0, CODES)).to(tl.uint32)
        several = (words[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
        places = tl.reshape(several, (codes.shape[0], PADDED)).to(tl.int32)
    return places


@triton.jit
def _levels_at(places, levels, BITS: tl.constexpr, LEVELS: tl.constexpr, CUBIC: tl.constexpr):
    """Return the levels at some places; whole numbers without a table."""
    signed = places - LEVELS // 2
    if BITS == 8:
        found = signed.to(tl.float32)
    elif CUBIC:
        # Whole numbers below 2²⁴, which fp32 holds: no backend rounds them otherwise.
        found = (signed * (signed * signed + CUBIC)).to(tl.float32)
    else:
        found = tl.load(levels + places)
    return found


@triton.jit
def _usable(bits):
    """Return a scale; NaN where it is not finite, or what was infinite could end as a large number."""
    scale = _widened(bits)
    return tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))


@triton.jit
def _code(
    x, lengths, keys, firsts, b, rows, j, levels, message, stride, share, filled,
    LAST: tl.constexpr, STATISTIC: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Store scales and codes of some rows, with zeros behind them, and return what they stand for."""
    bits = _scale_bits(x, lengths, LAST, STATISTIC)
    scale = _widened(bits)
    one = tl.full(scale.shape, 1.0, tl.float32)
    units = x * tl.where(scale > 0, tl.div_rn(one, scale), 0.0)[:, None]
    if DRAWN:
        uniform = _uniform(tl.load(keys + b, rows, other=0), tl.load(firsts + b, rows, other=0), j)
        places = _drawn(units, uniform, levels, LAST, BITS, LEVELS)
    else:
        places = _nearest(units, levels, LAST, BITS, LEVELS)
    at_scales, at_codes = _places_of(b, stride, share, BLOCK * BITS // 8)
    tl.store((message + at_scales).to(tl.pointer_type(tl.int16)), bits.to(tl.int16), b < filled)
    # Padding of the last row, too: it is sent.
    _write_codes(tl.where(rows[:, None], places, 0), message + at_codes, b < filled, BLOCK, PADDED, BITS)
    return _levels_at(places, levels, BITS, LEVELS, CUBIC) * _usable(bits)[:, None]


@triton.jit
def _where(starts, lengths, b, rows, j, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Return where the elements of blocks lie, which there are, and how many in each."""
    if WHOLE:
        at = b[:, None] * BLOCK + j[None, :]
        inside = rows[:, None] & (j < BLOCK)[None, :]
        length = tl.full(b.shape, BLOCK, tl.float32)
    else:
        numbers = tl.load(lengths + b, rows, other=1)
        at = tl.load(starts + b, rows, other=0)[:, None] + j[None, :]
        inside = rows[:, None] & (j[None, :] < numbers[:, None])
        length = numbers.to(tl.float32)
    return at, inside, length


@triton.jit(do_not_specialize=["count", "filled"])
def encode(
    flat, starts, lengths, keys, firsts, levels, message, stride, share, count, filled,
    LAST: tl.constexpr, STATISTIC: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, DRAWN: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Code blocks of a flat tensor."""
    b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, PADDED)
    rows = b < count
    at, inside, length = _where(starts, lengths, b, rows, j, BLOCK, WHOLE)
    x = tl.load(flat + at, inside, other=0.0)
    _code(
        x, length, keys, firsts, b, rows, j, levels, message, stride, share, filled,
        LAST, STATISTIC, CUBIC, LEVELS, BITS, BLOCK, PADDED, DRAWN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "filled", "members"])
def average(
    received, received_stride, lengths, keys, firsts, levels, message, lost, share, count, filled, members,
    LAST: tl.constexpr, STATISTIC: tl.constexpr, CUBIC: tl.constexpr, LEVELS: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, DRAWN: tl.constexpr,
    WHOLE: tl.constexpr, KEEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up what members have sent of blocks, in the order of the members, and code the mean."""
    b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, PADDED)
    rows = b < count
    mean = tl.zeros((ROWS, PADDED), tl.float32)
    divisor = tl.full((ROWS,), 1.0, tl.float32) * members
    at_scales, at_codes = _places_of(b, received_stride, share, BLOCK * BITS // 8)
    # From row to row, and not by a member's number: times bytes, 32 bits would not hold it for a large model.
    row = received
    for _ in range(members):
        bits = tl.load((row + at_scales).to(tl.pointer_type(tl.int16)), rows, other=0)
        places = _read_codes(row + at_codes, rows, BLOCK, PADDED, BITS)
        # Scales, and not sums: once for a block, and rounded as by PyTorch's kernels.
        scale = tl.div_rn(_usable(bits), divisor)
        mean += _levels_at(places, levels, BITS, LEVELS, CUBIC) * scale[:, None]
        row += received_stride
    if WHOLE:
        inside = rows[:, None] & (j < BLOCK)[None, :]
        length = tl.full((ROWS,), BLOCK, tl.float32)
    else:
        numbers = tl.load(lengths + b, rows, other=1)
        inside = rows[:, None] & (j[None, :] < numbers[:, None])
        length = numbers.to(tl.float32)
    # Below four bits a zero decodes as a small number, which behind a short block would count in its scale.
    mean = tl.where(inside, mean, 0.0)
    coded = _code(
        mean, length, keys, firsts, b, rows, j, levels, message, 0, share, filled,
        LAST, STATISTIC, CUBIC, LEVELS, BITS, BLOCK, PADDED, DRAWN,
    )  # fmt: skip
    if KEEPS:
        tl.store(lost + b[:, None] * BLOCK + j[None, :], mean - coded, rows[:, None] & (j < BLOCK)[None, :])


@triton.jit(do_not_specialize=["count"])
def decode(
    message, stride, share, starts, lengths, levels, flat, out, count,
    CUBIC: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, WHOLE: tl.constexpr, SUBTRACTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write what blocks stand for, or what that leaves of the numbers of a flat tensor."""
    b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, PADDED)
    rows = b < count
    at, inside, _ = _where(starts, lengths, b, rows, j, BLOCK, WHOLE)
    at_scales, at_codes = _places_of(b, stride, share, BLOCK * BITS // 8)
    places = _read_codes(message + at_codes, rows, BLOCK, PADDED, BITS)
    scale = _usable(tl.load((message + at_scales).to(tl.pointer_type(tl.int16)), rows, other=0))
    values = _levels_at(places, levels, BITS, LEVELS, CUBIC) * scale[:, None]
    if SUBTRACTS:
        values = tl.load(flat + at, inside, other=0.0) - values
    tl.store(out + at, values, inside)


@triton.jit
def probe(number):
    """Store a one."""
    tl.store(number, 1.0)
