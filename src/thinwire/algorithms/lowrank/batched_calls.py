"""The arithmetic of all buckets of a step at once, for `Jointly`: on accelerators a launch serves all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.kernels import dispatch
from thinwire.kernels.matrices import Write


def all_divided(items: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return tensors over their loss scales: a step has one scale for all tensors on a device."""
    by_scale: dict[int, list[int]] = {}
    for index, (_, scale) in enumerate(items):
        # Compare by identity: to compare the numbers, the host would wait for the device.
        by_scale.setdefault(id(scale), []).append(index)
    results: dict[int, torch.Tensor] = {}
    for some in by_scale.values():
        divided = torch._foreach_div([items[index][0] for index in some], items[some[0]][1])
        results.update(zip(some, divided, strict=True))
    return [results[index] for index in range(len(items))]


def all_written(items: Sequence[tuple[Write, torch.Tensor | None]]) -> list[torch.Tensor]:
    """As `Kernels.write`, of all buckets."""
    return dispatch.write([item for item, _ in items], items[0][1] if items else None)


def all_zeros(items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return zeros of the shapes and types of tensors, those of one type in one memory."""
    kinds: dict[object, list[int]] = {}
    for index, item in enumerate(items):
        kinds.setdefault((item.device, item.dtype), []).append(index)
    results: dict[int, torch.Tensor] = {}
    for some in kinds.values():
        sizes = [items[index].numel() for index in some]
        parts = items[some[0]].new_zeros(sum(sizes)).split_with_sizes(sizes)
        results.update(
            (index, part.view(items[index].shape)) for index, part in zip(some, parts, strict=True)
        )
    return [results[index] for index in range(len(items))]
