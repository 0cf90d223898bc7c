"""How tensors lie in memory: in one piece, side by side, and as one without a copy if they lie so."""

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


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors of one shape as a batch, a view of them; None if they are not evenly strided."""
    # As the gradients of a model's equal layers lie in a bucket, between those of other parameters.
    first = tensors[0]
    offsets = [each.storage_offset() for each in tensors]
    step = offsets[1] - offsets[0] if len(tensors) > 1 else first.numel()
    is_even = step > 0 and offsets == [offsets[0] + step * place for place in range(len(tensors))]
    is_one = len({each.untyped_storage().data_ptr() for each in tensors}) == 1
    if not (is_even and is_one and all(each.is_contiguous() for each in tensors)):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def in_one_piece(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors as one flat view, with what lies between them; None where that is much more."""
    storages = {each.untyped_storage()._cdata for each in tensors}
    if len(storages) > 1 or not all(each.is_contiguous() for each in tensors):
        return None
    start = min(each.storage_offset() for each in tensors)
    length = max(each.storage_offset() + each.numel() for each in tensors) - start
    # An eighth more: between matrices lie biases.
    if 8 * length >= 9 * sum(each.numel() for each in tensors):
        return None
    return tensors[0].as_strided((length,), (1,), start)


def fill_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors share their memory with nothing else, and lie in one."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return list(storages.values()) == [sum(each.nbytes for each in tensors)]


def fill_alike(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both as flat views, if `others` lie to each other as `tensors` do, alone in their memory."""
    whole, other = in_one_piece(tensors), in_one_piece(others)
    distances = {b.storage_offset() - a.storage_offset() for a, b in zip(tensors, others, strict=True)}
    if whole is None or other is None or len(distances) > 1:
        return None
    return (whole, other) if other.untyped_storage().nbytes() == other.nbytes else None


def held_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor, which shares its memory."""
    detached = tensor.detach()
    # Of a DTensor, not by its type: that takes seconds to import.
    return detached.to_local() if hasattr(detached, "to_local") else detached
