"""PowerSGD on a whole bucket at once, seen as one square matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.algorithms.base import Bucket, Memory, Rounds
from thinwire.algorithms.lowrank import LowRank
from thinwire.algorithms.matrices import MatrixGroup, add_scaled, remember, round_into
from thinwire.algorithms.passes import settle
from thinwire.algorithms.rounds import approximate
from thinwire.plan import ParameterSpec, Plan, Route

__all__ = ["BatchedPowerSGD"]


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRank):
    """Send two low-rank factors of a whole bucket, padded with zeros to one square matrix.

    Fewer, larger products than `PowerSGD`, at a loss of accuracy: the rows of the square are not the
    rows of any layer. Meant for rank 1. The settings are `PowerSGD`'s, with `matrix_rank=1` by default.

    The error is kept by parameter and outlives a change of buckets; the factor belongs to the bucket
    and starts anew when DDP rebuilds its buckets after the first step.

    Cost a step: two rounds of r · √elements each; an fp32 error of the size of the gradients and, during
    the step, an fp32 copy of the bucket; one host synchronisation, for the finite check (none
    without `host_check`).

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    Examples:
        >>> specs = [ParameterSpec("weight", (64, 32), (32, 1), torch.float32)]
        >>> BatchedPowerSGD().plan(specs).routes[0].matrix_shape
        (46, 46)
    """

    matrix_rank: int = 1

    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """One route for the bucket, or one a parameter where it is not worth compressing."""
        numel = sum(spec.numel for spec in specs)
        side = math.isqrt(numel - 1) + 1 if numel else 0
        matrix_rank = self.matrix_rank_of((side, side), specs[0].dtype) if numel else None
        if matrix_rank is None:
            return self.whole_plan(specs)
        before = sum(spec.gradient_bytes for spec in specs)
        after = self.factor_bytes((side, side), matrix_rank, specs[0].dtype)
        return Plan((Route(tuple(spec.name for spec in specs), before, after, (side, side), matrix_rank),))

    def exchange(self, bucket: Bucket, memory: Memory) -> Rounds:
        """Two rounds a power iteration; one in the warm-up, and where there is nothing to compress."""
        routes = self.plan(bucket.specs).routes
        shape, matrix_rank = (routes[0].matrix_shape, routes[0].matrix_rank) if routes else (None, None)
        if self.travels_whole(bucket, memory) or shape is None or matrix_rank is None:
            yield from self.exchange_uncompressed(bucket, memory)
            return
        label = routes[0].label
        matrix = self._matrix(bucket, memory, shape)
        group = MatrixGroup([label], [matrix], [None], matrix_rank)
        (found,), _ = yield from approximate(self, [group], (), memory, bucket)
        error = torch.empty_like(matrix) if self.error_feedback else None
        yield None
        settle(group, None if error is None else [error], found, bucket.loss_scale)
        flat_error = None if error is None else error.view(-1)[: bucket.flat.numel()]
        round_into(bucket.flat, matrix.view(-1)[: bucket.flat.numel()], flat_error, bucket.loss_scale)
        if flat_error is not None:
            memory.error.update(
                zip((spec.name for spec in bucket.specs), bucket.split(flat_error), strict=True)
            )
        remember(self, memory, [label], found, bucket.loss_scale)

    @staticmethod
    def _matrix(bucket: Bucket, memory: Memory, shape: tuple[int, int]) -> torch.Tensor:
        """Gradients plus error, padded with zeros."""
        matrix = bucket.flat.new_zeros(shape, dtype=bucket.specs[0].memory_dtype)
        flat = matrix.view(-1)[: bucket.flat.numel()]
        flat.copy_(bucket.flat)
        for spec, gradient in zip(bucket.specs, bucket.split(flat), strict=True):
            if spec.name in memory.error:
                add_scaled(gradient, memory.error[spec.name], bucket.loss_scale)
        return matrix
