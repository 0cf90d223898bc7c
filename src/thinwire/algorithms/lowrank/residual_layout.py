"""Where the residuals of a step lie on an accelerator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from thinwire.kernels.dispatch import kernels_for
from thinwire.kernels.matrices import MatrixGroup
from thinwire.kernels.residuals import Rooms, row_elements
from thinwire.tensors.layout import fill_alike, fill_memory, in_one_piece


class Wanted(NamedTuple):
    """A bucket whose residuals are to be written.

    Attributes:
        groups: Its matrices.
        kept: What residuals there are, flat, by label.
        dtype: Of residuals.
    """

    groups: Sequence[MatrixGroup]
    kept: Mapping[str, torch.Tensor]
    dtype: torch.dtype


def all_laid(items: Sequence[Wanted]) -> list[list[Rooms]]:
    """Return where to write the residuals of all buckets, for `Jointly`: of each bucket one for each group.

    They are the tensors of memory if their layout needs few launches, else new ones with the same contents.
    If the kernels want it, all residuals of one shape lie side by side, whatever their buckets; else those of
    a bucket lie to each other as their matrices do.
    """
    together: dict[object, list[tuple[MatrixGroup, Wanted]]] = defaultdict(list)
    for item in items:
        for group in item.groups:
            like = group.matrices[0]
            kernels = kernels_for(like, group.matrix_rank)
            if kernels.lays_by_shape:
                together[id(kernels), like.device, item.dtype].append((group, item))
    rooms: dict[int, Rooms] = {}
    for some in together.values():
        kept = {
            label: item.kept[label] for group, item in some for label in group.labels if label in item.kept
        }
        groups = [group for group, _ in some]
        length = row_elements([matrix for group in groups for matrix in group.matrices])
        if length:
            rooms.update(_laid_by_shape(groups, kept, some[0][1].dtype, length))
    for item in items:
        others = [group for group in item.groups if id(group) not in rooms]
        alike = _laid_alike(others, item.kept, item.dtype)
        rooms.update((id(group), Rooms([alike[label] for label in group.labels])) for group in others)
    return [[rooms[id(group)] for group in item.groups] for item in items]


def _laid_by_shape(
    groups: Sequence[MatrixGroup], kept: Mapping[str, torch.Tensor], dtype: torch.dtype, length: int
) -> dict[int, Rooms]:
    """Allocate one buffer with residuals grouped by shape; return views of it, keyed by `id(group)`."""
    by_shape: dict[object, list[MatrixGroup]] = defaultdict(list)
    for group in groups:
        by_shape[group.matrices[0].shape, group.matrix_rank].append(group)
    order = [group for alike in by_shape.values() for group in alike]
    labels = [label for group in order for label in group.labels]
    sizes = [matrix.numel() for group in order for matrix in group.matrices]
    starts = list(accumulate(sizes, initial=0))
    whole = _as_laid([kept.get(label) for label in labels], starts[:-1], starts[-1] + length, dtype)
    if whole is None:
        whole = order[0].matrices[0].new_zeros(starts[-1] + length, dtype=dtype)
        _copy_known(kept, dict(zip(labels, whole.split_with_sizes([*sizes, length]), strict=False)))
    *tensors, spare = whole.split_with_sizes([*sizes, length])
    rest = iter(tensors)
    return {id(group): Rooms([next(rest) for _ in group.labels], spare) for group in order}


def _as_laid(
    tensors: Sequence[torch.Tensor | None], starts: Sequence[int], numel: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the memory of flat tensors, if they begin at these places of it and it is of this size."""
    first = tensors[0]
    if first is None or first.dtype != dtype or first.untyped_storage().nbytes() != numel * first.itemsize:
        return None
    memory = first.untyped_storage()._cdata
    for tensor, start in zip(tensors, starts, strict=True):
        if (
            tensor is None
            or tensor.untyped_storage()._cdata != memory
            or (tensor.dtype, tensor.storage_offset()) != (dtype, start)
        ):
            return None
    return first.as_strided((numel,), (1,), 0)


def _laid_alike(
    groups: Sequence[MatrixGroup], kept: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return by name where to write residuals: so that they lie to each other as their matrices do.

    Then those of a bucket are written by one launch, even if only where the step is healthy. They are the
    tensors of memory, if those lie so; else new ones, that hold what was kept.
    """
    backends = {id(kernels_for(group.matrices[0], group.matrix_rank)) for group in groups}
    # What one backend writes as a whole must have no residual between that another one writes.
    parts = [groups] if len(backends) == 1 else [[group] for group in groups]
    errors: dict[str, torch.Tensor] = {}
    for part in parts:
        labels = [label for group in part for label in group.labels]
        matrices = [matrix for group in part for matrix in group.matrices]
        whole = in_one_piece(matrices) if len(backends) == 1 else None
        rooms = [kept[label] for label in labels if label in kept]
        is_laid = len(rooms) == len(labels) and (
            fill_memory(rooms) if whole is None else fill_alike(matrices, rooms) is not None
        )
        if not is_laid:
            starts = [0, *accumulate(matrix.numel() for matrix in matrices)]
            if whole is not None:
                starts = [int(matrix.storage_offset() - whole.storage_offset()) for matrix in matrices]
            length = starts[-1] if whole is None else whole.numel()
            zeros = matrices[0].new_zeros(length, dtype=dtype)
            rooms = [
                zeros[start : start + matrix.numel()] for start, matrix in zip(starts, matrices, strict=False)
            ]
            _copy_known(kept, dict(zip(labels, rooms, strict=True)))
        errors.update(zip(labels, rooms, strict=True))
    return errors


def _copy_known(kept: Mapping[str, torch.Tensor], rooms: Mapping[str, torch.Tensor]) -> None:
    known = [label for label in rooms if label in kept]
    if known:
        torch._foreach_copy_([rooms[label] for label in known], [kept[label] for label in known])
