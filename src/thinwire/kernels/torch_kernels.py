"""Kernels made of PyTorch's products: for every device, type and matrix rank.

A matrix is far larger than its factors, and products as thin as these wait for memory: what counts on the CPU
is how often a matrix is read and written. So it is taken in blocks of rows that stay in a core's cache.

On accelerators what counts for small matrices is the number of operations: matrices of one shape that lie at
equal distances, as those of a model's equal layers do in a bucket, are one batch, and what is done to each
element is done to the matrices of all groups by one operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad, threshold

from thinwire.kernels.base import Kernels
from thinwire.kernels.batching import alike, batched, empty_as, in_order, split_as
from thinwire.kernels.device_tables import number_on
from thinwire.kernels.matrices import (
    DEPENDENT_BELOW,
    Asked,
    MatrixGroup,
    Pair,
    Reconstruction,
    Rows,
    Subtraction,
    Write,
    one_without_gaps,
    replaced,
)
from thinwire.kernels.residual_layout import Residuals, Rooms, as_kept, by_shape, move_where
from thinwire.tensors import accelerators
from thinwire.tensors.layout import as_one, stacked

# A block of rows stays in a core's cache between the products of one pass.
BLOCK_BYTES = 512 * 1024


def products(items: Sequence[Asked]) -> list[torch.Tensor]:
    """Read every matrix once, and write it once if its residual is added."""
    add_error = items[0].add_error and not _added_at_once(items)
    return [_products(group, right, scale, add_error=add_error) for group, right, scale, _ in items]


def _products(
    group: MatrixGroup, right: torch.Tensor, loss_scale: torch.Tensor | None, *, add_error: bool
) -> torch.Tensor:
    batch = _batch_for(group)
    if batch is not None:
        return torch.bmm(right, batch.mT)
    # Of the factor's type: the message is made of what is written here, without a copy.
    left = right.new_empty(len(right), group.matrix_rank, group.matrices[0].shape[0])
    for matrix, error, q, p in zip(group.matrices, group.errors, right, left, strict=True):
        for block in _row_blocks(matrix):
            if add_error and error is not None:
                _add_scaled(matrix[block], error[block], loss_scale)
            # Not M Qᵀ: of that MKL's last bits depend on where in a bucket the matrix lies.
            torch.mm(q, matrix[block].t(), out=p[:, block])
    return left


def projections(items: Sequence[Asked]) -> list[torch.Tensor]:
    """Read every matrix once; if its residual is added, that is done before."""
    add_error = items[0].add_error and not _added_at_once(items)
    owns = _owns_by_shape(items)
    for (group, left, loss_scale, _), own in zip(items, owns, strict=True):
        if add_error:
            add_errors(group, loss_scale)
        batch = _batch_for(group)
        if batch is not None:
            torch.bmm(left, batch, out=own)
            continue
        for matrix, p, projection in zip(group.matrices, left, own, strict=True):
            torch.mm(p, matrix, out=projection)
    return owns


def _owns_by_shape(items: Sequence[Asked]) -> list[torch.Tensor]:
    """Allocate the projections, on accelerators those of one shape one after the other."""
    shapes = [(len(factor), group.matrix_rank, group.matrices[0].shape[1]) for group, factor, *_ in items]
    if not _pays_per_launch(items):
        return [item.factor.new_empty(shape) for item, shape in zip(items, shapes, strict=True)]
    # So that they need not be joined when they are taken from the residuals.
    kinds = alike(
        items, lambda item: (item.factor.dtype, item.group.matrices[0].shape, item.group.matrix_rank)
    )
    order = [index for kind in kinds for index in kind]

    def allocated(some: Sequence[int]) -> list[torch.Tensor]:
        return empty_as(items[some[0]].factor, [shapes[index] for index in some])

    return in_order([order], [batched(order, lambda index: items[index].factor.dtype, allocated)])


def _added_at_once(items: Sequence[Asked]) -> bool:
    """On accelerators, add all residuals by one operation; with a loss scale by one for each matrix."""
    if not _pays_per_launch(items):
        return False
    known = [
        (matrix, error)
        for item in items
        for matrix, error in zip(item.group.matrices, item.group.errors, strict=True)
        if error is not None
    ]
    scale = items[0].loss_scale
    if scale is not None:
        # One by one: an operation on many tensors scales by a number, which the host would have to read.
        for matrix, error in known:
            matrix.addcmul_(error, scale.to(error.dtype))
    elif known:
        torch._foreach_add_([matrix for matrix, _ in known], [error for _, error in known])
    return True


def add_errors(group: MatrixGroup, loss_scale: torch.Tensor | None) -> None:
    """Add its residual to every matrix of a group."""
    for matrix, error in zip(group.matrices, group.errors, strict=True):
        if error is not None:
            _add_scaled(matrix, error, loss_scale)


def _add_scaled(matrix: torch.Tensor, error: torch.Tensor, loss_scale: torch.Tensor | None) -> None:
    """Add a residual, in units of the unscaled loss, to a gradient in units of the scaled one."""
    matrix.add_(error if loss_scale is None else error * loss_scale)


def subtract_own(items: Sequence[Subtraction]) -> None:
    """Read and write every matrix once."""
    for group, factors in items:
        lefts, rights = factors.pair(factors.own)
        batch = _batch_for(group)
        if batch is not None:
            batch.baddbmm_(lefts.mT, rights, alpha=-1)
            continue
        for matrix, left, right in zip(group.matrices, lefts, rights, strict=True):
            for block in _row_blocks(matrix):
                matrix[block].addmm_(left[:, block].t(), right, alpha=-1)


def residual_rooms(items: Sequence[Residuals]) -> list[Rooms]:
    """Return the residuals as they are; on accelerators, those of one shape side by side."""
    return batched(items, lambda item: item.dtype, by_shape) if _pays_per_launch(items) else as_kept(items)


def reconstruct(items: Sequence[Reconstruction]) -> None:
    """Read and write every matrix once, and write its error once; on accelerators every matrix once more."""
    is_healthy = items[0].is_healthy
    if is_healthy is None and not _pays_per_launch(items):
        for item in items:
            _reconstruct_each(item, item.means, item.errors)
        return
    kept = [item for item in items if item.errors is not None]
    if kept:
        # What was sent is taken from the residuals, and not before from the matrices: those lie in their
        # buckets, residuals of one shape side by side.
        _move(kept, is_healthy)
        _subtract_sent(kept, is_healthy)
        if items[0].loss_scale is not None:
            _divide(kept, items[0].loss_scale, is_healthy)
    # The residuals are out of the matrices; now those may be overwritten.
    means = [item.means for item in items]
    if is_healthy is not None:
        # Copies of the small factors: the next step may start from one of these bases.
        lefts = [pairs[0][0] for pairs in means]
        spoiled = torch._foreach_mul(lefts, _one_or_nan(is_healthy, lefts[0].dtype))
        means = [[(left, pairs[0][1]), *pairs[1:]] for left, pairs in zip(spoiled, means, strict=True)]
    for item, pairs in zip(items, means, strict=True):
        batch = _batch_for(item.group)
        if batch is None:
            _reconstruct_each(item, pairs, None)
            continue
        torch.bmm(pairs[0][0].mT, pairs[0][1], out=batch)
        for left, right in pairs[1:]:
            batch.baddbmm_(left.mT, right)


def _reconstruct_each(
    item: Reconstruction, pairs: Sequence[Pair], errors: Sequence[torch.Tensor] | None
) -> None:
    for index, matrix in enumerate(item.group.matrices):
        sent_left, sent_right = (factor[index] for factor in item.sent)
        for block in _row_blocks(matrix):
            # Block by block, residual and mean: both while the block is still in cache.
            # The residual first: then the mean takes the place of what it is made of.
            if errors is not None:
                error = errors[index][block]
                torch.addmm(matrix[block], sent_left[:, block].t(), sent_right, alpha=-1, out=error)
                if item.loss_scale is not None:
                    error.div_(item.loss_scale)
            for position, (left, right) in enumerate(pairs):
                if position == 0:
                    torch.mm(left[index][:, block].t(), right[index], out=matrix[block])
                else:
                    matrix[block].addmm_(left[index][:, block].t(), right[index])


def _rooms_of(items: Sequence[Reconstruction]) -> list[torch.Tensor]:
    return [room for item in items for room in item.errors or ()]


def _move(items: Sequence[Reconstruction], is_healthy: torch.Tensor | None) -> None:
    """Copy all matrices to their rooms; if `is_healthy` is false, those stay."""
    memories = alike(items, lambda item: item.spare is not None and item.spare.untyped_storage()._cdata)
    if is_healthy is None:
        memories = [list(range(len(items)))]
    for memory in memories:
        some = [items[index] for index in memory]
        matrices, spare = [matrix for item in some for matrix in item.group.matrices], some[0].spare
        if is_healthy is None:
            torch._foreach_copy_(_rooms_of(some), matrices)
        elif spare is None:
            _choose(some, is_healthy)
        else:
            move_where(is_healthy, matrices, _rooms_of(some), spare)


def _choose(items: Sequence[Reconstruction], is_healthy: torch.Tensor) -> None:
    """Copy the matrices of each group to their rooms if `is_healthy`; else those stay."""
    # A choice, and no product with 0 or 1: what is not finite would stay so. Torch can't choose between many
    # tensors at once, so it takes a launch for each batch, or matrix.
    for item in items:
        matrices, rooms = item.group.matrices, item.errors or ()
        batch, batch_room = stacked(matrices), stacked(rooms)
        if batch is not None and batch_room is not None:
            matrices, rooms = [batch], [batch_room]
        for matrix, room in zip(matrices, rooms, strict=True):
            torch.where(is_healthy, matrix, room, out=room)


def _subtract_sent(items: Sequence[Reconstruction], is_healthy: torch.Tensor | None) -> None:
    """Take from all residuals what was sent; nothing if `is_healthy` is false."""
    for of_type in alike(items, lambda item: _rooms_of([item])[0].dtype):
        some = [items[index] for index in of_type]
        shapes = alike(some, lambda item: (_rooms_of([item])[0].shape, item.group.matrix_rank))
        batches = [[some[index] for index in shape] for shape in shapes]
        if is_healthy is None:
            # Those of one shape are joined by one launch, so that they are a batch; the others stay.
            batches.sort(key=lambda batch: len(batch) == 1)
        num_joined = sum(len(batch) for batch in batches if len(batch) > 1)
        lefts, rights = ([item.sent[side] for batch in batches for item in batch] for side in (0, 1))
        if is_healthy is not None:
            flat = as_one([*lefts, *rights])
            # Chosen, not multiplied by zero: in such a step they may be NaN. Zero times zero leaves all else.
            flat = torch.where(is_healthy, flat, number_on(flat.device, 0.0, flat.dtype))
            parts = split_as(flat, [each.shape for each in [*lefts, *rights]])
            lefts, rights = parts[: len(some)], parts[len(some) :]
        elif num_joined:
            for side in (lefts, rights):
                joined = side[:num_joined]
                side[:num_joined] = split_as(as_one(joined), [each.shape for each in joined])
        lefts_of, rights_of = iter(lefts), iter(rights)
        for batch in batches:
            _subtract_batch(batch, [next(lefts_of) for _ in batch], [next(rights_of) for _ in batch])


def _subtract_batch(
    items: Sequence[Reconstruction], lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]
) -> None:
    whole = stacked(_rooms_of(items))
    if whole is not None:
        left, right = (as_one(side).view(len(whole), *side[0].shape[1:]) for side in (lefts, rights))
        whole.baddbmm_(left.mT, right, alpha=-1)
        return
    for item, left, right in zip(items, lefts, rights, strict=True):
        batch = stacked(_rooms_of([item]))
        if batch is not None:
            batch.baddbmm_(left.mT, right, alpha=-1)
            continue
        for room, p, q in zip(_rooms_of([item]), left, right, strict=True):
            room.addmm_(p.t(), q, alpha=-1)


def _divide(
    items: Sequence[Reconstruction], loss_scale: torch.Tensor, is_healthy: torch.Tensor | None
) -> None:
    """Divide all residuals by the loss scale, or by one if `is_healthy` is false."""
    if is_healthy is not None:
        loss_scale = torch.where(is_healthy, loss_scale, number_on(loss_scale.device, 1.0, loss_scale.dtype))
    rooms = _rooms_of(items)
    for of_type in alike(rooms, lambda room: room.dtype):
        some = [rooms[index] for index in of_type]
        whole = one_without_gaps(some)
        if whole is not None:
            whole.div_(loss_scale)
        else:
            torch._foreach_div_(some, loss_scale)


def write(items: Sequence[Write]) -> list[torch.Tensor]:
    """Take a few launches for all items of one type."""
    is_healthy = items[0].is_healthy

    def written(some: list[Write]) -> Sequence[torch.Tensor]:
        targets = [item.target for item in some]
        healthy = [item.healthy for item in some if item.healthy is not None]
        if healthy:
            torch._foreach_copy_(targets, healthy)
            if is_healthy is not None:
                # One times a number is that number, to the bit. There is no operation that fills many tensors
                # where a condition holds.
                torch._foreach_mul_(targets, _one_or_nan(is_healthy, targets[0].dtype))
        old = [item.unhealthy for item in some if item.unhealthy is not None]
        if healthy or not old or is_healthy is None:
            return targets
        # The old ones are one already, if the step before has returned them.
        chosen = torch.where(is_healthy, as_one(targets), as_one(old))
        return split_as(chosen, [target.shape for target in targets])

    def kind(item: Write) -> tuple[torch.dtype, torch.dtype | None, bool]:
        return item.target.dtype, None if item.healthy is None else item.healthy.dtype, item.unhealthy is None

    return batched(items, kind, written)


def orthonormal_rows(items: Sequence[Rows]) -> list[torch.Tensor]:
    """Gram–Schmidt in coefficients, twice.

    The Gram matrices of all items, in float64, are factorised together by one Cholesky recursion over the few
    rows, none over matrices, and without reading anything back from the device.

    Cost: two float64 copies of each item, each read twice. On the CPU, if a device has no float64.
    """
    # On accelerators those of one shape are joined: they are copied, which costs less than launches. On the
    # CPU there is only the copy.
    indices = range(len(items))
    is_joined = accelerators.pays_per_launch(items[0].rows.device)
    shapes = alike(
        indices,
        lambda i: (items[i].rows.shape[1:], items[i].rows.dtype, items[i].drawn is None) if is_joined else i,
    )
    batches = [[items[index] for index in shape] for shape in shapes]
    # Twice, in float64: a Gram matrix squares the condition of the rows, and what one pass leaves of nearly
    # dependent ones the second takes out.
    once = _orthonormal_pass(_in_double(batches), are_scaled=False)
    twice = _orthonormal_pass(once, are_scaled=True)
    results = [
        basis.to(batch[0].rows).split_with_sizes([len(item.rows) for item in batch])
        for basis, batch in zip(twice, batches, strict=True)
    ]
    return in_order(shapes, results)


def _in_double(batches: Sequence[Sequence[Rows]]) -> list[torch.Tensor]:
    """Return the items of each batch as one tensor in float64, with drawn rows in place of dead ones."""
    device = batches[0][0].rows.device
    is_drawn = any(batch[0].drawn is not None for batch in batches)
    if is_drawn or not (accelerators.pays_per_launch(device) and accelerators.has_float64(device)):
        found = []
        for batch in batches:
            rows, drawn = [item.rows for item in batch], batch[0].drawn
            joined = torch.cat(rows) if len(rows) > 1 else rows[0]
            found.append(accelerators.in_float64(joined if drawn is None else replaced(joined, drawn)))
        return found
    # Joined as they are copied: else each batch would be read and written once more.
    given = [item.rows for batch in batches for item in batch]
    shapes = [(sum(len(item.rows) for item in batch), *batch[0].rows.shape[1:]) for batch in batches]
    flat = given[0].new_empty(sum(each.numel() for each in given), dtype=torch.float64)
    parts = split_as(flat, [each.shape for each in given])
    for of_type in alike(given, lambda each: each.dtype):
        torch._foreach_copy_([parts[index] for index in of_type], [given[index] for index in of_type])
    return split_as(flat, shapes)


def _orthonormal_pass(batches: Sequence[torch.Tensor], *, are_scaled: bool) -> list[torch.Tensor]:
    """Apply one factorisation of all Gram matrices; `are_scaled` if all rows are of length 1 or 0, nearly."""
    # Filled up with zero rows, which depend on nothing and nothing on them: so all shapes are one batch.
    max_rows = max(batch.shape[1] for batch in batches)
    # The Gram matrices alone are filled up, and not the long rows.
    missing = [max_rows - batch.shape[1] for batch in batches]
    products = [batch @ batch.mT for batch in batches]
    grams = torch.cat(
        [pad(each, (0, n, 0, n)) if n else each for each, n in zip(products, missing, strict=True)]
    )
    transforms = _inverse_cholesky(grams, are_scaled=are_scaled)
    return [
        transform[:, : each.shape[1], : each.shape[1]] @ each
        for transform, each in zip(
            transforms.split_with_sizes([len(batch) for batch in batches]), batches, strict=True
        )
    ]


def _inverse_cholesky(grams: torch.Tensor, *, are_scaled: bool) -> torch.Tensor:
    """Return the lower triangular W with W G Wᵀ = I, except for zero rows of W where G is dependent."""
    # By elimination in [G | I], which becomes [D Lᵀ | L⁻¹]; W is D^(−1/2) L⁻¹. Divided by infinity, a
    # dependent row takes nothing from those below it, where torch's own factorisation would fail, or give
    # NaN.
    rows = grams.shape[1]
    # Rows of length one first: whether one depends on others is a question of angles, not of lengths.
    scale = None if are_scaled else _above(grams.diagonal(dim1=1, dim2=2), 0.0).rsqrt()
    if scale is not None:
        grams = grams * scale.unsqueeze(2) * scale.unsqueeze(1)
    # Joined, so that one operation a row eliminates in both.
    identity = torch.eye(rows, dtype=grams.dtype, device=grams.device)
    both = torch.cat([grams, identity.expand_as(grams)], dim=2)
    for row in range(rows - 1):
        right = slice(row + 1, rows + row + 1)  # L⁻¹ has nothing yet in the columns behind
        # All matrices at once, row after row: each row is what those above it have left.
        over_pivot = both[:, row, right] / _above(both[:, row, row : row + 1], DEPENDENT_BELOW)
        both[:, row + 1 :, right].addcmul_(
            both[:, row + 1 :, row].unsqueeze(2), over_pivot.unsqueeze(1), value=-1
        )
    roots = _above(both.diagonal(dim1=1, dim2=2), DEPENDENT_BELOW).rsqrt()
    inverse = both[:, :, rows:] * roots.unsqueeze(2)
    return inverse if scale is None else inverse.mul_(scale.unsqueeze(1))


def _above(values: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the values that are above a limit, and infinity for the others: one operation."""
    return threshold(values, limit, torch.inf)


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether all is finite: NaN wins every maximum."""
    # Of a NaN no comparison is true.
    return torch.stack(list(torch._foreach_norm(list(tensors), torch.inf))).amax() < torch.inf


def _one_or_nan(is_healthy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # One over one, or zero over zero.
    return torch.true_divide(is_healthy, is_healthy).to(dtype)


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows that fit in a core's cache; all rows at once on an accelerator."""
    rows, columns = matrix.shape
    is_cut = not accelerators.pays_per_launch(matrix.device)
    step = max(1, BLOCK_BYTES // (matrix.itemsize * columns)) if is_cut else rows
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _pays_per_launch(items: Sequence[Asked | Residuals | Reconstruction]) -> bool:
    return accelerators.pays_per_launch(items[0].group.matrices[0].device)


def _batch_for(group: MatrixGroup) -> torch.Tensor | None:
    """Return all matrices as one tensor, a view, if that serves; else None."""
    return stacked(group.matrices) if accelerators.pays_per_launch(group.matrices[0].device) else None


LOW_RANK = Kernels(
    frozenset({torch.float32, torch.float64}),
    products=products,
    projections=projections,
    subtract_own=subtract_own,
    residual_rooms=residual_rooms,
    reconstruct=reconstruct,
    write=write,
    orthonormal_rows=orthonormal_rows,
    all_finite=all_finite,
)
