"""The passes over blocks of codes: each number is read, or written, once.

What is read again, for the scale first and then for the codes, lies in a core's first cache. Addresses are in
bytes.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.algorithms.kernels.numba.code_vectors import (
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
    magnitudes,
)
from thinwire.algorithms.kernels.numba.compiler import compiled, inlined
from thinwire.algorithms.kernels.numba.vectors import (
    LANES,
    Vector,
    first_lanes,
    load,
    splat,
    store,
    total,
)

__all__ = ["average", "decode", "encode", "subtract"]

Counts: TypeAlias = NDArray[np.int64]
Scales: TypeAlias = NDArray[np.uint16]
"""The bits of bf16 numbers."""

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
    flat: int,
    numels: Counts,
    block: int,
    bits: int,
    last: float,
    codes: int,
    scales: Scales,
    row_bytes: int,
    share: int,
) -> None:
    """Write codes and scales of all blocks.

    Args:
        flat: Address of the tensors, one after the other.
        numels: Their elements.
        block: Elements of a block.
        bits: Of a code.
        last: The last level.
        codes: Address of the first row's; written.
        scales: From the first row's to the end of the message; written.
        row_bytes: From one row to the next.
        share: Blocks of a row.
    """
    size = block * bits // 8
    place, left = 0, share
    for numel in numels:
        for start in range(0, numel, block):
            length = min(block, numel - start)
            _encode(flat + FLOAT_BYTES * start, length, block, bits, last, codes, scales, place)
            place, codes, left = place + 1, codes + size, left - 1
            if not left:
                place, codes = place + row_bytes // 2 - share, codes + row_bytes - share * size
                left = share
        flat += FLOAT_BYTES * numel


@compiled
def average(
    received: int,
    received_scales: Scales,
    row_bytes: int,
    members: int,
    lengths: Counts,
    block: int,
    bits: int,
    last: float,
    room: int,
    step: int,
    codes: int,
    scales: Scales,
) -> None:
    """Write codes and scales of the mean of what members have sent of some blocks.

    Args:
        received: Address of the first member's codes.
        received_scales: From the first member's to the end of the message.
        row_bytes: From one member's to the next one's.
        members: How many there are.
        lengths: Elements of each block.
        block: Elements of a block that is not short.
        bits: Of a code.
        last: The last level.
        room: Address of a block of numbers, which take what coding the mean has lost.
        step: Bytes from one block's room to the next one's.
        codes: Address; written.
        scales: Written.
    """
    size = block * bits // 8
    part = np.float32(1) / np.float32(members)
    everywhere = first_lanes(LANES)
    factors = np.empty(members, np.float32)
    wide = block - block % WIDE
    for place in range(len(lengths)):
        # Scales are divided by the members, and not sums: once for a block, and not for each number.
        for member in range(members):
            factors[member] = _number(received_scales[member * (row_bytes // 2) + place]) * part
        for first in range(0, wide, WIDE):
            at, here = received + place * size + first * bits // 8, room + FLOAT_BYTES * first
            # The first member's are written and the others' added: the room need not be cleared.
            _read_wide(bits, at, factors[0], here)
            for member in range(1, members):
                _add_wide(bits, at + member * row_bytes, factors[member], here)
        for first in range(wide, block, LANES):
            at = received + place * size + first * bits // 8
            sums = splat(np.float32(0))
            for member in range(members):
                sums = sums + splat(factors[member]) * _read(bits, at + member * row_bytes)
            store(room + FLOAT_BYTES * first, sums, everywhere)
        _encode(room, lengths[place], block, bits, last, codes + place * size, scales, place)
        # Without a step the room is one block's, used again and again, and nobody wants what is lost.
        if step:
            _subtract(room, codes + place * size, _number(scales[place]), block, bits, room)
            room += step


@compiled
def decode(
    codes: int, scales: Scales, row_bytes: int, share: int, numels: Counts, block: int, bits: int, flat: int
) -> None:
    """Write the numbers that all blocks stand for.

    Args:
        codes: Address of the first row's.
        scales: From the first row's to the end of the message.
        row_bytes: From one row to the next.
        share: Blocks of a row.
        numels: Elements of the tensors.
        block: Elements of a block.
        bits: Of a code.
        flat: Address of the tensors, one after the other; written.
    """
    size = block * bits // 8
    place, left = 0, share
    for numel in numels:
        for start in range(0, numel, block):
            factor, at = _number(scales[place]), flat + FLOAT_BYTES * start
            length = min(block, numel - start)
            wide = length - length % WIDE
            for first in range(0, wide, WIDE):
                _read_wide(bits, codes + first * bits // 8, factor, at + FLOAT_BYTES * first)
            for first in range(wide, length, LANES):
                levels = _read(bits, codes + first * bits // 8)
                lanes = first_lanes(min(LANES, length - first))
                store(at + FLOAT_BYTES * first, splat(factor) * levels, lanes)
            place, codes, left = place + 1, codes + size, left - 1
            if not left:
                place, codes = place + row_bytes // 2 - share, codes + row_bytes - share * size
                left = share
        flat += FLOAT_BYTES * numel


@compiled
def subtract(
    flat: int,
    codes: int,
    scales: Scales,
    row_bytes: int,
    share: int,
    numels: Counts,
    block: int,
    bits: int,
    rest: int,
) -> None:
    """Write what all blocks have not sent of some numbers.

    Args:
        flat: Address of the numbers.
        codes: Address of the first row's.
        scales: From the first row's to the end of the message.
        row_bytes: From one row to the next.
        share: Blocks of a row.
        numels: Elements of the tensors.
        block: Elements of a block.
        bits: Of a code.
        rest: Address; written.
    """
    size = block * bits // 8
    place, left = 0, share
    for numel in numels:
        for start in range(0, numel, block):
            length, at = min(block, numel - start), FLOAT_BYTES * start
            _subtract(flat + at, codes, _number(scales[place]), length, bits, rest + at)
            place, codes, left = place + 1, codes + size, left - 1
            if not left:
                place, codes = place + row_bytes // 2 - share, codes + row_bytes - share * size
                left = share
        flat += FLOAT_BYTES * numel
        rest += FLOAT_BYTES * numel


@inlined
def _encode(
    numbers: int, length: int, block: int, bits: int, last: float, codes: int, scales: Scales, place: int
) -> None:
    scale = _scale(numbers, length, bits, last)
    scales[place] = scale
    number = float_of(scale << 16)
    factor = np.float32(1) / number if number > 0 else np.float32(0)
    wide = length - length % WIDE
    for first in range(0, wide, WIDE):
        _write_wide(bits, codes + first * bits // 8, numbers + FLOAT_BYTES * first, factor)
    # To the block's end: the codes behind a short one travel too, and must not be what memory happened to
    # hold.
    for first in range(wide, block, LANES):
        lanes = first_lanes(max(0, min(LANES, length - first)))
        units = splat(factor) * load(numbers + FLOAT_BYTES * first, lanes)
        _write(bits, codes + first * bits // 8, units)


@inlined
def _subtract(numbers: int, codes: int, factor: float, length: int, bits: int, rest: int) -> None:
    wide = length - length % WIDE
    for first in range(0, wide, WIDE):
        at = FLOAT_BYTES * first
        _subtract_wide(bits, codes + first * bits // 8, factor, numbers + at, rest + at)
    for first in range(wide, length, LANES):
        at, lanes = FLOAT_BYTES * first, first_lanes(min(LANES, length - first))
        levels = _read(bits, codes + first * bits // 8)
        store(rest + at, load(numbers + at, lanes) - splat(factor) * levels, lanes)


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
