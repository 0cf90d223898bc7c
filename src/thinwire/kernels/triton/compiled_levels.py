"""The levels of codes, and the choice of a number's level.

Parameters are as in `compiled_codes`.
"""

# Types of parameters are Triton's own, evaluated when a kernel is compiled.
import triton
import triton.language as tl

# 1.5 · 2²³: near it there are only integers, so a sum with it is rounded to one, ties to even. The sum's bits
# are those of this number plus the integer.
WHOLE = tl.constexpr(12582912.0)
WHOLE_BITS = tl.constexpr(0x4B400000)


@triton.jit
def level_of(positions, levels, BITS: tl.constexpr, LEVELS: tl.constexpr, CUBIC: tl.constexpr):
    """Return the levels at some positions, uint32."""
    HALF: tl.constexpr = LEVELS // 2
    if BITS > 4 or CUBIC:
        found = (positions + (WHOLE_BITS - HALF)).to(tl.float32, bitcast=True) - WHOLE
        if CUBIC:
            found = _cubic(found, CUBIC)
    else:
        # The levels are symmetric, and so few that selecting is faster than loading one per number. Odd
        # numbers of both signs represent them.
        odd = (2 * positions + WHOLE_BITS).to(tl.float32, bitcast=True) - (WHOLE + (LEVELS - 1))
        found = tl.load(levels + HALF) + tl.zeros(positions.shape, tl.float32)
        for place in tl.static_range(1, HALF):
            found = tl.where(tl.abs(odd) > 2 * place, tl.load(levels + HALF + place), found)
        found = tl.where(odd < 0, -found, found)
    return found


@triton.jit
def _cubic(k, CUBIC: tl.constexpr):
    """Return the level at k from the middle; half-integers are exact, too, since results are below 2²²."""
    return k * tl.fma(k, k, tl.full(k.shape, CUBIC, tl.float32))


@triton.jit
def _near(units, MINUS: tl.constexpr):
    """Return integers less than 0.63 from k - MINUS, plus `WHOLE`, if `units` is the level at k."""
    # This cubic of the level is within 0.13 of k, up to the last level. Any rounding is fine.
    slope = tl.fma(units * units, tl.full(units.shape, -1.6e-9, tl.float32), 0.00815)
    return tl.fma(units, slope, tl.full(units.shape, -MINUS, tl.float32)) + WHOLE


@triton.jit
def nearest(units, levels, BITS: tl.constexpr, LEVELS: tl.constexpr, CUBIC: tl.constexpr):
    """Return the index of the nearest level, uint32; the lower one of two equally near."""
    if BITS > 4:
        positions = (units + WHOLE).to(tl.uint32, bitcast=True) - (WHOLE_BITS - LEVELS // 2)
    elif CUBIC:
        whole = _near(units, 0.5)
        # The middle of two levels is the level at half-integers of a cubic that is higher by ¾ k.
        middle = _cubic(whole - WHOLE + 0.5, CUBIC + 0.75)
        positions = whole.to(tl.uint32, bitcast=True) - (WHOLE_BITS - LEVELS // 2)
        positions += (units > middle).to(tl.uint32)
    else:
        # Levels are symmetric, so search by magnitude, in bits. Add one bit for negative numbers, so that a
        # negative number in the middle also rounds down, which is up by magnitude.
        bits = units.to(tl.int32, bitcast=True)
        size = (bits & 0x7FFFFFFF) - (bits >> 31)
        positions = tl.full(units.shape, LEVELS // 2, tl.uint32)
        for place in tl.static_range(LEVELS // 2, LEVELS - 1):
            middle = (tl.load(levels + place) + tl.load(levels + place + 1)) * 0.5
            positions += (size > middle.to(tl.int32, bitcast=True)).to(tl.uint32)
        positions = tl.where(units > 0, positions, positions ^ (LEVELS - 1))
    # A NaN, which makes its block's scale NaN, needs a valid index as well.
    return tl.minimum(positions, LEVELS - 1)
