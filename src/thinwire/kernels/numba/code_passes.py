"""The passes over blocks of codes: each number is read, or written, once.

What is read again, for the scale first and then for the codes, lies in a core's first cache. Addresses are in
bytes.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.code_vectors import (
    ADD_WIDE,
    READ,
    READ_WIDE,
    SUBTRACT_WIDE,
    WIDE,
    WRITE,
    WRITE_WIDE,
    add_magnitudes,
    add_squares,
    bits_of,
    float_of,
    larger,
    larger_wide,
    largest,
    load_half,
    magnitudes,
    store_half,
)
from thinwire.kernels.numba.compiler import compiled, inlined
from thinwire.kernels.numba.vectors import (
    LANES,
    Vector,
    first_lanes,
    load,
    splat,
    store,
    total,
)
from thinwire.tensors.coded import SCALE_BYTES

Counts: TypeAlias = NDArray[np.int64]

TOGETHER = 1024
"""Elements of blocks of which all scales are found before any code: they stay in a core's first cache."""

# Each by a name of its own: compiled code sees globals, but no entries of a dictionary.
write_8, write_4, write_3, write_2, write_1 = (WRITE[bits] for bits in (8, 4, 3, 2, 1))
read_8, read_4, read_3, read_2, read_1 = (READ[bits] for bits in (8, 4, 3, 2, 1))

write_wide_8, write_wide_4, write_wide_3, write_wide_2, write_wide_1 = (
    WRITE_WIDE[bits] for bits in (8, 4, 3, 2, 1)
)
read_wide_8, read_wide_4, read_wide_3, read_wide_2, read_wide_1 = (
    READ_WIDE[bits] for bits in (8, 4, 3, 2, 1)
)
add_wide_8, add_wide_4, add_wide_3, add_wide_2, add_wide_1 = (ADD_WIDE[bits] for bits in (8, 4, 3, 2, 1))
subtract_wide_8, subtract_wide_4, subtract_wide_3, subtract_wide_2, subtract_wide_1 = (
    SUBTRACT_WIDE[bits] for bits in (8, 4, 3, 2, 1)
)

FLOAT_BYTES = 4
TINY = np.float32(2.0**-126)
# Of numbers in between, squares and their sums stay within fp32.
SAFE_FROM, SAFE_TO = np.float32(1e-15), np.float32(1e15)
INFINITE, NOT_A_NUMBER = 0x7F80, 0x7FC0  # in bf16
SMALLEST = 0x0080  # one over what is smaller is not finite


@compiled
def encode(
    flat: int, numels: Counts, block: int, bits: int, last: float, message: int, row_bytes: int, share: int
) -> None:
    """Write codes and scales of all blocks."""
    size = block * bits // 8
    scales, codes, left = message, message + SCALE_BYTES * share, share
    most = max(1, TOGETHER // block)
    for numel in numels:
        start = 0
        while start < numel:
            some = min(most, left)
            length = min(some * block, numel - start)
            _encode(flat + FLOAT_BYTES * start, length, block, bits, last, codes, scales)
            some = -(-length // block)
            start, left = start + length, left - some
            scales, codes = scales + SCALE_BYTES * some, codes + size * some
            if not left:
                message, left = message + row_bytes, share
                scales, codes = message, message + SCALE_BYTES * share
        flat += FLOAT_BYTES * numel


@compiled
def average(
    received: int,
    row_bytes: int,
    members: int,
    numels: Counts,
    first: int,
    stop: int,
    block: int,
    bits: int,
    last: float,
    room: int,
    keeps_lost: bool,
    message: int,
    share: int,
) -> None:
    """Write codes and scales of the mean of what members have sent of some blocks."""
    size = block * bits // 8
    part = np.float32(1) / np.float32(members)
    everywhere = first_lanes(LANES)
    factors = np.empty(members, np.float32)
    wide = block - block % WIDE
    scales, codes = 0, SCALE_BYTES * share  # within a row
    most = max(1, TOGETHER // block)
    begin = 0
    for numel in numels:
        end = begin + -(-numel // block)
        place = max(begin, first)
        while place < min(end, stop):
            some = min(most, min(end, stop) - place)
            for each in range(some):
                # Scales are divided by the members, and not sums: once for a block, and not for each number.
                for member in range(members):
                    scale = load_half(received + member * row_bytes + scales + SCALE_BYTES * each)
                    factors[member] = _number(scale) * part
                at, here = received + codes + each * size, room + FLOAT_BYTES * block * each
                for start in range(0, wide, WIDE):
                    # The first member's are written and the others' added: the room need not be cleared.
                    _read_wide(bits, at + start * bits // 8, factors[0], here + FLOAT_BYTES * start)
                    for member in range(1, members):
                        there = at + member * row_bytes + start * bits // 8
                        _add_wide(bits, there, factors[member], here + FLOAT_BYTES * start)
                for start in range(wide, block, LANES):
                    sums = splat(np.float32(0))
                    for member in range(members):
                        there = at + member * row_bytes + start * bits // 8
                        sums = sums + splat(factors[member]) * _read(bits, there)
                    store(here + FLOAT_BYTES * start, sums, everywhere)
            length = min(some * block, numel - (place - begin) * block)
            _encode(room, length, block, bits, last, message + codes, message + scales)
            # Else the room is used again and again, and stays in the first cache.
            if keeps_lost:
                _subtract(room, message + codes, message + scales, some * block, block, bits, room)
                room += FLOAT_BYTES * block * some
            place, scales, codes = place + some, scales + SCALE_BYTES * some, codes + size * some
        begin = end


@compiled
def decode(
    message: int, row_bytes: int, share: int, numels: Counts, block: int, bits: int, flat: int
) -> None:
    """Write the numbers that all blocks stand for."""
    size = block * bits // 8
    scales, codes, left = message, message + SCALE_BYTES * share, share
    for numel in numels:
        for start in range(0, numel, block):
            factor, at = _number(load_half(scales)), flat + FLOAT_BYTES * start
            length = min(block, numel - start)
            wide = length - length % WIDE
            for first in range(0, wide, WIDE):
                _read_wide(bits, codes + first * bits // 8, factor, at + FLOAT_BYTES * first)
            for first in range(wide, length, LANES):
                levels = _read(bits, codes + first * bits // 8)
                lanes = first_lanes(min(LANES, length - first))
                store(at + FLOAT_BYTES * first, splat(factor) * levels, lanes)
            scales, codes, left = scales + SCALE_BYTES, codes + size, left - 1
            if not left:
                message, left = message + row_bytes, share
                scales, codes = message, message + SCALE_BYTES * share
        flat += FLOAT_BYTES * numel


@compiled
def subtract(
    flat: int, message: int, row_bytes: int, share: int, numels: Counts, block: int, bits: int, rest: int
) -> None:
    """Write what all blocks have not sent of some numbers."""
    size = block * bits // 8
    scales, codes, left = message, message + SCALE_BYTES * share, share
    for numel in numels:
        start = 0
        while start < numel:
            length, at = min(left * block, numel - start), FLOAT_BYTES * start
            _subtract(flat + at, codes, scales, length, block, bits, rest + at)
            some = -(-length // block)
            start, left = start + length, left - some
            scales, codes = scales + SCALE_BYTES * some, codes + size * some
            if not left:
                message, left = message + row_bytes, share
                scales, codes = message, message + SCALE_BYTES * share
        flat += FLOAT_BYTES * numel
        rest += FLOAT_BYTES * numel


@inlined
def _encode(numbers: int, length: int, block: int, bits: int, last: float, codes: int, scales: int) -> None:
    """Write codes and scales of the blocks of some numbers, of which the last may be short."""
    # All scales before the first code: each takes two divisions one after the other, for which the codes of
    # its own block would have to wait, but not the scale of the next one.
    for start in range(0, length, block):
        scale = _scale(numbers + FLOAT_BYTES * start, min(block, length - start), bits, last)
        store_half(scales + start // block * SCALE_BYTES, scale)
    for start in range(0, length, block):
        number = float_of(load_half(scales) << 16)
        factor = np.float32(1) / number if number > 0 else np.float32(0)
        filled = min(block, length - start)
        wide = filled - filled % WIDE
        for first in range(0, wide, WIDE):
            _write_wide(bits, codes + first * bits // 8, numbers + FLOAT_BYTES * first, factor)
        # To the block's end: the codes behind a short one travel too, and must not be what memory happened
        # to hold.
        for first in range(wide, block, LANES):
            lanes = first_lanes(max(0, min(LANES, filled - first)))
            units = splat(factor) * load(numbers + FLOAT_BYTES * first, lanes)
            _write(bits, codes + first * bits // 8, units)
        numbers, codes, scales = (
            numbers + FLOAT_BYTES * block,
            codes + block * bits // 8,
            scales + SCALE_BYTES,
        )


@inlined
def _subtract(numbers: int, codes: int, scales: int, length: int, block: int, bits: int, rest: int) -> None:
    """Write what the blocks of some numbers have not sent of them."""
    for start in range(0, length, block):
        factor, filled = _number(load_half(scales)), min(block, length - start)
        wide = filled - filled % WIDE
        for first in range(0, wide, WIDE):
            at = FLOAT_BYTES * (start + first)
            _subtract_wide(bits, codes + first * bits // 8, factor, numbers + at, rest + at)
        for first in range(wide, filled, LANES):
            at, lanes = FLOAT_BYTES * (start + first), first_lanes(min(LANES, filled - first))
            levels = _read(bits, codes + first * bits // 8)
            store(rest + at, load(numbers + at, lanes) - splat(factor) * levels, lanes)
        codes, scales = codes + block * bits // 8, scales + SCALE_BYTES


@inlined
def _scale(numbers: int, length: int, bits: int, last: float) -> int:
    """Return the bits of a block's scale in bf16."""
    # At once with the largest, where squares do not leave the range.
    one = np.float32(1)
    wide = length - length % WIDE
    most_of, sums = splat(np.float32(0)), splat(np.float32(0))
    for first in range(0, wide, WIDE):
        at = numbers + FLOAT_BYTES * first
        most_of = larger_wide(most_of, at)
        if bits < 4:
            sums = add_magnitudes(sums, at, one) if bits == 1 else add_squares(sums, at, one)
    for first in range(wide, length, LANES):
        part = load(numbers + FLOAT_BYTES * first, first_lanes(min(LANES, length - first)))
        most_of = larger(most_of, part)
        sums = sums + (magnitudes(part) if bits == 1 else part * part)
    most = largest(most_of)
    if bits >= 4:
        return _rounded(most / np.float32(last), True)
    # Else in a second pass, of shares of the largest.
    unit = one
    if not SAFE_FROM < most < SAFE_TO:
        unit = most
        inverse = np.float32(0) if most < TINY else one / most
        sums = splat(np.float32(0))
        for first in range(0, length, LANES):
            lanes = first_lanes(min(LANES, length - first))
            part = splat(inverse) * load(numbers + FLOAT_BYTES * first, lanes)
            sums = sums + (magnitudes(part) if bits == 1 else part * part)
    mean = total(sums) / np.float32(length)
    return _rounded(unit * (mean if bits == 1 else np.float32(math.sqrt(mean))), False)


@inlined
def _rounded(number: float, upwards: bool) -> int:
    """Return the bits in bf16 of a number that is not negative."""
    bits = bits_of(number)
    if bits >= INFINITE << 16:
        return INFINITE if bits == INFINITE << 16 else NOT_A_NUMBER
    # Half to even, as torch rounds; upwards where the largest of a block must not be cut off.
    rounded = (bits + 0xFFFF) >> 16 if upwards else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded if rounded >= SMALLEST else 0


@inlined
def _number(scale: int) -> float:
    """Return the scale of some bits in bf16; NaN if it is not finite."""
    # Or what is infinite might end as the largest number of the gradient's type.
    number: float = float_of((NOT_A_NUMBER if scale >= INFINITE else np.int64(scale)) << 16)
    return number


# Compiled code can't choose an operation from a dictionary, so it asks; 4 bits first, the usual ones.


@inlined
def _write(bits: int, address: int, units: Vector) -> None:
    if bits == 4:
        write_4(address, units)
    elif bits == 2:
        write_2(address, units)
    elif bits == 8:
        write_8(address, units)
    elif bits == 3:
        write_3(address, units)
    else:
        write_1(address, units)


@inlined
def _read(bits: int, address: int) -> Vector:
    if bits == 4:
        return read_4(address)
    if bits == 2:
        return read_2(address)
    if bits == 8:
        return read_8(address)
    if bits == 3:
        return read_3(address)
    return read_1(address)


@inlined
def _write_wide(bits: int, address: int, numbers: int, factor: float) -> None:
    if bits == 4:
        write_wide_4(address, numbers, factor)
    elif bits == 2:
        write_wide_2(address, numbers, factor)
    elif bits == 8:
        write_wide_8(address, numbers, factor)
    elif bits == 3:
        write_wide_3(address, numbers, factor)
    else:
        write_wide_1(address, numbers, factor)


@inlined
def _read_wide(bits: int, address: int, factor: float, numbers: int) -> None:
    if bits == 4:
        read_wide_4(address, factor, numbers)
    elif bits == 2:
        read_wide_2(address, factor, numbers)
    elif bits == 8:
        read_wide_8(address, factor, numbers)
    elif bits == 3:
        read_wide_3(address, factor, numbers)
    else:
        read_wide_1(address, factor, numbers)


@inlined
def _add_wide(bits: int, address: int, factor: float, numbers: int) -> None:
    if bits == 4:
        add_wide_4(address, factor, numbers)
    elif bits == 2:
        add_wide_2(address, factor, numbers)
    elif bits == 8:
        add_wide_8(address, factor, numbers)
    elif bits == 3:
        add_wide_3(address, factor, numbers)
    else:
        add_wide_1(address, factor, numbers)


@inlined
def _subtract_wide(bits: int, address: int, factor: float, numbers: int, rest: int) -> None:
    if bits == 4:
        subtract_wide_4(address, factor, numbers, rest)
    elif bits == 2:
        subtract_wide_2(address, factor, numbers, rest)
    elif bits == 8:
        subtract_wide_8(address, factor, numbers, rest)
    elif bits == 3:
        subtract_wide_3(address, factor, numbers, rest)
    else:
        subtract_wide_1(address, factor, numbers, rest)
