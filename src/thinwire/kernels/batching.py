"""Many tensors as few: those that are alike are computed as one, and come back in their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def group_indices(items: Sequence[Item], kind: Callable[[Item], Hashable]) -> list[list[int]]:
    """Return the items of each kind, by index."""
    found: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        key = kind(item)
        if key in found:
            found[key].append(index)
        else:
            found[key] = [index]
    return list(found.values())


def in_order(groups: Sequence[Sequence[int]], results: Sequence[Sequence[Result]]) -> list[Result]:
    """Return the results for groups of items, in the order of the items."""
    placed: dict[int, Result] = {}
    for group, of_group in zip(groups, results, strict=True):
        placed.update(zip(group, of_group, strict=True))
    return [placed[index] for index in range(len(placed))]


def split_as(flat: torch.Tensor, shapes: Sequence[torch.Size | tuple[int, ...]]) -> list[torch.Tensor]:
    """Return views of a flat tensor in some shapes, one after the other."""
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
