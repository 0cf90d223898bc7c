"""The passes of a step over its matrices: by PyTorch's products, or compiled ones where they serve.

A matrix is far larger than its factors, and products as thin as these wait for memory: what counts is how
often a matrix is read and written. The compiled passes do it once each. They serve fp32 and matrix ranks up
to 4 on the CPU, where PyTorch computes with one thread (as `torchrun` sets it) and Numba is installed.

On accelerators what counts for small matrices is the number of operations: matrices of one shape that lie at
equal distances, as those of a model's equal layers do in a bucket, are one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from thinwire.algorithms.compilation import compiled_for
from thinwire.algorithms.matrices import Factors, MatrixGroup, add_scaled

__all__ = ["products", "projections", "settle", "stacked", "subtract_own"]

# A block of rows stays in a core's cache between the products of one pass.
BLOCK_BYTES = 512 * 1024


def products(
    group: MatrixGroup, right: torch.Tensor, loss_scale: torch.Tensor | None, *, add_error: bool
) -> torch.Tensor:
    """(M Q)ᵀ of every matrix.

    Args:
        group: The matrices; with `add_error`, what is owed on each is added to it first, in place.
        right: Qᵀ, (matrices, r, columns).
        loss_scale: What the loss was multiplied by, None for 1.
        add_error: Whether that has not been done yet.

    Returns:
        Shape (matrices, r, rows).
    """
    errors = [error for error in group.errors if add_error and error is not None]
    compiled = compiled_for(group.matrices[0], group.matrix_rank)
    if compiled is not None and len(errors) in (0, len(group.matrices)):
        left: torch.Tensor = compiled.products(group, errors, right, _number(loss_scale))
        return left
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


def projections(group: MatrixGroup, left: torch.Tensor) -> torch.Tensor:
    """P̂ᵀ M of every matrix, (matrices, r, columns); `left` is P̂ᵀ, (matrices, r, rows)."""
    compiled = compiled_for(group.matrices[0], group.matrix_rank)
    if compiled is not None:
        own: torch.Tensor = compiled.projections(group, left)
        return own
    batch = _batch_for(group)
    if batch is not None:
        return torch.bmm(left, batch)
    own = left.new_empty(len(left), group.matrix_rank, group.matrices[0].shape[1])
    for matrix, p, projection in zip(group.matrices, left, own, strict=True):
        torch.mm(p, matrix, out=projection)
    return own


def settle(
    group: MatrixGroup,
    errors: Sequence[torch.Tensor] | None,
    terms: Sequence[Factors],
    loss_scale: torch.Tensor | None,
) -> None:
    """Turn every M into the mean gradient, in place, and leave in its error what this process did not send.

    What it sent is its own projection, P̂ · own, and not the mean one. Differences between processes
    then leave the error memory, which so stays bounded; the mean of the errors is the same.

    Args:
        group: Every matrix is M less the own projections of all terms but the last.
        errors: Where to write what this process still owes on each, (rows, columns); None to forget it.
        terms: The iterations of the step; their approximations add up.
        loss_scale: What the loss was multiplied by, None for 1.
    """
    sent = terms[-1].pair(terms[-1].own)
    pairs = [term.pair(term.mean) for term in terms]
    compiled = compiled_for(group.matrices[0], group.matrix_rank)
    if compiled is not None and errors is not None and len(terms) == 1:
        compiled.settle(group, errors, sent, pairs[0], _number(loss_scale))
        return
    batch = _batch_for(group)
    of_errors = None if batch is None or errors is None else stacked(errors)
    if batch is not None and (errors is None or of_errors is not None):
        _settle_batch(batch, of_errors, sent, pairs, loss_scale)
        return
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


def _settle_batch(
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


def subtract_own(group: MatrixGroup, factors: Factors) -> None:
    """Leave in every matrix what an iteration did not send of it."""
    for matrix, left, right in zip(group.matrices, *factors.pair(factors.own), strict=True):
        for block in _row_blocks(matrix):
            matrix[block].addmm_(left[:, block].t(), right, alpha=-1)


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that fit in a core's cache; all rows at once on an accelerator."""
    rows, columns = matrix.shape
    step = max(1, BLOCK_BYTES // (matrix.itemsize * columns)) if matrix.device.type == "cpu" else rows
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _batch_for(group: MatrixGroup) -> torch.Tensor | None:
    """All matrices as one tensor, if that serves: a view."""
    return stacked(group.matrices) if group.matrices[0].device.type != "cpu" else None


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors of one shape as a batch, a view of them; None if they don't lie at equal distances."""
    first = tensors[0]
    offsets = [each.storage_offset() for each in tensors]
    step = offsets[1] - offsets[0] if len(tensors) > 1 else first.numel()
    is_even = (
        offsets == list(range(offsets[0], offsets[0] + step * len(tensors), step)) if step > 0 else False
    )
    is_one = len({each.untyped_storage().data_ptr() for each in tensors}) == 1
    if not (is_even and is_one and all(each.is_contiguous() for each in tensors)):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def _add_errors(group: MatrixGroup, batch: torch.Tensor, loss_scale: torch.Tensor | None) -> None:
    owed = [error for error in group.errors if error is not None]
    errors = stacked(owed) if len(owed) == len(group.matrices) else None
    if errors is None:
        group.add_errors(loss_scale)
    else:
        add_scaled(batch, errors, loss_scale)


def _number(loss_scale: torch.Tensor | None) -> float:
    return 1.0 if loss_scale is None else loss_scale.item()
