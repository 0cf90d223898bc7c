"""Kernels made of PyTorch's products: for every device, dtype and matrix rank.

A matrix is far larger than its factors, and such skinny products are limited by memory: the cost on the CPU
is how often a matrix is read and written. So it is processed in blocks of rows that stay in a core's cache.

On accelerators, the cost for small matrices is the number of operations: matrices of one shape that are
evenly spaced in memory, like those of a model's equal layers in a bucket, are one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import pad, threshold

from thinwire.kernels.backend import Kernels
from thinwire.kernels.matrices import (
    DEPENDENT_BELOW,
    Factors,
    MatmulBatch,
    MatrixGroup,
    Reconstruction,
    Rows,
    Write,
)
from thinwire.tensors import accelerators
from thinwire.tensors.layout import concat_view, group_indices, split_as, stack_view

# A block of rows stays in a core's cache between the products of one pass.
BLOCK_BYTES = 512 * 1024

# By number of dimensions: for matrices, and for batches of them.
PRODUCT: dict[int, Callable[..., torch.Tensor]] = {2: torch.mm, 3: torch.bmm}
SUM: dict[int, Callable[..., torch.Tensor]] = {2: torch.addmm, 3: torch.baddbmm}


def products(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Read every matrix once, and write it once if its residual is added."""
    lefts = []
    for item in items:
        group, right = item.group, item.factor
        # With the factor's dtype: the message is made from it without a copy.
        left = right.new_empty(len(right), group.matrix_rank, group.matrices[0].shape[0])
        for k, rows, matrix, error in _parts(group.matrices, group.errors if item.add_error else None):
            _add_scaled(matrix, error, item.loss_scale)
            # The last bits of MKL's M Qᵀ would depend on the matrix's place in the bucket.
            PRODUCT[matrix.dim()](right[k], matrix.mT, out=left[k, :, rows])
        lefts.append(left)
    return lefts


def projections(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Read every matrix once, after adding its residual if asked."""
    owns = []
    for item in items:
        group, left = item.group, item.factor
        own = left.new_empty(len(left), group.matrix_rank, group.matrices[0].shape[1])
        if item.add_error:
            add_errors(group, item.loss_scale)
        for k, _, matrix, _ in _parts(group.matrices, are_cut=False):
            PRODUCT[matrix.dim()](left[k], matrix, out=own[k])
        owns.append(own)
    return owns


def add_errors(group: MatrixGroup, loss_scale: torch.Tensor | None) -> None:
    """Add its residual to every matrix of a group."""
    for _, _, matrix, error in _parts(group.matrices, group.errors, are_cut=False):
        _add_scaled(matrix, error, loss_scale)


def _add_scaled(matrix: torch.Tensor, error: torch.Tensor | None, loss_scale: torch.Tensor | None) -> None:
    """Add a residual, in units of the unscaled loss, to a gradient in units of the scaled one."""
    if error is not None:
        matrix.add_(error if loss_scale is None else error * loss_scale)


def subtract_own(group: MatrixGroup, factors: Factors) -> None:
    """Subtract from every matrix what an iteration has sent of it; read and write every matrix once."""
    lefts, rights = factors.sent
    for k, rows, matrix, _ in _parts(group.matrices):
        SUM[matrix.dim()](matrix, lefts[k, :, rows].mT, rights[k], alpha=-1, out=matrix)


def reconstruct(items: Sequence[Reconstruction]) -> None:
    """Read and write every matrix once, and write its error once; on accelerators more often."""
    is_healthy = items[0].is_healthy
    one_or_nan = None if is_healthy is None else _one_or_nan(is_healthy)
    for item in items:
        (sent_lefts, sent_rights), means = item.terms[-1].sent, [term.mean for term in item.terms]
        if one_or_nan is not None:
            # A copy of the small factor: the next step may start from this basis.
            means[0] = means[0][0] * one_or_nan, means[0][1]
        for k, rows, matrix, error in _parts(item.group.matrices, item.errors):
            # The residual first. Then the mean overwrites its input, part by part, while still in cache.
            if error is not None:
                rest = error if is_healthy is None else torch.empty_like(error)
                SUM[matrix.dim()](matrix, sent_lefts[k, :, rows].mT, sent_rights[k], alpha=-1, out=rest)
                if item.loss_scale is not None:
                    rest.div_(item.loss_scale)
                if is_healthy is not None:
                    # Select, don't multiply by 0 or 1: values that are not finite would stay so.
                    torch.where(is_healthy, rest, error, out=error)
            (left, right), *others = means
            PRODUCT[matrix.dim()](left[k, :, rows].mT, right[k], out=matrix)
            for left, right in others:
                SUM[matrix.dim()](matrix, left[k, :, rows].mT, right[k], out=matrix)


def write(items: Sequence[Write]) -> None:
    """Take a few launches for all items of one pair of types."""
    is_healthy = items[0].is_healthy
    for indices in group_indices(items, lambda item: (item.target.dtype, item.healthy.dtype, item.stays)):
        targets, healthy = [items[i].target for i in indices], [items[i].healthy for i in indices]
        stays = items[indices[0]].stays
        if is_healthy is not None and stays:
            chosen = torch.where(is_healthy, concat_view(healthy), concat_view(targets))
            healthy = split_as(chosen, [target.shape for target in targets])
        torch._foreach_copy_(targets, healthy)
        if is_healthy is not None and not stays:
            # Multiply by one or NaN; one changes no bit. No operation fills many tensors under a condition.
            torch._foreach_mul_(targets, _one_or_nan(is_healthy).to(targets[0].dtype))


def orthonormal_rows(items: Sequence[Rows]) -> list[torch.Tensor]:
    """Apply Gram–Schmidt in coefficients, twice.

    The Gram matrices of all items, in float64, are factorised together by one Cholesky recursion over the few
    rows, without a loop over matrices, and without reading anything back from the device.

    Cost: two float64 copies of each item, each read twice. On the CPU, if a device has no float64.
    """
    # On accelerators, items of one shape are joined: copying costs less than launches. On the CPU there would
    # be only the copy.
    indices = range(len(items))
    is_joined = accelerators.is_accelerator(items[0].rows.device)
    shapes = group_indices(
        indices,
        lambda i: (items[i].rows.shape[1:], items[i].rows.dtype, items[i].drawn is None) if is_joined else i,
    )
    batches = [[items[index] for index in shape] for shape in shapes]
    # Twice, in float64: a Gram matrix squares the rows' condition number, and the second pass removes what
    # the first one leaves of nearly dependent rows.
    once = _orthonormal_pass(list(map(_in_double, batches)), are_scaled=False)
    twice = _orthonormal_pass(once, are_scaled=True)
    results: dict[int, torch.Tensor] = {}
    for shape, basis, batch in zip(shapes, twice, batches, strict=True):
        bases = basis.to(batch[0].rows).split_with_sizes([len(item.rows) for item in batch])
        results.update(zip(shape, bases, strict=True))
    return [results[index] for index in indices]


def _in_double(batch: Sequence[Rows]) -> torch.Tensor:
    """Return items as one tensor in float64, with drawn rows in place of zero rows."""
    rows, drawn = [item.rows for item in batch], batch[0].drawn
    joined = torch.cat(rows) if len(rows) > 1 else rows[0]
    if drawn is not None:
        is_dead = torch.linalg.vector_norm(joined, torch.inf, dim=2, keepdim=True) == 0
        joined = torch.where(is_dead, drawn, joined)
    return joined.double()


def _orthonormal_pass(batches: Sequence[torch.Tensor], *, are_scaled: bool) -> list[torch.Tensor]:
    """Apply one factorisation of all Gram matrices; `are_scaled` if all rows nearly have length 1 or 0."""
    # Padded with zero rows, which do not affect the others, so that all shapes are one batch.
    max_rows = max(batch.shape[1] for batch in batches)
    # Pad only the Gram matrices, not the long rows.
    missing = [max_rows - batch.shape[1] for batch in batches]
    products = [batch @ batch.mT for batch in batches]
    grams = torch.cat(
        [pad(product, (0, n, 0, n)) if n else product for product, n in zip(products, missing, strict=True)]
    )
    transforms = _inverse_cholesky(grams, are_scaled=are_scaled)
    return [
        transform[:, : batch.shape[1], : batch.shape[1]] @ batch
        for transform, batch in zip(
            transforms.split_with_sizes([len(batch) for batch in batches]), batches, strict=True
        )
    ]


def _inverse_cholesky(grams: torch.Tensor, *, are_scaled: bool) -> torch.Tensor:
    """Return the lower triangular W with W G Wᵀ = I, except for zero rows of W where G is dependent."""
    # Elimination in [G | I], which becomes [D Lᵀ | L⁻¹]; W is D^(−1/2) L⁻¹. A dependent row is divided by
    # infinity, and so subtracts nothing from the rows below; torch's own factorisation would fail or give
    # NaN.
    rows = grams.shape[1]
    # Normalise rows first: whether a row depends on others is a question of angles, not of lengths.
    scale = None if are_scaled else _above(grams.diagonal(dim1=1, dim2=2), 0.0).rsqrt()
    if scale is not None:
        grams = grams * scale.unsqueeze(2) * scale.unsqueeze(1)
    # Joined, so that one operation per row eliminates in both.
    identity = torch.eye(rows, dtype=grams.dtype, device=grams.device)
    both = torch.cat([grams, identity.expand_as(grams)], dim=2)
    for row in range(rows - 1):
        right = slice(row + 1, rows + row + 1)  # L⁻¹ is still zero in later columns
        # All matrices together, row by row: rows above have already been eliminated from each row.
        over_pivot = both[:, row, right] / _above(both[:, row, row : row + 1], DEPENDENT_BELOW)
        both[:, row + 1 :, right].addcmul_(
            both[:, row + 1 :, row].unsqueeze(2), over_pivot.unsqueeze(1), value=-1
        )
    roots = _above(both.diagonal(dim1=1, dim2=2), DEPENDENT_BELOW).rsqrt()
    inverse = both[:, :, rows:] * roots.unsqueeze(2)
    return inverse if scale is None else inverse.mul_(scale.unsqueeze(1))


def _above(values: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the values above a limit, and infinity for the others, in one operation."""
    return threshold(values, limit, torch.inf)


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether all elements are finite: a maximum with NaN is NaN."""
    # Comparisons with NaN are false.
    return torch.stack(list(torch._foreach_norm(list(tensors), torch.inf))).amax() < torch.inf


def _one_or_nan(is_healthy: torch.Tensor) -> torch.Tensor:
    # One over one, or zero over zero.
    return torch.true_divide(is_healthy, is_healthy)


def _parts(
    matrices: Sequence[torch.Tensor],
    errors: Sequence[torch.Tensor | None] | None = None,
    *,
    are_cut: bool = True,
) -> Iterator[tuple[int | slice, slice, torch.Tensor, torch.Tensor | None]]:
    """Yield (which matrices, which of their rows, these rows, the same rows of their errors).

    On accelerators all matrices are one batch if memory allows it. On the CPU, rows are cut to fit in a
    core's cache, unless `are_cut` is False.
    """
    is_accelerator = accelerators.is_accelerator(matrices[0].device)
    errors = errors or [None] * len(matrices)
    known = [error for error in errors if error is not None]
    if is_accelerator and len(known) in (0, len(errors)):
        batch, of_errors = stack_view(matrices), stack_view(known) if known else None
        if batch is not None and (of_errors is not None or not known):
            yield slice(None), slice(None), batch, of_errors
            return
    for k, (matrix, error) in enumerate(zip(matrices, errors, strict=True)):
        height, columns = matrix.shape
        is_cut = are_cut and not is_accelerator
        step = max(1, BLOCK_BYTES // (matrix.itemsize * columns)) if is_cut else height
        for start in range(0, height, step):
            rows = slice(start, start + step)
            yield k, rows, matrix[rows], None if error is None else error[rows]


LOW_RANK = Kernels(
    frozenset({torch.float32, torch.float64}),
    products=products,
    projections=projections,
    reconstruct=reconstruct,
    write=write,
    orthonormal_rows=orthonormal_rows,
    all_finite=all_finite,
)
