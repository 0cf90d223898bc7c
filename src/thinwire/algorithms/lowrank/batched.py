"""PowerSGD on a whole bucket, viewed as one square matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_

import torch

from thinwire.algorithms.base import Bucket, BucketPlan, Memory
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.low_rank_plan import LowRankPlan
from thinwire.algorithms.lowrank.powersgd_plan import PowerSGDPlan
from thinwire.algorithms.lowrank.slots import square
from thinwire.algorithms.requests import Requests
from thinwire.plan import ParameterSpec


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRank):
    """Send two low-rank factors of a whole bucket, padded with zeros to one square matrix.

    Fewer bytes than `PowerSGD` on models of many layers, at a loss of accuracy: the rows of the square are
    not the rows of any layer. Meant for rank 1. The settings are `PowerSGD`'s, with `matrix_rank=1` by
    default.

    The residual is kept by parameter and survives a change of buckets; the factor belongs to the bucket. A
    new bucket starts from random factors: in DDP's second step, since DDP rebuilds its buckets after the
    first, and in the first step after a state was loaded, unless the state has the same buckets.

    Cost per step: two rounds of r · √elements each; an fp32 residual of the size of the gradients (fp64 for
    fp64) and a permanent copy of the gradients; one host synchronisation, for the finite check (none without
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
        numel = sum(spec.numel for spec in specs)
        shape = square(numel)
        matrix_rank = self.matrix_rank_of(shape, specs[0].dtype) if numel else None
        if matrix_rank is None:
            return BatchedPlan(tuple(specs), self.uncompressed_routes(specs), self)
        return BatchedPlan(tuple(specs), (self.compressed_route(specs, shape, matrix_rank),), self)


@dataclass(frozen=True)
class BatchedPlan(LowRankPlan):
    """A bucket as one PowerSGD parameter: a matrix of its gradients, padded with zeros."""

    @cached_property
    def matrix(self) -> PowerSGDPlan:
        """The plan of the matrix."""
        (route,) = self.compressed
        assert route.matrix_shape is not None
        spec = ParameterSpec(route.label, route.matrix_shape, (route.matrix_shape[1], 1), self.specs[0].dtype)
        return PowerSGDPlan((spec,), (replace(route, names=(route.label,)),), self.config)

    @cached_property
    def padded(self) -> Padded:
        """The buffers that all steps share."""
        return Padded(self.names, self.sizes, self.matrix.sizes[0], self.memory_dtype)

    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        (label,) = self.matrix.names
        M = self.padded.gradients(bucket.flat)
        residual = self.padded.residual(memory[ERROR])
        slots = {slot: memory[slot] for slot in self.config.slots}
        slots[ERROR] = {} if residual is None else {label: residual}
        whole = Bucket(self.matrix.specs, M, bucket.loss_scale, bucket.rank)
        yield from self.matrix.compress(whole, Memory(memory.step, slots))
        bucket.flat.copy_(M[: len(bucket.flat)])
        if self.config.error_feedback:
            self.padded.keep(slots[ERROR][label], memory[ERROR])


class Padded:
    """A bucket's gradients and its residual, each flat and padded with zeros, in buffers that stay.

    So a step rebinds and allocates nothing. All buckets of a step need the memory at the same time anyway.
    """

    def __init__(self, names: Sequence[str], sizes: list[int], length: int, dtype: torch.dtype) -> None:
        self._names, self._sizes, self._length, self._dtype = names, sizes, length, dtype
        self._gradients: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()  # parts of the residual, as in memory

    def gradients(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a bucket's gradients."""
        if self._gradients is None or self._gradients.device != flat.device:
            self._gradients = flat.new_empty(self._length)
        self._gradients[: len(flat)].copy_(flat)
        self._gradients[len(flat) :].zero_()
        return self._gradients

    def residual(self, errors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the residuals of all parameters as one; None if there are none."""
        parts = [errors.get(name) for name in self._names]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        numel = sum(self._sizes)
        if self._residual is None or not all(map(is_, parts, self._parts)):
            # For example, a state was loaded, or other buckets have left them.
            self._residual = known[0].new_zeros(self._length, dtype=self._dtype)
            for part, to in zip(parts, self._residual[:numel].split_with_sizes(self._sizes), strict=True):
                if part is not None:
                    to.copy_(part)
        self._residual[numel:].zero_()  # a step leaves approximation errors in the padding
        return self._residual

    def keep(self, residual: torch.Tensor, errors: dict[str, torch.Tensor]) -> None:
        """Store the residual in memory, by parameter."""
        self._residual = residual
        self._parts = residual[: sum(self._sizes)].split_with_sizes(self._sizes)
        errors.update(zip(self._names, self._parts, strict=True))
