"""Kernels made of PyTorch's products: for every device, type and matrix rank.

A matrix is far larger than its factors, and products as thin as these wait for memory: what counts on the CPU
is how often a matrix is read and written. So it is taken in blocks of rows that stay in a core's cache.

On accelerators what counts for small matrices is the number of operations: matrices of one shape that lie at
equal distances, as those of a model's equal layers do in a bucket, are one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad

from thinwire.algorithms.kernels.base import Kernels
from thinwire.algorithms.kernels.matrices import (
    DEPENDENT_BELOW,
    Factors,
    MatrixGroup,
    Terms,
    add_errors,
    add_scaled,
    stacked,
)

__all__ = ["TorchKernels"]

# A block of rows stays in a core's cache between the products of one pass.
BLOCK_BYTES = 512 * 1024


class TorchKernels(Kernels):
    """PyTorch's products, a group after the other; see `Kernels` for what each method does."""

    def products(
        self,
        groups: Sequence[MatrixGroup],
        rights: Sequence[torch.Tensor],
        loss_scale: torch.Tensor | None,
        *,
        add_error: bool,
    ) -> list[torch.Tensor]:
        """As `Kernels.products`; every matrix is read once, and written once where its residual is added."""
        return [
            _products(group, right, loss_scale, add_error=add_error)
            for group, right in zip(groups, rights, strict=True)
        ]

    def projections(
        self,
        groups: Sequence[MatrixGroup],
        lefts: Sequence[torch.Tensor],
        loss_scale: torch.Tensor | None,
        *,
        add_error: bool,
    ) -> list[torch.Tensor]:
        """As `Kernels.projections`; every matrix is read once, and updated first if its residual is added."""
        owns = []
        for group, left in zip(groups, lefts, strict=True):
            batch = _batch_for(group)
            if add_error:
                _add_errors(group, batch, loss_scale)
            if batch is not None:
                owns.append(torch.bmm(left, batch))
                continue
            own = left.new_empty(len(left), group.matrix_rank, group.matrices[0].shape[1])
            for matrix, p, projection in zip(group.matrices, left, own, strict=True):
                torch.mm(p, matrix, out=projection)
            owns.append(own)
        return owns

    def reconstruct(
        self,
        groups: Sequence[MatrixGroup],
        errors: Sequence[Sequence[torch.Tensor] | None],
        terms: Sequence[Terms],
        loss_scale: torch.Tensor | None,
    ) -> None:
        """As `Kernels.reconstruct`; every matrix is read and written once, and its error written once."""
        for group, of_group, found in zip(groups, errors, terms, strict=True):
            sent = found[-1].pair(found[-1].own)
            pairs = [term.pair(term.mean) for term in found]
            batch = _batch_for(group)
            of_batch = None if batch is None or of_group is None else stacked(of_group)
            if batch is not None and (of_group is None or of_batch is not None):
                _reconstruct_batch(batch, of_batch, sent, pairs, loss_scale)
            else:
                _reconstruct_each(group, of_group, sent, pairs, loss_scale)

    def subtract_own(self, groups: Sequence[MatrixGroup], factors: Sequence[Factors]) -> None:
        """As `Kernels.subtract_own`; every matrix is read once and written once."""
        for group, found in zip(groups, factors, strict=True):
            for matrix, left, right in zip(group.matrices, *found.pair(found.own), strict=True):
                for block in _row_blocks(matrix):
                    matrix[block].addmm_(left[:, block].t(), right, alpha=-1)

    def orthonormal_rows(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return orthonormal bases by Gram–Schmidt in coefficients, twice.

        The Gram matrices of all batches of a device, in float64, are factorised together by one Cholesky
        recursion over the few rows, none over matrices, and without reading anything back from the device.

        Cost: two float64 copies of each batch, each read twice.
        """
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for index, batch in enumerate(batches):
            by_device[batch.device].append(index)
        bases: dict[int, torch.Tensor] = {}
        for indices in by_device.values():
            once = _orthonormal_pass([batches[index].double() for index in indices])
            for index, basis in zip(indices, _orthonormal_pass(once), strict=True):
                bases[index] = basis.to(batches[index].dtype)
        return [bases[index] for index in range(len(batches))]


def _products(
    group: MatrixGroup, right: torch.Tensor, loss_scale: torch.Tensor | None, *, add_error: bool
) -> torch.Tensor:
    batch = _batch_for(group)
    if batch is not None:
        if add_error:
            _add_errors(group, batch, loss_scale)
        return torch.bmm(right, batch.mT)
    left = right.new_empty(len(right), group.matrix_rank, group.matrices[0].shape[0])
    for matrix, error, q, p in zip(group.matrices, group.errors, right, left, strict=True):
        for block in _row_blocks(matrix):
            if add_error and error is not None:
                add_scaled(matrix[block], error[block], loss_scale)
            # Not M Qᵀ: of that MKL's last bits depend on where in a bucket the matrix lies.
            torch.mm(q, matrix[block].t(), out=p[:, block])
    return left


def _reconstruct_batch(
    batch: torch.Tensor,
    errors: torch.Tensor | None,
    sent: tuple[torch.Tensor, torch.Tensor],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss_scale: torch.Tensor | None,
) -> None:
    if errors is not None:
        torch.baddbmm(batch, sent[0].mT, sent[1], alpha=-1, out=errors)
        if loss_scale is not None:
            errors.div_(loss_scale)
    (left, right), *rest = pairs
    torch.bmm(left.mT, right, out=batch)
    for left, right in rest:
        batch.baddbmm_(left.mT, right)


def _reconstruct_each(
    group: MatrixGroup,
    errors: Sequence[torch.Tensor] | None,
    sent: tuple[torch.Tensor, torch.Tensor],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss_scale: torch.Tensor | None,
) -> None:
    for index, matrix in enumerate(group.matrices):
        sent_left, sent_right = (factor[index] for factor in sent)
        for block in _row_blocks(matrix):
            if errors is not None:
                error = errors[index][block]
                torch.addmm(matrix[block], sent_left[:, block].t(), sent_right, alpha=-1, out=error)
                if loss_scale is not None:
                    error.div_(loss_scale)
            for position, (left, right) in enumerate(pairs):
                if position == 0:
                    torch.mm(left[index][:, block].t(), right[index], out=matrix[block])
                else:
                    matrix[block].addmm_(left[index][:, block].t(), right[index])


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows that fit in a core's cache; all rows at once on an accelerator."""
    rows, columns = matrix.shape
    step = max(1, BLOCK_BYTES // (matrix.itemsize * columns)) if matrix.device.type == "cpu" else rows
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _batch_for(group: MatrixGroup) -> torch.Tensor | None:
    """Return all matrices as one tensor, a view, if that serves; else None."""
    return stacked(group.matrices) if group.matrices[0].device.type != "cpu" else None


def _add_errors(group: MatrixGroup, batch: torch.Tensor | None, loss_scale: torch.Tensor | None) -> None:
    known = [error for error in group.errors if error is not None]
    errors = stacked(known) if batch is not None and len(known) == len(group.matrices) else None
    if batch is None or errors is None:
        add_errors(group, loss_scale)
    else:
        add_scaled(batch, errors, loss_scale)


def _orthonormal_pass(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Apply one factorisation of all Gram matrices."""
    max_rows = max(batch.shape[1] for batch in batches)
    grams = [_padded(each @ each.mT, max_rows) for each in batches]
    transforms = _inverse_cholesky(torch.cat(grams)).split_with_sizes([len(batch) for batch in batches])
    return [
        transform[:, : each.shape[1], : each.shape[1]] @ each
        for transform, each in zip(transforms, batches, strict=True)
    ]


def _padded(grams: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - grams.shape[-1]
    return pad(grams, (0, missing, 0, missing)) if missing else grams


def _inverse_cholesky(grams: torch.Tensor) -> torch.Tensor:
    """Return the lower triangular W with W G Wᵀ = I, except for zero rows of W where G is dependent."""
    lengths = grams.diagonal(dim1=1, dim2=2)
    scale = torch.where(lengths > 0, lengths.rsqrt(), 0.0)
    cosines = grams * scale.unsqueeze(2) * scale.unsqueeze(1)
    inverse = torch.diag_embed(scale)
    for row in range(grams.shape[1]):
        pivot = cosines[:, row, row]
        root = torch.where(pivot > DEPENDENT_BELOW, pivot.rsqrt(), 0.0)
        # In place on views: with *= each would be written back to its place once more.
        inverse[:, row].mul_(root.unsqueeze(1))
        below = cosines[:, row + 1 :, row] * root.unsqueeze(1)
        inverse[:, row + 1 :].sub_(below.unsqueeze(2) * inverse[:, row].unsqueeze(1))
        cosines[:, row + 1 :, row + 1 :].sub_(below.unsqueeze(2) * below.unsqueeze(1))
    return inverse
