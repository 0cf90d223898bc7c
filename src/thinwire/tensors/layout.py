"""Many tensors as one, without a copy if memory allows it, and parts of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch

from thinwire.torch_private import storage_key

Item = TypeVar("Item")


def concat_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors, flat: a view if they are already adjacent in memory, else a copy."""
    start, sizes = tensors[0].storage_offset(), [tensor.numel() for tensor in tensors]
    starts = list(accumulate(sizes[:-1], initial=start))
    is_one = len({storage_key(tensor) for tensor in tensors}) == 1
    is_dense = all(tensor.is_contiguous() for tensor in tensors)
    if is_one and is_dense and [tensor.storage_offset() for tensor in tensors] == starts:
        return tensors[0].as_strided((sum(sizes),), (1,))
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def stack_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors of one shape as a batch, a view of them; None if they are not evenly strided."""
    # Gradients of a model's equal layers are evenly spaced in a bucket, between those of other parameters.
    first = tensors[0]
    offsets = [tensor.storage_offset() for tensor in tensors]
    step = offsets[1] - offsets[0] if len(tensors) > 1 else first.numel()
    is_even = step > 0 and offsets == [offsets[0] + step * place for place in range(len(tensors))]
    is_one = len({storage_key(tensor) for tensor in tensors}) == 1
    if not (is_even and is_one and all(tensor.is_contiguous() for tensor in tensors)):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def split_as(flat: torch.Tensor, shapes: Sequence[torch.Size | tuple[int, ...]]) -> list[torch.Tensor]:
    """Return consecutive views of a flat tensor in the given shapes."""
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def group_indices(items: Sequence[Item], kind: Callable[[Item], Hashable]) -> list[list[int]]:
    """Return the indices of the items of each kind."""
    groups: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(kind(item), []).append(index)
    return list(groups.values())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor, which shares its memory."""
    detached = tensor.detach()
    # A DTensor is recognised by its method: its type takes seconds to import.
    return detached.to_local() if hasattr(detached, "to_local") else detached


def shard_of(tensor: torch.Tensor, dim: int, shard: int, num_shards: int) -> torch.Tensor:
    """Return a shard of a whole tensor, as a view; it may be empty."""
    start, length = _rows_of_shard(tensor.shape[dim], shard, num_shards)
    return tensor.narrow(dim, start, length)


def shape_of_shard(shape: Sequence[int], dim: int | None, shard: int, num_shards: int) -> tuple[int, ...]:
    """Return the shape of a shard of a whole tensor; if it is not cut, its own."""
    if dim is None:
        return tuple(shape)
    return *shape[:dim], _rows_of_shard(shape[dim], shard, num_shards)[1], *shape[dim + 1 :]


def _rows_of_shard(size: int, shard: int, num_shards: int) -> tuple[int, int]:
    # DTensor cuts like this: equal numbers of rows, rounded up; the last parts are smaller, or empty.
    rows = -(-size // num_shards)
    start = min(shard * rows, size)
    return start, min(rows, size - start)
