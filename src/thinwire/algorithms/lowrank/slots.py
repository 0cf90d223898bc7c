"""The slots that low-rank algorithms keep in addition to the residual."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from thinwire.algorithms.base import Slot
from thinwire.errors import StateError
from thinwire.plan import BUCKET_SEPARATOR

# Rows of `WIDE_COLUMNS` or more start on a cache line: that is faster, and makes no message longer.
LINE_ELEMENTS = 16
WIDE_COLUMNS = 1024


def square(numel: int) -> tuple[int, int]:
    """Return (rows, columns) of the smallest square for a bucket; rows of a large one fill cache lines."""
    side = _side(numel)
    if side < WIDE_COLUMNS:
        return side, side
    columns = -(-side // LINE_ELEMENTS) * LINE_ELEMENTS
    return -(-numel // columns), columns


def _side(numel: int) -> int:
    return math.isqrt(numel - 1) + 1 if numel else 0


def _check_factor(label: str, factor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if this can't be a factor of the route."""
    if factor.dim() != 2:
        raise StateError(f"factor of {label} must have 2 dimensions, got shape {tuple(factor.shape)}")
    rows, columns = factor.shape
    if rows == 0 or not _can_have(columns, label, shapes):
        raise StateError(
            f"factor of {label} has shape {(rows, columns)}, which none of its factors can have; load an "
            "earlier state"
        )


def _can_have(columns: int, label: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a factor may have this many columns.

    They are the rows or columns of a matrix, or the side of a bucket's square.
    """
    first, *last = label.split(BUCKET_SEPARATOR)
    numel = math.prod(shapes[first])
    if last:
        # A bucket's label names only two parameters: the bucket may have more, up to the whole model. Not
        # summed for a matrix: a state may have thousands of factors.
        total = sum(map(math.prod, shapes.values()))
        return _side(numel + math.prod(shapes[last[0]])) <= columns <= square(total)[1]
    # Any dimension may be the outermost in memory (channels last); its size is the number of rows.
    sizes = {size for size in shapes[first] if size}
    return columns in sizes | {numel // size for size in sizes} | {_side(numel), square(numel)[1]}


FACTOR = Slot("factor", check=_check_factor)
"""A route's last mean factor, (matrix rank, columns), or with `alternating` after every other step (matrix
rank, rows); fp32 (fp64 for fp64 gradients), in units of the unscaled loss."""

BASIS = Slot("basis", is_saved=False)
"""An orthonormal basis of the factor's rows for the next step to start from, if already made."""

SENT = Slot("sent", is_local=True, is_saved=False)
"""This process's own factor, which shows how much was not sent."""
