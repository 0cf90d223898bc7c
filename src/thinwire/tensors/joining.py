"""Tensors as one, to be sent or computed with by one operation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after the other, flat: a view if they lie so already, else a copy."""
    start, sizes = tensors[0].storage_offset(), [tensor.numel() for tensor in tensors]
    starts = list(accumulate(sizes[:-1], initial=start))
    is_one = len({each.untyped_storage()._cdata for each in tensors}) == 1
    is_dense = all(each.is_contiguous() for each in tensors)
    if is_one and is_dense and [each.storage_offset() for each in tensors] == starts:
        return tensors[0].as_strided((sum(sizes),), (1,))
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
