"""Where residuals lie: on accelerators those of one shape side by side, and moved there row by row.

To choose between an old and a new tensor reads both. But to say where a row goes takes one number: in a
healthy step its place, in any other a spare row behind all residuals, which nobody reads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from thinwire.kernels.batching import alike, in_order
from thinwire.kernels.device_tables import number_on, on_device
from thinwire.kernels.matrices import MatrixGroup

# Of shorter rows the numbers, of eight bytes each, would take more than a sixteenth of their memory.
LEAST_ROW = 32
# The spare row is memory that serves nothing else.
MOST_ROW = 4096


class Residuals(NamedTuple):
    """The residuals of a group, flat: those that there are, and their type."""

    group: MatrixGroup
    kept: Sequence[torch.Tensor | None]
    dtype: torch.dtype


class Rooms(NamedTuple):
    """Where the residuals of a group are written.

    Attributes:
        tensors: One for each matrix, flat.
        spare: A row behind all residuals of the same memory, which consists of rows of that length, each of
            one residual; None if it does not.
    """

    tensors: Sequence[torch.Tensor]
    spare: torch.Tensor | None = None


def as_kept(items: Sequence[Residuals]) -> list[Rooms]:
    """Return the residuals as they are; of a group that lacks some, new ones with the same contents."""
    rooms = []
    for group, kept, dtype in items:
        known = [each for each in kept if each is not None]
        if len(known) < len(kept):
            like = group.matrices[0]
            rooms.append(Rooms(like.new_zeros(len(kept), like.numel(), dtype=dtype).unbind()))
            _copy_known(kept, rooms[-1].tensors)
        else:
            rooms.append(Rooms(known))
    return rooms


def by_shape(items: Sequence[Residuals]) -> list[Rooms]:
    """Return rooms in one memory, with those of one shape side by side; as they are, if they lie so."""
    length = row_elements([matrix for item in items for matrix in item.group.matrices])
    shapes = alike(items, lambda item: (item.group.matrices[0].shape, item.group.matrix_rank))
    order = [items[index] for shape in shapes for index in shape]
    kept = [residual for item in order for residual in item.kept]
    sizes = [matrix.numel() for item in order for matrix in item.group.matrices]
    starts = list(accumulate([*sizes, length], initial=0))
    whole = _memory_of(kept, starts, items[0].dtype)
    if whole is None:
        whole = items[0].group.matrices[0].new_zeros(starts[-1], dtype=items[0].dtype)
        _copy_known(kept, whole.split_with_sizes([*sizes, length])[:-1])
    *tensors, behind = whole.split_with_sizes([*sizes, length])
    rest, spare = iter(tensors), behind if length else None
    laid = [[Rooms([next(rest) for _ in items[i].kept], spare) for i in shape] for shape in shapes]
    return in_order(shapes, laid)


def _memory_of(
    kept: Sequence[torch.Tensor | None], starts: Sequence[int], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the memory of flat tensors, if they begin at these places of it and it ends at the last one."""
    first = kept[0]
    if first is None or first.untyped_storage().nbytes() != starts[-1] * first.itemsize:
        return None
    memory = first.untyped_storage()._cdata
    for residual, start in zip(kept, starts, strict=False):
        if residual is None or residual.untyped_storage()._cdata != memory:
            return None
        if (residual.dtype, residual.storage_offset()) != (dtype, start):
            return None
    return first.as_strided((starts[-1],), (1,), 0)


def _copy_known(kept: Sequence[torch.Tensor | None], rooms: Sequence[torch.Tensor]) -> None:
    known = [(room, each) for room, each in zip(rooms, kept, strict=True) if each is not None]
    if known:
        torch._foreach_copy_([room for room, _ in known], [each for _, each in known])


def row_elements(matrices: Sequence[torch.Tensor]) -> int:
    """Return the length of rows in which the residuals of matrices may be moved; 0 if that does not pay."""
    alone = [matrix.numel() for matrix in matrices]
    between = [
        matrices[index].storage_offset() - matrices[run[0]].storage_offset()
        for run in _runs(matrices)
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


def _runs(matrices: Sequence[torch.Tensor], length: int = 1) -> list[list[int]]:
    """Return which matrices, by index, lie in one memory with not much else, and whole rows, between them."""
    by_memory: dict[object, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        if matrix.numel():
            by_memory[matrix.untyped_storage()._cdata].append(index)
    runs: list[list[int]] = []
    for indices in by_memory.values():
        runs.append([])
        for index in sorted(indices, key=lambda each: matrices[each].storage_offset()):
            start, run = matrices[index].storage_offset(), runs[-1]
            # An eighth more: between matrices lie biases.
            if run and (
                8 * (start - _end(matrices[run[-1]])) > matrices[index].numel()
                or (start - matrices[run[0]].storage_offset()) % length
            ):
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
    """Return for every row of the runs where it goes in a healthy step."""
    parts = []
    for count, of_each in runs:
        part = torch.full((count,), last)
        for start, room, rows in of_each:
            part[start : start + rows] = torch.arange(room, room + rows)
        parts.append(part)
    return torch.cat(parts)
