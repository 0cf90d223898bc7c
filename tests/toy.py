"""An algorithm of a user's own, in one file: what it takes to write one, and the proof that it needs no more.

Eight bits an element around a trend that all members share: an all-to-all of codes and scales, each member
averages its share of the elements in fp32, and gathers the shares of the others. Rounding errors stay in the
residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.algorithms import (
    Algorithm,
    AllGather,
    AllToAll,
    Bucket,
    BucketPlan,
    Commit,
    Diagnosis,
    Memory,
    Requests,
    Slot,
    all_finite,
)
from thinwire.algorithms.error_feedback import ERROR
from thinwire.plan import ParameterSpec, Route

TREND = Slot("trend", is_elementwise=True)
"""A running mean of the mean gradients, the same on all members."""

MAX_CODE = 127


@dataclass(frozen=True)
class AroundTrend(Algorithm):
    """Average in 8 bits what differs from a running mean."""

    decay: float = 0.5

    slots = (ERROR, TREND)

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        """One route for each parameter: a byte for each element, and what padding and scales take."""
        numel = sum(spec.numel for spec in specs)
        share = 2 * -(-numel // (2 * num_members))
        padded_bytes = share * num_members + 4 * num_members  # of the all-to-all and the gather, half each
        extra_bytes = padded_bytes - numel
        routes = [
            Route(
                (spec.name,),
                spec.gradient_bytes,
                spec.numel + (extra_bytes if index == 0 else 0),
                "8 bits around a trend",
                is_compressed=True,
                rounds=2,
            )
            for index, spec in enumerate(specs)
        ]
        return AroundTrendPlan(tuple(specs), tuple(routes), num_members, share, self.decay)


@dataclass(frozen=True)
class AroundTrendPlan(BucketPlan):
    num_members: int
    share: int  # elements that each member averages
    decay: float

    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        """Two rounds, each of two messages of unlike types."""
        scale, numel = bucket.loss_scale, len(bucket.flat)
        like = bucket.flat.new_zeros(1, dtype=self.specs[0].memory_dtype)
        trend, residual = (
            torch.cat([memory[slot].get(spec.name, like.expand(spec.numel)) for spec in self.specs])
            for slot in (TREND, ERROR)
        )
        gradient = bucket.flat.to(like.dtype)
        wanted = (gradient if scale is None else gradient / scale) + residual - trend
        padded = like.new_zeros(self.num_members * self.share)
        padded[:numel] = wanted
        codes, scales = _codes(padded.view(self.num_members, self.share))
        their_codes, their_scales = yield AllToAll(codes), AllToAll(scales)

        mean = (their_codes * their_scales.to(like.dtype)).mean(0)
        mean_codes, mean_scale = _codes(mean.view(1, -1))
        all_codes, all_scales = yield AllGather(mean_codes.view(-1)), AllGather(mean_scale.view(-1))

        # Only the gathered scales are the same on all members: a gate on others would open for some.
        yield Commit(lambda: all_finite(all_scales))
        result = trend + (all_codes * all_scales.to(like.dtype)).view(-1)[:numel]
        limit = torch.finfo(bucket.flat.dtype).max
        bucket.flat.copy_((result if scale is None else result * scale).clamp(-limit, limit))
        held = bucket.flat.to(like.dtype)
        missing = padded - (codes * scales.to(like.dtype)).view(-1)
        missing[:numel] += result - (held if scale is None else held / scale)
        # The members' mean owes what rounding their mean has lost: this one alone knows it.
        own = slice(bucket.rank * self.share, (bucket.rank + 1) * self.share)
        missing[own] += self.num_members * (mean - (mean_codes * mean_scale.to(like.dtype)).view(-1))
        kept = zip(self.specs, bucket.split(missing[:numel]), bucket.split(result), strict=True)
        for spec, error, mean_gradient in kept:
            memory[ERROR][spec.name] = error.clone()
            memory[TREND][spec.name] = self.decay * mean_gradient

    def diagnose(self, memory: Memory) -> Diagnosis | None:
        """The residual, beside residual and trend."""
        names = [spec.name for spec in self.specs if spec.name in memory[ERROR] and spec.numel]
        if not names:
            return None
        errors = torch.stack([memory[ERROR][name].double().norm() for name in names])
        trends = torch.stack([memory[TREND][name].double().norm() for name in names])
        return Diagnosis(names, errors / (errors + trends).clamp_min(1e-30), errors)


def _codes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8 bits an element, and a scale for each row, which is not finite where the row is not."""
    if not rows.shape[1]:
        return rows.to(torch.int8), rows.new_ones(len(rows), 1).float()
    scales = (rows.abs().amax(1, keepdim=True) / MAX_CODE).float()
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (rows / safe).round().nan_to_num().to(torch.int8), scales
