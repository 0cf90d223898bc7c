"""An algorithm of one's own: send one entry of eight, in the next step those beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.algorithms import Algorithm, Bucket, BucketPlan, Commit, Mean, Memory, Requests
from thinwire.algorithms.error_feedback import ERROR
from thinwire.plan import ParameterSpec, Route


@dataclass(frozen=True)
class InTurn(Algorithm):
    """Average one entry of `period`; the others wait in the residual for their turn."""

    period: int = 8

    slots = (ERROR,)

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        sizes = [-(-spec.numel // self.period) * spec.memory_dtype.itemsize for spec in specs]
        sizes[0] += specs[0].memory_dtype.itemsize  # the element that says whether all is finite
        routes = tuple(
            Route((spec.name,), spec.gradient_bytes, size, f"1 of {self.period}", is_compressed=True)
            for spec, size in zip(specs, sizes, strict=True)
        )
        return InTurnPlan(tuple(specs), routes, self.period)


@dataclass(frozen=True)
class InTurnPlan(BucketPlan):
    period: int

    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        scale = 1.0 if bucket.loss_scale is None else bucket.loss_scale
        turn, wanted = memory.step % self.period, []
        for spec, gradient in zip(self.specs, bucket.gradients, strict=True):
            want = gradient.to(spec.memory_dtype) / scale
            if spec.name in memory[ERROR]:
                want = want + memory[ERROR][spec.name]
            padding = (0, -spec.numel % self.period)
            wanted.append(torch.nn.functional.pad(want, padding).view(-1, self.period))
        sent = [rows[:, turn] for rows in wanted]
        # NaN if any entry is not finite, also one that is not sent: then no member may commit.
        is_finite = (torch.cat(wanted) * 0).sum()
        mean = yield Mean(torch.cat([*sent, is_finite.view(1)]))
        yield Commit(lambda: mean.isfinite().all())  # behind it memory may be written
        limit = torch.finfo(bucket.flat.dtype).max
        parts = mean.split([*(len(part) for part in sent), 1])
        for spec, gradient, rows, part in zip(self.specs, bucket.gradients, wanted, parts, strict=False):
            result = torch.zeros_like(rows)
            result[:, turn] = rows[:, turn] = part
            gradient.copy_((result.view(-1)[: spec.numel] * scale).clamp(-limit, limit))
            memory[ERROR][spec.name] = rows.view(-1)[: spec.numel] - gradient.to(rows.dtype) / scale
