"""PowerSGD on a whole bucket at once, seen as one square matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from thinwire.algorithms.base import Bucket, BucketPlan, Memory
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.factors import FactorMessages
from thinwire.algorithms.lowrank.plan import LowRankPlan, by_label
from thinwire.algorithms.lowrank.slots import square
from thinwire.algorithms.requests import AllFinite, Commit, Jointly, Requests
from thinwire.kernels.dispatch import orthonormal_bases, products, projections, reconstruct
from thinwire.kernels.matrices import Factors, MatmulBatch, MatrixGroup, Reconstruction, Rows, round_all_into
from thinwire.plan import ParameterSpec
from thinwire.tensors.layout import concat_view


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRank):
    """Send two low-rank factors of a whole bucket, padded with zeros to one square matrix.

    Fewer bytes than `PowerSGD` on models of many layers, at a loss of accuracy: the rows of the square are
    not the rows of any layer. Meant for rank 1. The settings are `PowerSGD`'s, with `matrix_rank=1` by
    default.

    The error is kept by parameter and outlives a change of buckets; the factor belongs to the bucket. A new
    bucket starts from random factors: in DDP's second step, since DDP rebuilds its buckets after the first,
    and in the first step after a state was loaded, unless its buckets are those of the state.

    Cost per step: two rounds of r · √elements each; an fp32 error of the size of the gradients (fp64 of fp64)
    and, of gradients in 16 bits, an fp32 copy until the step's end; one host synchronisation, for the finite
    check (none without `host_check`).

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    Examples:
        >>> specs = [ParameterSpec("weight", (64, 32), (32, 1), torch.float32)]
        >>> BatchedPowerSGD().plan(specs).routes[0].matrix_shape
        (46, 46)
    """

    matrix_rank: int = 1

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        """One route for the bucket, or one for each parameter if uncompressed."""
        numel = sum(spec.numel for spec in specs)
        shape = square(numel)
        matrix_rank = self.matrix_rank_of(shape, specs[0].dtype) if numel else None
        if matrix_rank is None:
            routes = tuple(
                self.uncompressed_route(spec, self.uncompressed_dtype(spec.dtype)) for spec in specs
            )
        else:
            routes = (self.compressed_route(specs, shape, matrix_rank),)
        return BatchedPlan(tuple(specs), routes, self)


@dataclass(frozen=True)
class BatchedPlan(LowRankPlan):
    """A bucket as two factors."""

    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        """Two rounds for each power iteration."""
        (route,) = self.compressed
        assert route.matrix_shape is not None
        assert route.matrix_rank is not None
        label, (rows, columns), scale = route.label, route.matrix_shape, bucket.loss_scale
        # The bucket itself, unless it is of 16 bits: it takes up the residual, and the mean, in place.
        flat = bucket.flat.to(bucket.specs[0].memory_dtype)
        residual = _residual(bucket, memory)
        matrices = _rows(flat, columns)
        errors = [] if residual is None else _rows(residual, columns)
        parts = [
            MatrixGroup([label], [matrix], errors[index : index + 1] or [None], route.matrix_rank)
            for index, matrix in enumerate(matrices)
        ]
        # All full rows where they lie, and a copy of the last one if the bucket ends within it: to fill up
        # the whole square would copy the bucket.
        heights = [len(matrix) for matrix in matrices]
        messages = FactorMessages(self.config.message_dtype(bucket.flat.dtype))
        # One part is enough: both are rows of one square, and have its right factor in common.
        (right,) = starts = self.bases.of(memory, parts[:1], left=False)
        for iteration in range(self.config.power_iterations):
            lefts = products([MatmulBatch(part, right, scale, iteration == 0) for part in parts])
            # Fill up to the whole square: with its rows of zeros the message has the length of the plan.
            left = pad(torch.cat(lefts, dim=2), (0, rows - sum(heights)))
            _, (mean,) = yield from messages.average([left], as_sent=False)
            (left,) = yield Jointly(orthonormal_bases, [Rows(mean)])
            lefts = list(left[:, :, : sum(heights)].split_with_sizes(heights, dim=2))
            # P̂ᵀ M of both parts' rows adds up to that of the whole square.
            asked = [MatmulBatch(*pair, scale, add_error=False) for pair in zip(parts, lefts, strict=True)]
            owns = projections(asked)
            own = sum(owns[1:], start=owns[0])
            (own,), (mean,) = yield from messages.average([own], as_sent=True)
            if iteration + 1 < self.config.power_iterations:
                (right,) = yield Jointly(orthonormal_bases, [Rows(mean)])
        if self.config.error_feedback and residual is None:
            residual = torch.zeros_like(flat)  # only now: before the first step there is nothing to add
            errors = _rows(residual, columns)
        kept = yield from self.to_remember(memory, [[label]], [[Factors(left, own, mean)]], bucket)
        is_healthy = yield Commit(AllFinite(tuple(messages.received)), commits_on_device=True)
        yield from self.remember(memory, kept, by_label([[label]], starts), is_healthy)
        reconstructions = [
            Reconstruction(
                part, errors[index : index + 1] or None, [Factors(basis, own, mean)], scale, is_healthy
            )
            for index, (part, basis) in enumerate(zip(parts, lefts, strict=True))
        ]
        yield Jointly(reconstruct, reconstructions)
        _write_last_row(flat, matrices[-1])
        if residual is not None:
            _write_last_row(residual, errors[-1])
        if flat is not bucket.flat:
            round_all_into([(bucket.flat, flat, residual)], scale, is_healthy)
        if residual is not None:
            names = (spec.name for spec in bucket.specs)
            memory[ERROR].update(zip(names, bucket.split(residual), strict=True))


def _rows(flat: torch.Tensor, columns: int) -> list[torch.Tensor]:
    """Return all full rows of a flat tensor, a view, and the elements beyond, padded with zeros to a row."""
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


def _residual(bucket: Bucket, memory: Memory) -> torch.Tensor | None:
    """Return the residual of a bucket, flat; None if there is none."""
    names = [spec.name for spec in bucket.specs]
    if not any(name in memory[ERROR] for name in names):
        return None
    nothing = bucket.flat.new_zeros(1, dtype=bucket.specs[0].memory_dtype)
    errors = [memory[ERROR].get(spec.name, nothing.expand(spec.numel)) for spec in bucket.specs]
    # In place if memory has it in one piece, as it does once there was a step with this bucket.
    return concat_view(errors)
