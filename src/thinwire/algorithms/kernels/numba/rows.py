"""Sixteen columns of four rows of a matrix at a time, or of one row.

All addresses are in bytes.
"""

from __future__ import annotations

from typing import TypeAlias

from thinwire.algorithms.kernels.numba.compiler import inlined
from thinwire.algorithms.kernels.numba.vectors import Vector, fetch, first_lanes, load, store, stream

__all__ = ["FLOAT_BYTES", "Four", "fetch_rows", "load_rows", "store_rows", "stream_rows"]

Four: TypeAlias = tuple[Vector, Vector, Vector, Vector]
"""One of each row."""

FLOAT_BYTES = 4

# About how far ahead memory is asked for, or four rows if that is further.
AHEAD_BYTES = 16 * 1024


@inlined
def load_rows(address: int, stride: int, count: int, lanes: int) -> Four:
    """Return the first `lanes` of sixteen columns of four rows, or of one; zeros for the rest.

    Args:
        address: Of the first number of the first row.
        stride: From one row to the next.
        count: 4 for four rows, 1 for one.
        lanes: How many of the sixteen columns count.
    """
    # Of a single row the others are masked out: their addresses are not its, and are never touched.
    mask, others = first_lanes(lanes), first_lanes(lanes if count > 1 else 0)
    return (
        load(address, mask),
        load(address + stride, others),
        load(address + 2 * stride, others),
        load(address + 3 * stride, others),
    )


@inlined
def store_rows(address: int, stride: int, rows: Four, count: int, lanes: int) -> None:
    """Write sixteen columns of four rows, or of one.

    Args:
        address: Of the first number of the first row.
        stride: From one row to the next.
        rows: What to write.
        count: 4 for four rows, 1 for one.
        lanes: How many of the sixteen columns count.
    """
    mask, others = first_lanes(lanes), first_lanes(lanes if count > 1 else 0)
    store(address, rows[0], mask)
    store(address + stride, rows[1], others)
    store(address + 2 * stride, rows[2], others)
    store(address + 3 * stride, rows[3], others)


@inlined
def stream_rows(address: int, stride: int, rows: Four) -> None:
    """Write four rows past the caches: what was there is not read first. Both are multiples of 64.

    Args:
        address: Of the first number of the first row.
        stride: From one row to the next.
        rows: What to write.
    """
    stream(address, rows[0])
    stream(address + stride, rows[1])
    stream(address + 2 * stride, rows[2])
    stream(address + 3 * stride, rows[3])


@inlined
def fetch_rows(address: int, line: int, count: int) -> None:
    """Ask for four rows that come later; not for one, which the processor foresees by itself.

    Args:
        address: Where the rows now worked on begin.
        line: From one row of the matrix to the next.
        count: 4 for four rows, 1 for one.
    """
    address += max(4 * line, AHEAD_BYTES // line * line)
    if count > 1:
        fetch(address)
        fetch(address + line)
        fetch(address + 2 * line)
        fetch(address + 3 * line)
