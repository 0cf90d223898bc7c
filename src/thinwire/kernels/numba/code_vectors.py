"""Numbers to packed codes and back, sixteen or sixty-four at a time, as operations of compiled code.

LLVM would compare and pack numbers one by one, so these functions emit vectors explicitly. Eight codes, a
byte each, are one 64-bit integer, in which they are shifted together in three steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from llvmlite import ir
from numba import types

from thinwire.kernels.numba.vectors import (
    FLOAT,
    INT32,
    NUMBERS,
    WIDTH,
    at,
    call,
    mask_of_lanes,
    operation,
    repeated,
    shuffled,
    tile,
    vector,
)
from thinwire.tensors.coded import CODEBOOKS, merges

WIDE = 4 * WIDTH
"""A tile's numbers: a block of the usual length, and four of the longest registers there are."""

INT8, INT16, INT64, WORDS = ir.IntType(8), ir.IntType(16), ir.IntType(64), ir.VectorType(INT32, WIDTH)
WITHOUT_SIGN = 0x7FFFFFFF
FITTED = [bits for bits, codebook in CODEBOOKS.items() if codebook.statistic == "least squares"]
ROUNDING = 1.5 * 2.0**23
"""An fp32 number near which all numbers are integers; its last byte is zero."""


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _like(numbers: Any, element: Any) -> Any:
    """Return the vector type with the same number of elements."""
    return ir.VectorType(element, numbers.type.count)


@operation(types.int64(types.int64))
def load_half(builder: Any, address: Any) -> Any:
    """Emit the load of the sixteen bits at an address."""
    return builder.zext(builder.load(at(builder, address, INT16), align=2), INT64)


@operation(types.void(types.int64, types.int64))
def store_half(builder: Any, address: Any, bits: Any) -> None:
    """Emit the store of sixteen bits."""
    builder.store(builder.trunc(bits, INT16), at(builder, address, INT16), align=2)


@operation(vector(vector), of_tiles=tile(tile))
def magnitudes(builder: Any, numbers: Any) -> Any:
    """Emit the magnitudes of numbers."""
    return builder.bitcast(_without_sign(builder, numbers), numbers.type)


@operation(vector(vector, vector), of_tiles=vector(vector, tile))
def larger(builder: Any, so_far: Any, numbers: Any) -> Any:
    """Emit the larger of magnitudes, element by element; NaN is larger than all."""
    # Compare the bits as integers: without signs, a larger number has larger bits, and NaN the largest. A
    # comparison of floats would ignore NaN.
    bits, words = builder.bitcast(so_far, WORDS), _without_sign(builder, numbers)
    for start in range(0, words.type.count, WIDTH):
        part = shuffled(builder, words, words, range(start, start + WIDTH))
        bits = call(builder, "smax.v16i32", WORDS, bits, part)
    return builder.bitcast(bits, NUMBERS)


@operation(types.float32(vector))
def largest(builder: Any, numbers: Any) -> Any:
    """Emit the largest of sixteen magnitudes; NaN is larger than all."""
    bits = builder.bitcast(numbers, WORDS)
    return builder.bitcast(call(builder, "vector.reduce.smax.v16i32", INT32, bits), FLOAT)


def _without_sign(builder: Any, numbers: Any) -> Any:
    words = _like(numbers, INT32)
    return builder.and_(builder.bitcast(numbers, words), _all(words, WITHOUT_SIGN))


@operation(vector(vector, vector), of_tiles=tile(tile, tile))
def add_rounded(builder: Any, sums: Any, products: Any) -> Any:
    """Emit sums plus products that are rounded before they are added, as in PyTorch."""
    # Without any flag Numba would add its own.
    return builder.fadd(sums, products, flags=("nsz",))


@operation(vector(vector, tile, tile))
def add_products(builder: Any, sums: Any, one: Any, other: Any) -> Any:
    """Emit sums, each plus four products."""
    products = builder.fmul(one, other, flags=("contract",))
    for start in range(0, WIDE, WIDTH):
        part = shuffled(builder, products, products, range(start, start + WIDTH))
        sums = builder.fadd(sums, part, flags=("contract",))
    return sums


@operation(vector(vector, mask_of_lanes))
def inside(builder: Any, numbers: Any, mask: Any) -> Any:
    """Emit the numbers inside a mask, and zeros elsewhere."""
    return builder.select(mask, numbers, _all(NUMBERS, 0.0))


def _by_bits(builder: Any, bits: Any, emit: Callable[[int], Any], some: Iterable[int] = CODEBOOKS) -> Any:
    """Emit the code for each number of bits, and the choice between them."""
    # The bits do not change in a pass: LLVM moves the choice out of its loops.
    blocks = {num_bits: builder.append_basic_block(f"bits_{num_bits}") for num_bits in some}
    chosen, usual, found = builder.append_basic_block("chosen"), min(blocks), []
    choice = builder.switch(bits, blocks[usual])
    for num_bits, block in blocks.items():
        if num_bits != usual:
            choice.add_case(INT64(num_bits), block)
        builder.position_at_end(block)
        found.append((emit(num_bits), builder.block))
        builder.branch(chosen)
    builder.position_at_end(chosen)
    if found[0][0] is None:
        return None
    result = builder.phi(found[0][0].type)
    for value, block in found:
        result.add_incoming(value, block)
    return result


@operation(types.void(types.int64, types.int64, vector), of_tiles=types.void(types.int64, types.int64, tile))
def write(builder: Any, bits: Any, address: Any, units: Any) -> None:
    """Emit the store of the codes of numbers, in units of their scale."""
    _by_bits(builder, bits, lambda num_bits: _write(builder, num_bits, address, units))


@operation(vector(types.int64, vector), of_tiles=tile(types.int64, tile))
def fitting(builder: Any, bits: Any, units: Any) -> Any:
    """Emit the levels nearest to magnitudes, if the scale is found by least squares."""
    return _by_bits(builder, bits, lambda num_bits: _nearest(builder, num_bits, units), FITTED)


@operation(vector(types.int64, types.int64))
def read(builder: Any, bits: Any, address: Any) -> Any:
    """Emit the load of sixteen levels."""
    return _by_bits(builder, bits, lambda num_bits: _read(builder, num_bits, address, WIDTH))


@operation(tile(types.int64, types.int64))
def read_tile(builder: Any, bits: Any, address: Any) -> Any:
    """Emit the load of sixty-four levels."""
    return _by_bits(builder, bits, lambda num_bits: _read(builder, num_bits, address, WIDE))


@operation(tile(types.int64, types.int64, types.float32, tile))
def subtract_levels(builder: Any, bits: Any, address: Any, factor: Any, numbers: Any) -> Any:
    """Emit numbers minus sixty-four levels times a factor."""

    def emit(num_bits: int) -> Any:
        levels, factors = _read(builder, num_bits, address, WIDE), repeated(builder, factor, WIDE)
        product = builder.fmul(levels, factors, flags=("contract",))
        return builder.fsub(numbers, product, flags=("contract",))

    return _by_bits(builder, bits, emit)


def _write(builder: Any, bits: int, address: Any, units: Any) -> None:
    """Emit the store of the codes of numbers, in units of their scale."""
    # One bit is the comparison itself: store the mask as it is. Packed codes do not start at a multiple
    # of a vector, hence the alignment.
    if bits == 1:
        is_positive = builder.fcmp_ordered(">", units, _all(units.type, 0.0))
        together = ir.IntType(units.type.count)
        builder.store(builder.bitcast(is_positive, together), at(builder, address, together), align=1)
        return
    codes = builder.trunc(_places(builder, bits, units), _like(units, INT8))
    if bits == 8:
        builder.store(codes, at(builder, address, codes.type), align=1)
        return
    eights = builder.bitcast(codes, ir.VectorType(INT64, codes.type.count // 8))
    for shift, lower, upper in merges(bits):
        shifted = builder.and_(builder.lshr(eights, _all(eights.type, shift)), _all(eights.type, upper))
        eights = builder.or_(builder.and_(eights, _all(eights.type, lower)), shifted)
    # The lowest bytes of each 64-bit integer, as many as a code has bits, concatenated.
    count = eights.type.count
    kept = [8 * place + byte for place in range(count) for byte in range(bits)]
    eights = builder.bitcast(eights, ir.VectorType(INT8, 8 * count))
    packed = shuffled(builder, eights, eights, kept)
    builder.store(packed, at(builder, address, packed.type), align=1)


def _places(builder: Any, bits: int, units: Any) -> Any:
    """Emit the index of the level nearest to each number."""
    codebook = CODEBOOKS[bits]
    levels, words = codebook.levels, _like(units, INT32)
    if codebook.is_linear:
        # If a number is not finite, its scale shows it, but it needs a valid code: NaN is not below.
        last = _all(units.type, levels[-1])
        finite = builder.select(builder.fcmp_ordered("<", units, last), units, last)
        # The sum is rounded to an integer, half to even, in its last bits: faster than a conversion.
        whole = builder.fadd(finite, _all(units.type, ROUNDING))
        return builder.add(builder.bitcast(whole, words), _all(words, int(levels[-1])))
    # Compare magnitudes, then signs: half the comparisons.
    upper = [level for level in levels if level >= 0]
    size = builder.bitcast(_without_sign(builder, units), units.type)
    place = _all(words, 0)
    for low, high in pairwise(upper):
        is_above = builder.fcmp_ordered(">", size, _all(units.type, (low + high) / 2))
        place = builder.sub(place, builder.sext(is_above, words))
    is_negative = builder.fcmp_ordered("<=", units, _all(units.type, 0.0))
    below = builder.sub(_all(words, len(upper) - 1), place)
    above = builder.add(_all(words, len(levels) - len(upper)), place)
    return builder.select(is_negative, below, above)


def _nearest(builder: Any, bits: int, units: Any) -> Any:
    """Emit the levels that `_places` finds, for magnitudes."""
    upper = [level for level in CODEBOOKS[bits].levels if level > 0]
    nearest = _all(units.type, upper[0])
    for low, high in pairwise(upper):
        is_above = builder.fcmp_ordered(">", units, _all(units.type, (low + high) / 2))
        nearest = builder.select(is_above, _all(units.type, high), nearest)
    return nearest


def _read(builder: Any, bits: int, address: Any, num_lanes: int) -> Any:
    """Emit the levels of packed codes."""
    levels = CODEBOOKS[bits].levels
    if bits == 1:
        together, numbers = ir.IntType(num_lanes), ir.VectorType(FLOAT, num_lanes)
        loaded = builder.load(at(builder, address, together), align=1)
        is_positive = builder.bitcast(loaded, ir.VectorType(ir.IntType(1), num_lanes))
        return builder.select(is_positive, _all(numbers, levels[1]), _all(numbers, levels[0]))
    codes_type = ir.VectorType(INT8, num_lanes)
    if bits == 8:
        codes = builder.load(at(builder, address, codes_type), align=1)
    else:
        count = num_lanes // 8
        packed = builder.load(at(builder, address, ir.VectorType(INT8, bits * count)), align=1)
        # Eight bytes for each eight codes; bytes beyond the packed ones are zeros.
        positions = [
            bits * place + byte if byte < bits else bits * count
            for place in range(count)
            for byte in range(8)
        ]
        eights = builder.bitcast(
            shuffled(builder, packed, _all(packed.type, 0), positions), ir.VectorType(INT64, count)
        )
        for shift, lower, upper in reversed(merges(bits)):
            above = builder.and_(eights, _all(eights.type, upper))
            shifted = builder.shl(above, _all(eights.type, shift))
            eights = builder.or_(builder.and_(eights, _all(eights.type, lower)), shifted)
        codes = builder.bitcast(eights, codes_type)
    return _levels(builder, bits, builder.zext(codes, ir.VectorType(INT32, num_lanes)))


def _levels(builder: Any, bits: int, positions: Any) -> Any:
    """Emit the levels at some positions."""
    codebook, numbers = CODEBOOKS[bits], _like(positions, FLOAT)
    levels = codebook.levels
    if codebook.is_linear or codebook.cubic:
        middle = _all(positions.type, len(levels) // 2)
        signed = builder.sitofp(builder.sub(positions, middle), numbers)
        if not codebook.cubic:
            return signed
        # All are integers: nothing is rounded.
        square = builder.fmul(signed, signed)
        return builder.fmul(signed, builder.fadd(square, _all(numbers, codebook.cubic)))
    # At most eight levels: select them one after the other, without a table in memory.
    chosen = _all(numbers, levels[0])
    for place, level in enumerate(levels[1:], 1):
        is_there = builder.icmp_unsigned(">=", positions, _all(positions.type, place))
        chosen = builder.select(is_there, _all(numbers, level), chosen)
    return chosen
