"""Residuals on accelerators: moved row by row, so that a step can leave them as they were for no extra pass.

To choose between two tensors reads both. But to say where a row goes takes one number: of a healthy step to
its place, of any other to a spare row behind all residuals, which nobody reads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from thinwire.kernels.device_cache import number_on, on_device

# Of shorter rows the numbers, of eight bytes each, would take more than a sixteenth of their memory.
LEAST_ROW = 32
# The spare row is memory that is there for nothing else.
MOST_ROW = 4096


class Rooms(NamedTuple):
    """Where the residuals of a group are written.

    Attributes:
        tensors: One for each matrix, of its number of elements.
        spare: A row behind all residuals of the same memory, which is made of rows of that length, each part
            of one residual; None where it is not.
    """

    tensors: Sequence[torch.Tensor]
    spare: torch.Tensor | None = None


def row_elements(matrices: Sequence[torch.Tensor]) -> int:
    """Return the length of rows in which the residuals of matrices may be moved; 0 if that does not pay."""
    alone = [matrix.numel() for matrix in matrices]
    between = [
        matrices[index].storage_offset() - matrices[run[0]].storage_offset()
        for run in _near(matrices)
        for index in run
    ]
    # Rows that begin with every matrix, if those between them leave any: then a memory is moved as one.
    return _divisor(math.gcd(*alone, *between)) or _divisor(math.gcd(*alone))


@lru_cache(maxsize=64)
def _divisor(common: int) -> int:
    """Return the largest divisor that may be a row; 0 if there is none."""
    lengths = range(min(common, MOST_ROW), LEAST_ROW - 1, -1)
    return next((length for length in lengths if common % length == 0), 0)


def move_where(
    is_healthy: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    rooms: Sequence[torch.Tensor],
    spare: torch.Tensor,
) -> None:
    """Copy matrices to their rooms if `is_healthy`; else to the spare row, and rooms stay.

    Cost: every matrix is read once and every room written once, by a launch for each memory of matrices.
    """
    length = spare.numel()
    last = spare.storage_offset() // length
    rows = spare.as_strided((last + 1, length), (length, 1), 0)
    # A memory's rows go in one launch, with biases that lie between: those go to the spare row.
    runs = _runs(matrices, length)
    places = tuple(_places([matrices[i] for i in run], [rooms[i] for i in run], length) for run in runs)
    known = on_device(("rows", last, places), lambda: _numbers(last, places), spare.device)
    nowhere = number_on(spare.device, last, known.dtype)
    chosen = torch.where(is_healthy, known, nowhere).split_with_sizes([count for count, _ in places])
    for run, numbers in zip(runs, chosen, strict=True):
        first = matrices[run[0]]
        source = first.as_strided((len(numbers), length), (length, 1), first.storage_offset())
        rows.index_copy_(0, numbers, source)


def _end(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) + tensor.numel()


def _near(matrices: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return which matrices, by index, lie in one memory with not much else between them."""
    by_memory: dict[object, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        if matrix.numel():
            by_memory[matrix.untyped_storage()._cdata].append(index)
    runs: list[list[int]] = []
    for indices in by_memory.values():
        runs.append([])
        for index in sorted(indices, key=lambda each: matrices[each].storage_offset()):
            matrix, run = matrices[index], runs[-1]
            # An eighth more: between matrices lie biases.
            if run and 8 * (matrix.storage_offset() - _end(matrices[run[-1]])) > matrix.numel():
                runs.append([])
            runs[-1].append(index)
    return runs


def _runs(matrices: Sequence[torch.Tensor], length: int) -> list[list[int]]:
    """Return which matrices, by index, are moved at once: each begins with a row."""
    runs: list[list[int]] = []
    for near in _near(matrices):
        runs.append([])
        for index in near:
            run = runs[-1]
            if run and (matrices[index].storage_offset() - matrices[run[0]].storage_offset()) % length:
                runs.append([])
            runs[-1].append(index)
    return runs


def _places(
    matrices: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor], length: int
) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Return the rows of a run, and of each matrix its first one, that of its room, and how many."""
    start = int(matrices[0].storage_offset())
    of_each = tuple(
        (
            (int(matrix.storage_offset()) - start) // length,
            int(room.storage_offset()) // length,
            matrix.numel() // length,
        )
        for matrix, room in zip(matrices, rooms, strict=True)
    )
    return (_end(matrices[-1]) - start) // length, of_each


def _numbers(last: int, runs: Sequence[tuple[int, Sequence[tuple[int, int, int]]]]) -> torch.Tensor:
    """Return of every row of the runs where it goes in a healthy step."""
    parts = []
    for count, of_each in runs:
        part = torch.full((count,), last)
        for start, room, rows in of_each:
            part[start : start + rows] = torch.arange(room, room + rows)
        parts.append(part)
    return torch.cat(parts)
