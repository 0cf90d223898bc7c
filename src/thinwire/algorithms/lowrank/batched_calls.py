"""The arithmetic of all buckets of a step at once, for `Jointly`: on accelerators a launch serves all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from thinwire.kernels import dispatch
from thinwire.kernels.matrices import MatrixGroup, Terms, Write

__all__ = [
    "Asked",
    "Reconstruction",
    "all_divided",
    "all_products",
    "all_projections",
    "all_reconstructed",
    "all_written",
    "all_zeros",
]


class Asked(NamedTuple):
    """A group that is to be multiplied by a factor.

    Attributes:
        group: The matrices and their residuals.
        factor: As of `Kernels.products` or `Kernels.projections`.
        loss_scale: What the loss was multiplied by, None for 1.
        add_error: Whether these matrices are asked for the first time in this step.
    """

    group: MatrixGroup
    factor: torch.Tensor
    loss_scale: torch.Tensor | None
    add_error: bool


class Reconstruction(NamedTuple):
    """A group that is to become the mean: as of `Kernels.reconstruct`."""

    group: MatrixGroup
    errors: Sequence[torch.Tensor] | None
    terms: Terms
    loss_scale: torch.Tensor | None
    is_healthy: torch.Tensor | None
    spare: torch.Tensor | None


def all_products(items: Sequence[Asked]) -> list[torch.Tensor]:
    """As `Kernels.products`, of the groups of all buckets."""
    return _multiplied(items, dispatch.products)


def all_projections(items: Sequence[Asked]) -> list[torch.Tensor]:
    """As `Kernels.projections`, of the groups of all buckets."""
    return _multiplied(items, dispatch.projections)


def _multiplied(items: Sequence[Asked], multiply: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
    results: dict[int, torch.Tensor] = {}
    for some in _of_one_scale(item.loss_scale for item in items):
        given = [items[index] for index in some]
        # All for the first time in the step, or none: a bucket asks for that as it starts, by itself.
        found = multiply(
            [item.group for item in given],
            [item.factor for item in given],
            given[0].loss_scale,
            add_error=given[0].add_error,
        )
        results.update(zip(some, found, strict=True))
    # In the order of the items, by which each bucket is handed its own.
    return [results[index] for index in range(len(items))]


def all_reconstructed(items: Sequence[Reconstruction]) -> Sequence[Reconstruction]:
    """As `Kernels.reconstruct`, of the groups of all buckets; return the items."""
    for some in _of_one_scale(item.loss_scale for item in items):
        given = [items[index] for index in some]
        dispatch.reconstruct(
            [item.group for item in given],
            [item.errors for item in given],
            [item.terms for item in given],
            given[0].loss_scale,
            given[0].is_healthy,
            [item.spare for item in given],
        )
    return items


def all_divided(items: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return tensors over their loss scales.

    Args:
        items: Of each the tensor and the scale.
    """
    results: dict[int, torch.Tensor] = {}
    for some in _of_one_scale(scale for _, scale in items):
        results.update(
            zip(some, torch._foreach_div([items[index][0] for index in some], items[some[0]][1]), strict=True)
        )
    return [results[index] for index in range(len(items))]


def all_written(items: Sequence[tuple[Write, torch.Tensor | None]]) -> list[torch.Tensor]:
    """As `Kernels.write`, of all buckets.

    Args:
        items: What, and whether the step is healthy: one tensor for all.
    """
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


def _of_one_scale(scales: Iterable[torch.Tensor | None]) -> list[list[int]]:
    """Return which items have one loss scale: a step has one tensor for all buckets on a device."""
    found: dict[int, list[int]] = {}
    for index, scale in enumerate(scales):
        # Compared by identity: comparing the numbers would make the host wait for the device.
        found.setdefault(id(scale), []).append(index)
    return list(found.values())
