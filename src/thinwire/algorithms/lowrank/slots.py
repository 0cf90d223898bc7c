"""The slots in which low-rank algorithms remember more than the residual."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from thinwire.algorithms.base import Slot
from thinwire.errors import StateError
from thinwire.plan import BUCKET_SEPARATOR

# Rows that begin with a cache line are read and written faster; from here on that makes no message longer.
LINE_ELEMENTS = 16
WIDE_COLUMNS = 1024


def square(numel: int) -> tuple[int, int]:
    """Return (rows, columns) of the smallest square for so large a bucket; if large, of whole cache lines."""
    side = _side(numel)
    if side < WIDE_COLUMNS:
        return side, side
    columns = -(-side // LINE_ELEMENTS) * LINE_ELEMENTS
    return -(-numel // columns), columns


def _side(numel: int) -> int:
    return math.isqrt(numel - 1) + 1 if numel else 0


def _check_factor(label: str, factor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what can be no factor of a route."""
    if factor.dim() != 2:
        raise StateError(f"factor of {label} must have 2 dimensions, got shape {tuple(factor.shape)}")
    rows, columns = factor.shape
    total = sum(math.prod(shape) for shape in shapes.values())
    if rows == 0 or not _can_have(columns, label, shapes, total):
        raise StateError(
            f"factor of {label} has shape {(rows, columns)}, which no factor of it can have; load an "
            "earlier state"
        )


def _can_have(columns: int, label: str, shapes: Mapping[str, tuple[int, ...]], total: int) -> bool:
    """Return whether a factor may have this many columns.

    They are the rows or columns of a matrix, or the side of a bucket.
    """
    first, *last = label.split(BUCKET_SEPARATOR)
    numel = math.prod(shapes[first])
    if last:
        # A bucket's label does not say what else it has: from these two parameters on to the whole model.
        return _side(numel + math.prod(shapes[last[0]])) <= columns <= square(total)[1]
    # Any dimension may be the outermost in memory (channels last), and its size is the rows.
    sizes = {size for size in shapes[first] if size}
    return columns in sizes | {numel // size for size in sizes} | {_side(numel), square(numel)[1]}


FACTOR = Slot("factor", check=_check_factor)
"""The last mean factor of a route, (matrix rank, columns), or after a turn of `alternating` (matrix rank,
rows); fp32 (fp64 of fp64 gradients), in units of the unscaled loss."""

BASIS = Slot("basis", is_saved=False)
"""An orthonormal basis of the factor's rows, which the next step starts from, if it was made ahead of it."""

SENT = Slot("sent", is_local=True, is_saved=False)
"""This process's own part of it, which shows how much was not sent."""
