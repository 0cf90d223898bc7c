"""The passes over blocks of codes: each number is read, or written, once.

Numbers read twice, first for the scale and then for the codes, are in a core's L1 cache. Addresses are in
bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.code_vectors import (
    WIDE,
    add_products,
    add_rounded,
    fitting,
    inside,
    larger,
    largest,
    load_half,
    magnitudes,
    read,
    read_tile,
    store_half,
    subtract_levels,
    write,
)
from thinwire.kernels.numba.compiler import compiled, inlined
from thinwire.kernels.numba.vectors import (
    WIDTH,
    first_lanes,
    load,
    load_tile,
    splat,
    spread,
    store,
    store_tile,
    total,
)
from thinwire.tensors.coded import SCALE_BYTES

Counts: TypeAlias = NDArray[np.int64]

TOGETHER = 1024
"""Elements of blocks whose scales are all computed before any code: they stay in a core's L1 cache."""

FLOAT_BYTES = 4
TINY = np.float32(2.0**-126)
# Squares of numbers in between, and their sums, stay within fp32.
SAFE_FROM, SAFE_TO = np.float32(1e-15), np.float32(1e15)
INFINITE, NOT_A_NUMBER = 0x7F80, 0x7FC0  # in bf16
SMALLEST = 0x0080  # the reciprocal of a smaller number is not finite


class Layout(NamedTuple):
    """How blocks are coded."""

    block: int  # elements per block
    bits: int  # per code
    last: float  # the highest level
    reach: tuple[float, float]  # as in `Codebook`
    share: int  # blocks per row of a message: first their scales, then their codes


@inlined
def _runs(numels: Counts, layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return runs of blocks that are contiguous both in the numbers and in a row of a message.

    For each run: its first number, its count of numbers, and its first block's row and index in the row.
    """
    # Not a generator: Numba never frees a generator's arguments, so each call would leak an array.
    runs = []
    first, row, place = 0, 0, 0
    for numel in numels:
        end = first + numel
        while first < end:
            length = min((layout.share - place) * layout.block, end - first)
            runs.append((first, length, row, place))
            first += length
            place += -(-length // layout.block)
            if place == layout.share:
                row, place = row + 1, 0
    return runs


@inlined
def _codes_at(scales: int, place: int, layout: Layout) -> int:
    """Return the offset of a block's codes from its scale."""
    return scales + SCALE_BYTES * (layout.share - place) + layout.block * layout.bits // 8 * place


@compiled
def encode(flat: int, message: int, row_bytes: int, numels: Counts, layout: Layout) -> None:
    """Write codes and scales of all blocks."""
    for first, length, row, place in _runs(numels, layout):
        scales = message + row * row_bytes + SCALE_BYTES * place
        _encode(flat + FLOAT_BYTES * first, length, _codes_at(scales, place, layout), scales, layout)


@compiled
def average(
    received: int,
    row_bytes: int,
    members: int,
    own: int,
    room: int,
    keeps_lost: bool,
    message: int,
    numels: Counts,
    layout: Layout,
) -> None:
    """Write codes and scales of the mean of what members have sent of the blocks of one row, number `own`."""
    block, factors = layout.block, np.empty(members, np.float32)
    together = max(1, TOGETHER // block) * block
    for _, length, row, place in _runs(numels, layout):
        if row == own:
            for start in range(0, length, together):
                here = place + start // block
                scales = SCALE_BYTES * here
                codes, some = _codes_at(scales, here, layout), min(together, length - start)
                whole = -(-some // block) * block
                _add_up(received + codes, received + scales, row_bytes, factors, whole, room, layout)
                _encode(room, some, message + codes, message + scales, layout)
                # Unless losses are kept, the buffer is reused, and stays in the L1 cache.
                if keeps_lost:
                    _restore(room, message + codes, message + scales, whole, room, layout, True)
                    room += FLOAT_BYTES * whole


@inlined
def _add_up(
    codes: int,
    scales: int,
    row_bytes: int,
    factors: NDArray[np.float32],
    length: int,
    room: int,
    layout: Layout,
) -> None:
    """Write the mean of what members have sent of some whole blocks."""
    bits, part, everywhere = layout.bits, np.float32(1) / np.float32(len(factors)), first_lanes(WIDTH)
    wide = layout.block - layout.block % WIDE
    for begin in range(0, length, layout.block):
        # Divide scales by the number of members, not sums: once per block, not once per number.
        for member in range(len(factors)):
            factors[member] = _number(load_half(scales + member * row_bytes)) * part
        for start in range(0, wide, WIDE):
            at = codes + start * bits // 8
            means = spread(splat(factors[0])) * read_tile(bits, at)
            for member in range(1, len(factors)):
                factor = spread(splat(factors[member]))
                means = add_rounded(means, factor * read_tile(bits, at + member * row_bytes))
            store_tile(room + FLOAT_BYTES * (begin + start), means)
        for start in range(wide, layout.block, WIDTH):
            sums = splat(np.float32(0))
            for member in range(len(factors)):
                levels = read(bits, codes + member * row_bytes + start * bits // 8)
                sums = sums + splat(factors[member]) * levels
            store(room + FLOAT_BYTES * (begin + start), sums, everywhere)
        codes, scales = codes + layout.block * bits // 8, scales + SCALE_BYTES


@compiled
def decode(flat: int, message: int, row_bytes: int, numels: Counts, layout: Layout) -> None:
    """Decode all blocks."""
    for first, length, row, place in _runs(numels, layout):
        scales, at = message + row * row_bytes + SCALE_BYTES * place, flat + FLOAT_BYTES * first
        _restore(at, _codes_at(scales, place, layout), scales, length, at, layout, False)


@compiled
def decode_two(
    flat: int, one: int, one_bytes: int, other: int, other_bytes: int, numels: Counts, layout: Layout
) -> None:
    """Decode the mean of all blocks of two messages; `one_bytes` and `other_bytes` are those of a row."""
    for first, length, row, place in _runs(numels, layout):
        at = SCALE_BYTES * place
        _restore_mean(
            one + row * one_bytes + at,
            other + row * other_bytes + at,
            _codes_at(0, place, layout),
            length,
            flat + FLOAT_BYTES * first,
            layout,
        )


@compiled
def subtract(flat: int, message: int, row_bytes: int, rest: int, numels: Counts, layout: Layout) -> None:
    """Write numbers minus what all blocks have sent of them."""
    for first, length, row, place in _runs(numels, layout):
        scales, at = message + row * row_bytes + SCALE_BYTES * place, FLOAT_BYTES * first
        _restore(flat + at, _codes_at(scales, place, layout), scales, length, rest + at, layout, True)


@inlined
def _encode(numbers: int, length: int, codes: int, scales: int, layout: Layout) -> None:
    """Write codes and scales of the blocks of some numbers; the last block may be short."""
    block, bits = layout.block, layout.bits
    is_fitted = bits < 4
    together = max(1, TOGETHER // block) * block
    for begin in range(0, length, together):
        end, at = min(begin + together, length), scales
        # All scales before the first code: a scale takes two consecutive divisions. The codes of its block
        # would have to wait for them; the scale of the next block does not.
        for start in range(begin, end, block):
            store_half(at, _scale(numbers + FLOAT_BYTES * start, min(block, end - start), layout))
            at += SCALE_BYTES
        for start in range(begin, end, block):
            number = _widened(load_half(scales))
            factor = np.float32(1) / number if number > 0 else np.float32(0)
            filled, here = min(block, end - start), numbers + FLOAT_BYTES * start
            wide, products, squares = filled - filled % WIDE, splat(np.float32(0)), splat(np.float32(0))
            for first in range(0, wide, WIDE):
                tile = spread(splat(factor)) * load_tile(here + FLOAT_BYTES * first)
                write(bits, codes + first * bits // 8, tile)
                if is_fitted:
                    sizes = magnitudes(tile)
                    levels = fitting(bits, sizes)
                    products = add_products(products, sizes, levels)
                    squares = add_products(squares, levels, levels)
            # To the block's end: the codes after a short block are sent too, and must not be uninitialised
            # memory.
            for first in range(wide, block, WIDTH):
                mask = first_lanes(max(0, min(WIDTH, filled - first)))
                units = splat(factor) * load(here + FLOAT_BYTES * first, mask)
                write(bits, codes + first * bits // 8, units)
                if is_fitted:
                    some = magnitudes(units)
                    nearest = inside(fitting(bits, some), mask)
                    products, squares = products + some * nearest, squares + nearest * nearest
            if is_fitted:
                # In fp64, which does not overflow in whatever order LLVM multiplies and divides.
                fitted = np.float64(number) * total(products) / total(squares)
                store_half(scales, _rounded(np.float32(fitted), False))
            codes, scales = codes + block * bits // 8, scales + SCALE_BYTES


@inlined
def _restore(
    numbers: int, codes: int, scales: int, length: int, out: int, layout: Layout, subtracts: bool
) -> None:
    """Decode blocks or, if `subtracts`, write numbers minus the decoded blocks."""
    block, bits = layout.block, layout.bits
    for start in range(0, length, block):
        factor, filled = _number(load_half(scales)), min(block, length - start)
        wide = filled - filled % WIDE
        for first in range(0, wide, WIDE):
            at, here = FLOAT_BYTES * (start + first), codes + first * bits // 8
            if subtracts:
                store_tile(out + at, subtract_levels(bits, here, factor, load_tile(numbers + at)))
            else:
                # One product, rounded once: decoding must give the same bits with every backend.
                store_tile(out + at, spread(splat(factor)) * read_tile(bits, here))
        for first in range(wide, filled, WIDTH):
            at, mask = FLOAT_BYTES * (start + first), first_lanes(min(WIDTH, filled - first))
            some = splat(factor) * read(bits, codes + first * bits // 8)
            store(out + at, load(numbers + at, mask) - some if subtracts else some, mask)
        codes, scales = codes + block * bits // 8, scales + SCALE_BYTES


@inlined
def _restore_mean(one: int, other: int, codes: int, length: int, out: int, layout: Layout) -> None:
    """Decode the mean of blocks whose scales are at `one` and `other`, and codes `codes` bytes further."""
    bits, half = layout.bits, np.float32(0.5)
    for start in range(0, length, layout.block):
        factor, second = _number(load_half(one)) * half, _number(load_half(other)) * half
        filled = min(layout.block, length - start)
        wide = filled - filled % WIDE
        for begin in range(0, wide, WIDE):
            at = codes + begin * bits // 8
            # Each is rounded once: decoding must give the same bits with every backend.
            mean = spread(splat(factor)) * read_tile(bits, one + at)
            mean = add_rounded(mean, spread(splat(second)) * read_tile(bits, other + at))
            store_tile(out + FLOAT_BYTES * (start + begin), mean)
        for begin in range(wide, filled, WIDTH):
            at = codes + begin * bits // 8
            part = splat(factor) * read(bits, one + at)
            part = add_rounded(part, splat(second) * read(bits, other + at))
            store(out + FLOAT_BYTES * (start + begin), part, first_lanes(min(WIDTH, filled - begin)))
        one, other = one + SCALE_BYTES, other + SCALE_BYTES
        codes += layout.block * bits // 8 - SCALE_BYTES


@inlined
def _scale(numbers: int, length: int, layout: Layout) -> int:
    """Return the bits of a block's scale in bf16, before it is fitted to codes."""
    # In one pass with the largest, if squares stay in range.
    one, bits = np.float32(1), layout.bits
    wide = length - length % WIDE
    most_of, sums = splat(np.float32(0)), splat(np.float32(0))
    for first in range(0, wide, WIDE):
        tile = load_tile(numbers + FLOAT_BYTES * first)
        most_of = larger(most_of, tile)
        if bits < 4:
            sums = add_products(sums, tile, tile)
    for first in range(wide, length, WIDTH):
        part = load(numbers + FLOAT_BYTES * first, first_lanes(min(WIDTH, length - first)))
        most_of = larger(most_of, part)
        sums = sums + part * part
    most = largest(most_of)
    if bits >= 4:
        return _rounded(most / np.float32(layout.last), True)
    # Outside of the safe range, a second pass sums values relative to the largest.
    unit = one
    if not SAFE_FROM < most < SAFE_TO:
        unit = most
        inverse = np.float32(0) if most < TINY else one / most
        sums = splat(np.float32(0))
        for first in range(0, length, WIDTH):
            mask = first_lanes(min(WIDTH, length - first))
            part = splat(inverse) * load(numbers + FLOAT_BYTES * first, mask)
            sums = sums + part * part
    root = unit * np.float32(math.sqrt(total(sums) / np.float32(length)))
    low, high = most / np.float32(layout.reach[1]), most / np.float32(layout.reach[0])
    # Not `min` and `max`, which might ignore NaN.
    return _rounded(low if root < low else high if root > high else root, False)


@inlined
def _rounded(number: float, upwards: bool) -> int:
    """Return the bf16 bits of a nonnegative number."""
    bits = np.int64(np.float32(number).view(np.int32))
    if bits >= INFINITE << 16:
        return INFINITE if bits == INFINITE << 16 else NOT_A_NUMBER
    # Half to even, as torch rounds; upwards if a block's largest must not be clipped.
    rounded = (bits + 0xFFFF) >> 16 if upwards else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded if rounded >= SMALLEST else 0


@inlined
def _number(scale: int) -> float:
    """Return the scale with some bf16 bits; NaN if it is not finite."""
    # Otherwise an infinite scale might become the largest number of the gradient's dtype.
    return _widened(NOT_A_NUMBER if scale >= INFINITE else np.int64(scale))


@inlined
def _widened(scale: int) -> float:
    number: float = np.int32(scale << 16).view(np.float32)
    return number
