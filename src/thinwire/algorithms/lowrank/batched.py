"""PowerSGD on a whole bucket at once, seen as one square matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.algorithms.base import Bucket, BucketPlan, Memory
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.factors import BucketMatrices, FactorMessages
from thinwire.algorithms.lowrank.plan import LowRankPlan
from thinwire.algorithms.lowrank.slots import square
from thinwire.algorithms.requests import AllFinite, Commit, Jointly, Requests
from thinwire.kernels.dispatch import kernels_for
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
    and copies of both until the step's end; one host synchronisation, for the finite check (none without
    `host_check`).

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
    """A bucket as two factors: M, its gradients padded with zeros to a square, becomes P Qᵀ."""

    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        """Average P = M Q and, with its columns orthonormal, Q = Mᵀ P: two rounds for each iteration."""
        (route,) = self.compressed
        assert route.matrix_shape is not None
        assert route.matrix_rank is not None
        label, scale = route.label, bucket.loss_scale
        matrix = _square(bucket.flat.to(bucket.specs[0].memory_dtype), route.matrix_shape)
        error = _residual(bucket, memory, route.matrix_shape)
        group = MatrixGroup([label], [matrix], [error], route.matrix_rank)
        kernels, device = kernels_for(matrix, route.matrix_rank), matrix.device
        M = BucketMatrices([group], kernels, device)
        messages = FactorMessages(self.message_dtype, self.rooms)
        (right,) = starts = self.bases.of(memory, M, left=False)
        for iteration in range(self.config.power_iterations):
            left = kernels.products([MatmulBatch(group, right, scale, iteration == 0)])
            _, (mean,) = yield from messages.average(left, as_sent=False)
            (left_basis,) = yield Jointly(kernels.orthonormal_rows, [Rows(mean)], device)
            own = kernels.projections([MatmulBatch(group, left_basis, scale, add_error=False)])
            (own_right,), (mean,) = yield from messages.average(own, as_sent=True)
            if iteration + 1 < self.config.power_iterations:
                (right,) = yield Jointly(kernels.orthonormal_rows, [Rows(mean)], device)
        if self.config.error_feedback and error is None:
            error = torch.zeros_like(matrix)  # only now: before the first step there is nothing to add
        factors = [Factors((left_basis, own_right), (left_basis, mean))]
        kept = yield from self.to_remember(memory, M, [factors], scale)
        is_healthy = yield Commit(AllFinite(tuple(messages.received)), commits_on_device=True)
        errors = None if error is None else [error]
        items = [Reconstruction(group, errors, factors, scale, is_healthy)]
        yield Jointly(kernels.reconstruct, items, device)
        yield from self.remember(memory, kept, M, starts, is_healthy)
        numel = bucket.flat.numel()
        mean_gradients = matrix.view(-1)[:numel]
        residual = None if error is None else error.view(-1)[:numel]
        if bucket.flat.dtype == matrix.dtype:
            bucket.flat.copy_(mean_gradients)
        else:
            round_all_into([(bucket.flat, mean_gradients, residual)], scale, is_healthy)
        if residual is not None:
            names = (spec.name for spec in bucket.specs)
            memory[ERROR].update(zip(names, bucket.split(residual), strict=True))


def _square(flat: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a copy as a matrix of a shape, padded with zeros."""
    matrix = flat.new_empty(shape)  # torch's `pad` would fill all of it first
    matrix.view(-1)[: flat.numel()].copy_(flat)
    matrix.view(-1)[flat.numel() :].zero_()
    return matrix


def _residual(bucket: Bucket, memory: Memory, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return the residual of a bucket as a matrix of a shape; None if there is none."""
    names = [spec.name for spec in bucket.specs]
    if not any(name in memory[ERROR] for name in names):
        return None
    nothing = bucket.flat.new_zeros(1, dtype=bucket.specs[0].memory_dtype)
    errors = [memory[ERROR].get(spec.name, nothing.expand(spec.numel)) for spec in bucket.specs]
    flat = concat_view(errors)
    if flat.untyped_storage().nbytes() == shape[0] * shape[1] * flat.element_size():
        # It lies in the square that the step before has left. Behind it is what that has not sent of zeros.
        matrix = flat.as_strided(shape, (shape[1], 1))
        matrix.view(-1)[flat.numel() :].zero_()
        return matrix
    return _square(flat, shape)
