"""Kernels made of PyTorch's products: for every device, type and matrix rank.

A matrix is far larger than its factors, and products as thin as these wait for memory: what counts on the CPU
is how often a matrix is read and written. So it is taken in blocks of rows that stay in a core's cache.

On accelerators what counts for small matrices is the number of operations: matrices of one shape that lie at
equal distances, as those of a model's equal layers do in a bucket, are one batch, and what is done to each
element is done to the matrices of all groups by one operation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad, threshold

from thinwire.kernels.base import Kernels
from thinwire.kernels.device_cache import number_on
from thinwire.kernels.matrices import (
    DEPENDENT_BELOW,
    Asked,
    Factors,
    MatrixGroup,
    Reconstruction,
    Write,
    add_errors,
    add_scaled,
    joined,
    parted,
    replaced,
    shape_groups,
)
from thinwire.kernels.residuals import move_where
from thinwire.tensors import accelerators
from thinwire.tensors.layout import as_one, fill_alike, in_one_piece, stacked

# A block of rows stays in a core's cache between the products of one pass.
BLOCK_BYTES = 512 * 1024


class TorchKernels(Kernels):
    """PyTorch's products, a group after the other; see `Kernels` for what each method does."""

    gradient_types = (torch.float32, torch.float64)
    lays_by_shape = True

    def products(self, items: Sequence[Asked]) -> list[torch.Tensor]:
        """As `Kernels.products`; every matrix is read once, and written once where its residual is added."""
        add_error = self._errors_to_add(items)
        return [
            _products(group, right, loss_scale, add_error=add_error) for group, right, loss_scale, _ in items
        ]

    def projections(self, items: Sequence[Asked]) -> list[torch.Tensor]:
        """As `Kernels.projections`; every matrix is read once, and updated first if its residual is added."""
        groups, lefts = [item.group for item in items], [item.factor for item in items]
        add_error = self._errors_to_add(items)
        owns = _room_by_shape(groups, lefts) if _pay_per_launch(groups) else None
        results = []
        for index, (group, left, loss_scale, _) in enumerate(items):
            batch = _batch_for(group)
            if add_error:
                add_errors(group, loss_scale)
            columns = group.matrices[0].shape[1]
            own = left.new_empty(len(left), group.matrix_rank, columns) if owns is None else owns[index]
            results.append(own)
            if batch is not None:
                torch.bmm(left, batch, out=own)
                continue
            for matrix, p, projection in zip(group.matrices, left, own, strict=True):
                torch.mm(p, matrix, out=projection)
        return results

    def reconstruct(self, items: Sequence[Reconstruction]) -> None:
        """As `Kernels.reconstruct`; every matrix is read and written once, and its error written once.

        On accelerators every matrix once more.
        """
        if items[0].is_healthy is not None or _pay_per_launch([item.group for item in items]):
            self._reconstruct_all(items)
            return
        for group, errors, found, loss_scale, *_ in items:
            sent = found[-1].pair(found[-1].own)
            _reconstruct_each(group, errors, sent, [term.pair(term.mean) for term in found], loss_scale)

    def _errors_to_add(self, items: Sequence[Asked]) -> bool:
        """Return whether errors are to be added group by group; on accelerators they are added here."""
        groups, first = [item.group for item in items], items[0]
        if first.add_error and _pay_per_launch(groups):
            _add_all_errors(groups, first.loss_scale)
            return False
        return first.add_error

    def _reconstruct_all(self, items: Sequence[Reconstruction]) -> None:
        """Do it for all groups, with few launches."""
        loss_scale, is_healthy = items[0].loss_scale, items[0].is_healthy
        groups, terms = [item.group for item in items], [item.terms for item in items]
        kept = [
            _Kept(item.group, item.errors, item.terms[-1].pair(item.terms[-1].own), item.spare)
            for item in items
            if item.errors is not None
        ]
        if kept:
            # What was sent is taken from the residuals, and not before from the matrices: those lie in their
            # buckets, residuals of one shape side by side.
            _move(kept, is_healthy)
            _subtract_sent(kept, is_healthy)
            if loss_scale is not None:
                _divide(kept, loss_scale, is_healthy)
        # The residuals are out of the matrices; now those may be overwritten.
        means = [[term.pair(term.mean) for term in found] for found in terms]
        if is_healthy is not None:
            # Copies of the small factors: a basis may be the one that the next step starts from.
            lefts = [pairs[0][0] for pairs in means]
            spoiled = torch._foreach_mul(lefts, _one_or_nan(is_healthy, lefts[0].dtype))
            means = [[(left, pairs[0][1]), *pairs[1:]] for left, pairs in zip(spoiled, means, strict=True)]
        for group, pairs in zip(groups, means, strict=True):
            batch = _batch_for(group)
            if batch is None:
                _reconstruct_each(group, None, pairs[-1], pairs, loss_scale)
                continue
            torch.bmm(pairs[0][0].mT, pairs[0][1], out=batch)
            for left, right in pairs[1:]:
                batch.baddbmm_(left.mT, right)

    def subtract_own(self, groups: Sequence[MatrixGroup], factors: Sequence[Factors]) -> None:
        """As `Kernels.subtract_own`; every matrix is read once and written once."""
        for group, found in zip(groups, factors, strict=True):
            batch = _batch_for(group)
            if batch is not None:
                left, right = found.pair(found.own)
                batch.baddbmm_(left.mT, right, alpha=-1)
                continue
            for matrix, left, right in zip(group.matrices, *found.pair(found.own), strict=True):
                for block in _row_blocks(matrix):
                    matrix[block].addmm_(left[:, block].t(), right, alpha=-1)

    def write(self, items: Sequence[Write], is_healthy: torch.Tensor | None) -> list[torch.Tensor]:
        """As `Kernels.write`, with a few launches for all items of one type."""
        results = [item.target for item in items]
        overwritten: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        kept: dict[object, list[tuple[int, torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for index, (target, healthy, unhealthy) in enumerate(items):
            if healthy is not None:
                overwritten[target.device, target.dtype, healthy.dtype].append((target, healthy))
            elif unhealthy is not None:
                kept[target.device, target.dtype].append((index, target, unhealthy))
        for alike in overwritten.values():
            targets = [target for target, _ in alike]
            torch._foreach_copy_(targets, [healthy for _, healthy in alike])
            if is_healthy is not None:
                # One times a number is that number, to the bit.
                # To fill where a condition holds there is no operation on many tensors.
                torch._foreach_mul_(targets, _one_or_nan(is_healthy, targets[0].dtype))
        if is_healthy is None:
            return results
        for some in kept.values():
            indices, new, old = zip(*some, strict=True)
            # The old ones are one already, where the step before has returned them.
            chosen = torch.where(is_healthy, as_one(new), as_one(old))
            parts = chosen.split_with_sizes([each.numel() for each in new])
            for index, target, part in zip(indices, new, parts, strict=True):
                results[index] = part.view_as(target)
        return results

    def orthonormal_rows(
        self, batches: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As `Kernels.orthonormal_rows`, by Gram–Schmidt in coefficients, twice.

        The Gram matrices of all batches of a device, in float64, are factorised together by one Cholesky
        recursion over the few rows, none over matrices, and without reading anything back from the device.

        Cost: two float64 copies of each batch, each read twice. On the CPU, where a device has no float64.
        """
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for index, batch in enumerate(batches):
            by_device[batch.device].append(index)
        bases: dict[int, torch.Tensor] = {}
        for indices in by_device.values():
            here = [batches[index] for index in indices]
            groups = shape_groups(here)
            if drawn is not None:
                wholes = [
                    accelerators.in_float64(replaced(joined(here, group), drawn[indices[group[0]]]))
                    for group in groups
                ]
            else:
                wholes = _joined_in_double(here, groups)
            # Twice, in float64: a Gram matrix squares the condition of the rows, and what one pass leaves of
            # nearly dependent ones the second takes out.
            once = _orthonormal_pass(wholes, are_scaled=False)
            twice = _orthonormal_pass(once, are_scaled=True)
            results = [basis.to(here[group[0]]) for basis, group in zip(twice, groups, strict=True)]
            bases.update(zip(indices, parted(results, here, groups), strict=True))
        return [bases[index] for index in range(len(batches))]

    def all_finite(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `Kernels.all_finite`; NaN wins every maximum."""
        # Of a NaN no comparison is true.
        return torch.stack(list(torch._foreach_norm(list(tensors), torch.inf))).amax() < torch.inf


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
                add_scaled(matrix[block], error[block], loss_scale)
            # Not M Qᵀ: of that MKL's last bits depend on where in a bucket the matrix lies.
            torch.mm(q, matrix[block].t(), out=p[:, block])
    return left


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
            # Block by block, residual and mean: both while the block is still in cache.
            # The residual first: then the mean takes the place of what it is made of.
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


class _Kept(NamedTuple):
    """A group, where its residuals go, the two factors of what was sent of it, and their spare row."""

    group: MatrixGroup
    rooms: Sequence[torch.Tensor]
    sent: tuple[torch.Tensor, torch.Tensor]
    spare: torch.Tensor | None


def _move(kept: Sequence[_Kept], is_healthy: torch.Tensor | None) -> None:
    """Copy all matrices to their rooms; where `is_healthy` is false, those stay."""
    if is_healthy is None:
        torch._foreach_copy_(
            [room for each in kept for room in each.rooms],
            [matrix for each in kept for matrix in each.group.matrices],
        )
        return
    by_spare: dict[object, list[_Kept]] = defaultdict(list)
    for each in kept:
        by_spare[None if each.spare is None else each.spare.untyped_storage()._cdata].append(each)
    for alike in by_spare.values():
        matrices = [matrix for each in alike for matrix in each.group.matrices]
        rooms = [room for each in alike for room in each.rooms]
        if alike[0].spare is None:
            _choose(alike, is_healthy)
        else:
            move_where(is_healthy, matrices, rooms, alike[0].spare)


def _choose(kept: Sequence[_Kept], is_healthy: torch.Tensor) -> None:
    """Copy the matrices of each group to their rooms where `is_healthy`; else those stay."""
    # A choice, and no product with 0 or 1: what is not finite would stay so. Torch can't choose between many
    # tensors at once, so it takes a launch for each piece of memory: a bucket, or a batch, or a matrix.
    by_memory: dict[object, list[_Kept]] = defaultdict(list)
    for each in kept:
        memory = [tensor.untyped_storage()._cdata for tensor in (each.group.matrices[0], each.rooms[0])]
        by_memory[tuple(memory)].append(each)
    for beside in by_memory.values():
        rests = [matrix for each in beside for matrix in each.group.matrices]
        whole = fill_alike(rests, [room for each in beside for room in each.rooms])
        if whole is not None:
            torch.where(is_healthy, *whole, out=whole[1])
            continue
        for each in beside:
            batch, batch_room = stacked(each.group.matrices), stacked(each.rooms)
            if batch is not None and batch_room is not None:
                torch.where(is_healthy, batch, batch_room, out=batch_room)
                continue
            for rest, room in zip(each.group.matrices, each.rooms, strict=True):
                torch.where(is_healthy, rest, room, out=room)


def _subtract_sent(kept: Sequence[_Kept], is_healthy: torch.Tensor | None) -> None:
    """Take from all residuals what was sent; nothing where `is_healthy` is false."""
    by_type: dict[object, dict[object, list[_Kept]]] = defaultdict(lambda: defaultdict(list))
    for each in kept:
        room = each.rooms[0]
        by_type[room.device, room.dtype][room.shape, each.group.matrix_rank].append(each)
    for by_shape in by_type.values():
        # Those of one shape one after the other: then they are a batch.
        order = [each for alike in by_shape.values() for each in alike]
        sides = [[each.sent[side] for each in order] for side in (0, 1)]
        if is_healthy is not None:
            flat = as_one([*sides[0], *sides[1]])
            # Chosen, not multiplied by zero: of such a step they may be NaN. Zero times zero leaves all else.
            flat = torch.where(is_healthy, flat, number_on(flat.device, 0.0, flat.dtype))
            parts = _views(flat, [*sides[0], *sides[1]])
            sides = [parts[: len(order)], parts[len(order) :]]
        else:
            # Joined by one launch; those that are alone of their shape stay where they are.
            beside = [len(alike) > 1 for alike in by_shape.values() for _ in alike]
            for factors in sides if any(beside) else []:
                some = [factor for factor, is_joined in zip(factors, beside, strict=True) if is_joined]
                joint = iter(_views(as_one(some), some))
                factors[:] = [
                    next(joint) if is_joined else factor
                    for factor, is_joined in zip(factors, beside, strict=True)
                ]
        lefts, rights = map(iter, sides)
        for alike in by_shape.values():
            rooms = [room for each in alike for room in each.rooms]
            batches = [(each.rooms, next(lefts), next(rights)) for each in alike]
            whole = stacked(rooms)
            if whole is not None:
                left, right = as_one([p for _, p, _ in batches]), as_one([q for _, _, q in batches])
                whole.baddbmm_(
                    left.view(len(rooms), -1, whole.shape[1]).mT,
                    right.view(len(rooms), -1, whole.shape[2]),
                    alpha=-1,
                )
                continue
            for of_group, left, right in batches:
                batch = stacked(of_group)
                if batch is not None:
                    batch.baddbmm_(left.mT, right, alpha=-1)
                    continue
                for room, p, q in zip(of_group, left, right, strict=True):
                    room.addmm_(p.t(), q, alpha=-1)


def _views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parts of a flat tensor of the shapes of tensors, one after the other."""
    parts = flat.split_with_sizes([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _divide(kept: Sequence[_Kept], loss_scale: torch.Tensor, is_healthy: torch.Tensor | None) -> None:
    """Divide all residuals by the loss scale, or by one where `is_healthy` is false."""
    if is_healthy is not None:
        loss_scale = torch.where(is_healthy, loss_scale, number_on(loss_scale.device, 1.0, loss_scale.dtype))
    by_type: dict[object, list[torch.Tensor]] = defaultdict(list)
    for each in kept:
        by_type[each.rooms[0].device, each.rooms[0].dtype].extend(each.rooms)
    for rooms in by_type.values():
        whole = in_one_piece(rooms)
        # Not with what lies between: that is another's.
        if whole is not None and whole.numel() == sum(room.numel() for room in rooms):
            whole.div_(loss_scale)
        else:
            torch._foreach_div_(rooms, loss_scale)


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


def _pay_per_launch(groups: Sequence[MatrixGroup]) -> bool:
    return all(accelerators.pays_per_launch(group.matrices[0].device) for group in groups)


def _room_by_shape(groups: Sequence[MatrixGroup], lefts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return where to write the projections of groups: those of one shape one after the other."""
    # So that they need not be joined when they are taken from the residuals.
    order: dict[object, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        order[lefts[index].dtype, group.matrices[0].shape, group.matrix_rank].append(index)
    shapes = {
        index: (len(groups[index].matrices), groups[index].matrix_rank, groups[index].matrices[0].shape[1])
        for some in order.values()
        for index in some
    }
    by_type: dict[torch.dtype, list[int]] = defaultdict(list)
    for index in shapes:
        by_type[lefts[index].dtype].append(index)
    rooms: dict[int, torch.Tensor] = {}
    for some in by_type.values():
        sizes = [math.prod(shapes[index]) for index in some]
        parts = lefts[some[0]].new_empty(sum(sizes)).split_with_sizes(sizes)
        rooms.update((index, part.view(shapes[index])) for index, part in zip(some, parts, strict=True))
    return [rooms[index] for index in range(len(groups))]


def _batch_for(group: MatrixGroup) -> torch.Tensor | None:
    """Return all matrices as one tensor, a view, if that serves; else None."""
    return stacked(group.matrices) if accelerators.pays_per_launch(group.matrices[0].device) else None


def _add_all_errors(groups: Sequence[MatrixGroup], loss_scale: torch.Tensor | None) -> None:
    """As `add_errors`, of all groups by one operation; with a loss scale by one for each matrix."""
    known = [
        (matrix, error)
        for group in groups
        for matrix, error in zip(group.matrices, group.errors, strict=True)
        if error is not None
    ]
    if loss_scale is not None:
        # One by one: what an operation on many tensors scales by is a number, which the host would have to
        # read.
        for matrix, error in known:
            matrix.addcmul_(error, loss_scale.to(error.dtype))
    elif known:
        torch._foreach_add_([matrix for matrix, _ in known], [error for _, error in known])


def _joined_in_double(batches: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """As `joined`, of all groups, in float64."""
    device = batches[0].device
    if not (accelerators.pays_per_launch(device) and accelerators.has_float64(device)):
        return [accelerators.in_float64(joined(batches, group)) for group in groups]
    # Joined as they are copied: else each group would be read and written once more.
    like = [batches[index] for group in groups for index in group]
    flat = like[0].new_empty(sum(each.numel() for each in like), dtype=torch.float64)
    by_type: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for part, each in zip(_views(flat, like), like, strict=True):
        by_type[each.dtype].append((part, each))
    for some in by_type.values():
        torch._foreach_copy_([part for part, _ in some], [each for _, each in some])
    sizes = [sum(batches[index].numel() for index in group) for group in groups]
    return [
        part.view(-1, *batches[group[0]].shape[1:])
        for part, group in zip(flat.split_with_sizes(sizes), groups, strict=True)
    ]


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
