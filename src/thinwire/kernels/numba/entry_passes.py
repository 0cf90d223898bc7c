"""The passes for few entries: the largest of chunks, and their mean.

Addresses are in bytes.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from thinwire.kernels.numba.code_vectors import larger
from thinwire.kernels.numba.compiler import Matrix, compiled, inlined
from thinwire.kernels.numba.vectors import LANES, first_lanes, load, pointer, splat, store

Integers: TypeAlias = NDArray[np.int64]
Sizes: TypeAlias = NDArray[np.int32]
"""Magnitudes, as the bits of fp32 numbers: in their order, and NaN above all."""

FLOAT_BYTES = 4
WITHOUT_SIGN = 0x7FFFFFFF


@compiled
def select(flat: int, runs: Integers, length: int, kept: int, positions: Integers, values: Matrix) -> None:
    """Write the entries of largest magnitude of chunks. Runs: where each begins in `flat`, and its chunks."""
    # As many entries as there are groups with a peak above some bound are above it. So the n-th highest peak
    # is a bound that few entries but the n largest exceed, and most groups are never looked at again.
    groups = -(-2 * kept // LANES) * LANES
    peaks = np.empty(groups, np.float32)
    candidates, sizes = np.empty(length, np.int64), np.empty(length, np.int32)
    row = 0
    for run in range(len(runs)):
        for number in range(runs[run, 1]):
            address = flat + FLOAT_BYTES * (runs[run, 0] + number * length)
            numbers = carray(pointer(address), (length,))
            bits = numbers.view(np.int32)
            bound = 0
            if 2 * groups <= length:
                _find_peaks(address, length, peaks)
                bound = _nth_largest(peaks.view(np.int32), groups, kept)
            count = 0
            for place in range(length):
                candidates[count] = place
                count += (bits[place] & WITHOUT_SIGN) >= bound
            for place in range(count):
                sizes[place] = bits[candidates[place]] & WITHOUT_SIGN
            smallest = _nth_largest(sizes, count, kept)
            equal = kept
            for place in range(count):
                equal -= sizes[place] > smallest
            written = 0
            for place in range(count):
                size = bits[candidates[place]] & WITHOUT_SIGN
                if size > smallest or (size == smallest and equal > 0):
                    equal -= size == smallest
                    positions[row, written] = candidates[place]
                    values[row, written] = numbers[candidates[place]]
                    written += 1
            row += 1


@compiled
def merge(
    result: Matrix, places: Integers, values: Matrix, sent: Matrix, kept: Integers, by_senders: bool
) -> None:
    """Add what members have sent to zeros."""
    first = 0
    # Chunk by chunk, of all members: what is written again lies in a core's first cache.
    for count in kept:
        stop = first + count
        if by_senders:
            _divide(result, places, values, sent, first, stop)
        # Member after member, in one order everywhere: so all get the same bits, whatever the sums round.
        for member in range(len(places)):
            for entry in range(first, stop):
                result[places[member, entry]] += values[member, entry]
        first = stop


@inlined
def _divide(result: Matrix, places: Integers, values: Matrix, sent: Matrix, first: int, stop: int) -> None:
    """Divide a chunk's entries by the members that have sent something for their place."""
    # Count in the result itself: a second tensor of its length would cost more than all else.
    for member in range(len(places)):
        for entry in range(first, stop):
            result[places[member, entry]] += np.float32(sent[member, entry] != 0)
    for member in range(len(places)):
        for entry in range(first, stop):
            values[member, entry] /= max(result[places[member, entry]], np.float32(1))
    for member in range(len(places)):
        for entry in range(first, stop):
            result[places[member, entry]] = 0


@inlined
def _find_peaks(address: int, length: int, peaks: Matrix) -> None:
    """Write the largest magnitude of each group, whose elements lie as far apart as there are groups."""
    at = peaks.ctypes.data
    for place in range(0, len(peaks), LANES):
        store(at + FLOAT_BYTES * place, splat(np.float32(0)), first_lanes(LANES))
    group = 0
    for start in range(0, length, LANES):
        part = load(address + FLOAT_BYTES * start, first_lanes(min(LANES, length - start)))
        here = at + FLOAT_BYTES * group
        store(here, larger(load(here, first_lanes(LANES)), part), first_lanes(LANES))
        group = group + LANES if group + LANES < len(peaks) else 0


@inlined
def _nth_largest(sizes: Sizes, count: int, n: int) -> int:
    """Return the n-th largest of some numbers, which are put into a different order."""
    # Hoare, "Algorithm 65: Find", 1961.
    wanted, low, high = n - 1, 0, count - 1
    while low < high:
        middle = sizes[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while sizes[left] > middle:
                left += 1
            while sizes[right] < middle:
                right -= 1
            if left <= right:
                sizes[left], sizes[right] = sizes[right], sizes[left]
                left, right = left + 1, right - 1
        if wanted <= right:
            high = right
        elif wanted >= left:
            low = left
        else:
            break
    nth: int = sizes[wanted]
    return nth
