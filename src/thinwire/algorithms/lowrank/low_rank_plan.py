"""The plan that low-rank algorithms share: when to compress, how to adapt a state, how to diagnose."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from thinwire.algorithms.base import Bucket, BucketPlan, Diagnosis, Memory
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.exact import average_uncompressed
from thinwire.algorithms.lowrank.config import LowRank, LowRankRoute
from thinwire.algorithms.lowrank.factors import resized
from thinwire.algorithms.lowrank.slots import BASIS, FACTOR, SENT
from thinwire.algorithms.requests import Requests
from thinwire.checks import listed
from thinwire.kernels.dispatch import name_of_kernels_for

MAX_NAMES = 4


@dataclass(frozen=True)
class LowRankPlan(BucketPlan):
    """How a bucket is sent as factors: with a route for each parameter, or one for the bucket."""

    routes: tuple[LowRankRoute, ...]
    config: LowRank

    @cached_property
    def compressed(self) -> tuple[LowRankRoute, ...]:
        """The routes of matrices."""
        return tuple(route for route in self.routes if route.is_compressed)

    @cached_property
    def memory_dtype(self) -> torch.dtype:
        """The dtype of residuals and factors."""
        return self.specs[0].memory_dtype

    def kernels(self, device: torch.device) -> set[str]:
        dtypes = {spec.name: spec.memory_dtype for spec in self.specs}
        kinds = {
            (dtypes[route.names[0]], route.matrix_rank) for route in self.compressed if route.matrix_rank
        }
        return {
            name_of_kernels_for(torch.empty(1, dtype=dtype, device=device), matrix_rank)
            for dtype, matrix_rank in kinds
        }

    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        # Without error feedback no step would ever send a residual: all of it is sent in one step.
        must_send = not self.config.error_feedback and not memory[ERROR].keys().isdisjoint(self.names)
        if self.compressed and memory.step >= self.config.warmup_steps and not must_send:
            yield from self.compress(bucket, memory)
            return
        wire_dtype = self.config.uncompressed_dtype(bucket.flat.dtype)
        yield from average_uncompressed(self.names, bucket, memory, wire_dtype, always_checks=True)
        # All was sent: what an earlier step has sent no longer shows how much was not.
        for label in self.labels:
            memory[SENT].pop(label, None)

    @abstractmethod
    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        """Turn the bucket into the mean of its approximations; a generator like `run`."""

    def on_state_loaded(self, memory: Memory) -> str:
        """Cut or extend factors to the plan's matrix ranks, so that a saved state fits the plan."""
        refitted = []
        for label in self.labels:
            memory[BASIS].pop(label, None)  # made from the previous factor and other random rows
        for route in self.compressed:
            factor = memory[FACTOR].get(route.label)
            if factor is None or route.matrix_rank is None or len(factor) == route.matrix_rank:
                continue
            # Rows are added as zeros, which the next step replaces with random rows.
            like = factor.new_empty(route.matrix_rank, factor.shape[1])
            memory[FACTOR][route.label] = resized(factor, like)
            refitted.append((route.label, len(factor), route.matrix_rank))
        if not refitted:
            return ""
        labels = sorted(label for label, _, _ in refitted)
        _, there, here = refitted[0]
        return (
            f"the state's factors of {listed(labels, MAX_NAMES)} have a different matrix rank "
            f"({there}, here {here}): they are cut or extended with random rows, and recover within a few "
            "steps. No residual is lost"
        )

    def diagnose(self, memory: Memory) -> Diagnosis | None:
        # P̂ has orthonormal columns, so ‖M‖² = ‖M − P̂P̂ᵀM‖² + ‖P̂ᵀM‖²: the residual and what was sent are
        # enough. M, which the mean has overwritten, is not needed.
        known = [
            route
            for route in self.compressed
            if route.label in memory[SENT] and memory[ERROR].keys() >= set(route.names)
        ]
        if not known:
            return None
        norms = _norms([[memory[ERROR][name] for name in route.names] for route in known])
        sent = _norms([[memory[SENT][route.label]] for route in known])
        relative = torch.where(norms > 0, norms / torch.hypot(norms, sent), 0.0)
        return Diagnosis([route.label for route in known], relative, norms)


def _norms(of_routes: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return the joint norm of each route's tensors, all of one dtype, in float64."""
    # One operation: on an accelerator each norm by itself would be one launch or several.
    norms = torch.stack(torch._foreach_norm([tensor for of_route in of_routes for tensor in of_route]))
    # In float64: the square of a large fp32 norm overflows fp32.
    sizes = [len(of_route) for of_route in of_routes]
    parts = norms.double().split_with_sizes(sizes)
    return torch.cat([part if len(part) == 1 else part.norm().view(1) for part in parts])
