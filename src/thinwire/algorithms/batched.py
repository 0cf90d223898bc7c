"""PowerSGD on a whole bucket at once, seen as one square matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import pad

from thinwire.algorithms.base import Bucket, Memory, Rounds
from thinwire.algorithms.lowrank import LowRank
from thinwire.algorithms.matrices import Factors, MatrixGroup, remember, round_into, starting_bases
from thinwire.algorithms.orthonormal import orthonormal_rows
from thinwire.algorithms.passes import products, projections, settle
from thinwire.algorithms.rounds import as_sent, packed, unpacked
from thinwire.plan import ParameterSpec, Plan, Route

__all__ = ["BatchedPowerSGD", "square"]

# Rows that begin with a cache line are read and written faster; from here on that makes no message longer.
LINE_ELEMENTS = 16
WIDE_COLUMNS = 1024


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRank):
    """Send two low-rank factors of a whole bucket, padded with zeros to one square matrix.

    Fewer bytes than `PowerSGD` on models of many layers, at a loss of accuracy: the rows of the square are
    not the rows of any layer. Meant for rank 1. The settings are `PowerSGD`'s, with `matrix_rank=1` by
    default.

    The error is kept by parameter and outlives a change of buckets; the factor belongs to the bucket. A state
    tells the buckets, and the first step after it is loaded is made with them, whatever DDP's are; so is a
    run's second step with those of its first, since DDP rebuilds its buckets in between. Such a step copies
    the gradients to and fro and sends nothing during the backward pass.

    Cost a step: two rounds of r · √elements each; an fp32 error of the size of the gradients (fp64 of fp64)
    and, of gradients in 16 bits, an fp32 copy until the step's end; one host synchronisation, for the finite
    check (none without `host_check`).

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    Examples:
        >>> specs = [ParameterSpec("weight", (64, 32), (32, 1), torch.float32)]
        >>> BatchedPowerSGD().plan(specs).routes[0].matrix_shape
        (46, 46)
    """

    sees_buckets = True

    matrix_rank: int = 1

    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """One route for the bucket, or one a parameter where it is not worth compressing."""
        numel = sum(spec.numel for spec in specs)
        shape = square(numel)
        matrix_rank = self.matrix_rank_of(shape, specs[0].dtype) if numel else None
        if matrix_rank is None:
            return self.whole_plan(specs)
        before = sum(spec.gradient_bytes for spec in specs)
        after = self.factor_bytes(shape, matrix_rank, specs[0].dtype)
        return Plan((Route(tuple(spec.name for spec in specs), before, after, shape, matrix_rank),))

    def exchange(self, bucket: Bucket, memory: Memory) -> Rounds:
        """Two rounds a power iteration; one in the warm-up, and where there is nothing to compress."""
        routes = self.plan(bucket.specs).routes
        shape, matrix_rank = (routes[0].matrix_shape, routes[0].matrix_rank) if routes else (None, None)
        if self.travels_whole(bucket, memory) or shape is None or matrix_rank is None:
            yield from self.exchange_uncompressed(bucket, memory)
            return
        label, (rows, columns), scale = routes[0].label, shape, bucket.loss_scale
        flat = bucket.flat.to(bucket.specs[0].memory_dtype)
        owed = _owed(bucket, memory)
        matrices = _rows(flat, columns)
        errors = [] if owed is None else _rows(owed, columns)
        parts = [
            MatrixGroup([label], [matrix], errors[index : index + 1] or [None], matrix_rank)
            for index, matrix in enumerate(matrices)
        ]
        heights = [len(matrix) for matrix in matrices]
        dtype = self.message_dtype(bucket.flat.dtype)
        (right,) = starting_bases(self, memory, parts[:1], left=False)
        for iteration in range(self.power_iterations):
            lefts = [products(part, right, scale, add_error=iteration == 0) for part in parts]
            left = pad(torch.cat(lefts, dim=2), (0, rows - sum(heights)))
            mean = yield packed([left], dtype)
            (left,) = orthonormal_rows(unpacked(mean, like=[left]))
            lefts = list(left[:, :, : sum(heights)].split_with_sizes(heights, dim=2))
            owns = [projections(part, basis) for part, basis in zip(parts, lefts, strict=True)]
            own = sum(owns[1:], start=owns[0])
            message = packed([own], dtype)
            (own,) = as_sent(self, message, [own])
            (mean,) = unpacked((yield message), like=[own])
            if iteration + 1 < self.power_iterations:
                (right,) = orthonormal_rows([mean])
        if self.error_feedback and owed is None:
            owed = torch.empty_like(flat)
            errors = _rows(owed, columns)
        yield None
        for index, (part, basis) in enumerate(zip(parts, lefts, strict=True)):
            settle(part, errors[index : index + 1] or None, [Factors(basis, own, mean)], scale)
        _write_last_row(flat, matrices[-1])
        if owed is not None:
            _write_last_row(owed, errors[-1])
        if flat is not bucket.flat:
            round_into(bucket.flat, flat, owed, scale)
        if owed is not None:
            memory.error.update(zip((spec.name for spec in bucket.specs), bucket.split(owed), strict=True))
        remember(self, memory, [label], [Factors(left, own, mean)], scale)


def square(numel: int) -> tuple[int, int]:
    """(rows, columns) of the smallest square that holds so many elements; if large, of whole cache lines."""
    side = math.isqrt(numel - 1) + 1 if numel else 0
    if side < WIDE_COLUMNS:
        return side, side
    columns = -(-side // LINE_ELEMENTS) * LINE_ELEMENTS
    return -(-numel // columns), columns


def _rows(flat: torch.Tensor, columns: int) -> list[torch.Tensor]:
    """All full rows of a flat tensor, a view; and the elements beyond, padded with zeros to one more row."""
    whole = flat.numel() - flat.numel() % columns
    rows = [flat[:whole].view(-1, columns)]
    if whole < flat.numel():
        rows.append(pad(flat[whole:], (0, columns - (flat.numel() - whole))).view(1, columns))
    return rows


def _write_last_row(flat: torch.Tensor, row: torch.Tensor) -> None:
    """Write back the last row of `_rows`, if that is a copy."""
    beyond = flat.numel() % row.shape[1]
    if beyond:
        flat[-beyond:] = row[0, :beyond]


def _owed(bucket: Bucket, memory: Memory) -> torch.Tensor | None:
    """What is owed on a bucket, as long as it is; None if nothing. In place, if memory has it in one piece.

    It has, once there was a step with this bucket.
    """
    names = [spec.name for spec in bucket.specs]
    if not any(name in memory.error for name in names):
        return None
    nothing = bucket.flat.new_zeros(1, dtype=bucket.specs[0].memory_dtype)
    errors = [memory.error.get(spec.name, nothing.expand(spec.numel)) for spec in bucket.specs]
    storages = {error.untyped_storage().data_ptr() for error in errors}
    ends = accumulate((error.numel() for error in errors), initial=errors[0].storage_offset())
    if len(storages) == 1 and [error.storage_offset() for error in errors] == list(ends)[:-1]:
        return errors[0].as_strided((bucket.flat.numel(),), (1,))
    return torch.cat(errors)
