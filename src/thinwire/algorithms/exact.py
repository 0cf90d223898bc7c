"""Gradients sent uncompressed: the exact mean, in their own type or in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from thinwire.algorithms.base import Algorithm, Bucket, BucketPlan, Memory
from thinwire.algorithms.error_feedback import ERROR, keep_excess, with_residual
from thinwire.algorithms.requests import AllFinite, Commit, Mean, Requests
from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec, Route


class _Uncompressed(Algorithm):
    """An algorithm that keeps no state and can be divided at any element."""

    slots = (ERROR,)
    remembers = False
    split_granularity = 1


@dataclass(frozen=True)
class AllReduce(_Uncompressed):
    """Average gradients exactly, as DDP does without a hook.

    If an algorithm with error feedback ran before it (`GradientSync.use`), its first step also sends the
    residual, so nothing is lost. (What fp16 gradients can't hold of it is sent in later steps.)

    Cost: one round of the gradient's own bytes; no memory.

    Examples:
        >>> AllReduce().plan([ParameterSpec("weight", (8, 4), (4, 1), torch.float32)]).message_bytes
        128
    """

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        return UncompressedPlan.of(specs, wire_dtype=None)


@dataclass(frozen=True)
class UncompressedPlan(BucketPlan):
    """The plan that sends every gradient as it is."""

    wire_dtype: torch.dtype | None  # None for the gradient's own

    @classmethod
    def of(cls, specs: Sequence[ParameterSpec], wire_dtype: torch.dtype | None) -> UncompressedPlan:
        """Return the plan of a bucket, with a route for each parameter."""
        routes = [
            Route((spec.name,), spec.gradient_bytes, spec.numel * (wire_dtype or spec.dtype).itemsize)
            for spec in specs
        ]
        return cls(tuple(specs), tuple(routes), wire_dtype)

    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        yield from average_uncompressed(self.names, bucket, memory, self.wire_dtype)


def average_uncompressed(
    names: Sequence[str],
    bucket: Bucket,
    memory: Memory,
    wire_dtype: torch.dtype | None,
    *,
    always_checks: bool = False,
) -> Requests:
    """Send the flat gradient, with the residual that a different algorithm has left, in one round."""
    # The same on all members, as their residuals have the same names: it decides the message's dtype.
    residuals = memory.slots.get(ERROR) if memory.slots else None
    if residuals is not None and not residuals.keys().isdisjoint(names):
        mean = yield Mean(torch.cat(with_residual(bucket, memory, names, bucket.gradients)))
        yield Commit(AllFinite((mean,)))
        bucket.flat.copy_(torch.cat(keep_excess(bucket, memory, names, bucket.split(mean))))
        return
    mean = yield Mean(bucket.flat if wire_dtype is None else bucket.flat.to(wire_dtype))
    if mean is not bucket.flat:
        bucket.flat.copy_(mean)
    # Check the gradients, not the mean, whose dtype may be wider: infinite values of either show in them.
    is_healthy = yield Commit(AllFinite((bucket.flat,)), writes=always_checks, commits_on_device=True)
    if is_healthy is not None:
        bucket.flat.masked_fill_(~is_healthy, torch.nan)


WireDtype: TypeAlias = Literal["fp16", "bf16", "float16", "bfloat16"] | torch.dtype

_SHORT_NAMES: dict[object, Literal["fp16", "bf16"]] = {
    **dict.fromkeys(("fp16", "float16", torch.float16), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), "bf16"),
}


def short_name_of(given: object) -> Literal["fp16", "bf16"]:
    """Return the short name of a 16-bit type."""
    if not isinstance(given, str | torch.dtype) or given not in _SHORT_NAMES:
        raise ConfigError(f'a 16-bit type must be "fp16" or "bf16", got {given!r}')
    return _SHORT_NAMES[given]


def wire_dtype_of(given: object) -> torch.dtype:
    """Return the torch type that a setting names."""
    return {"fp16": torch.float16, "bf16": torch.bfloat16}[short_name_of(given)]


@dataclass(frozen=True)
class Cast(_Uncompressed):
    """Average gradients in 16 bits: half the bytes of fp32, rounded.

    "fp16" has 11 bits of precision and overflows above 65 504 (the mean comes out infinite, so that
    a `GradScaler` skips the step); "bf16" has 8 bits and fp32's range. As in PyTorch's
    `fp16_compress_hook`, there is no error feedback.

    Args:
        dtype: "fp16" or "bf16", or torch's name or object for it: `Cast(torch.bfloat16)`.

    Cost: one round of 2 bytes per element; a 16-bit copy of the bucket while it is sent.

    Raises:
        ConfigError: Any other type.

    Examples:
        >>> Cast("bf16").plan([ParameterSpec("weight", (8, 4), (4, 1), torch.float32)]).message_bytes
        64
    """

    dtype: WireDtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", short_name_of(self.dtype))

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        return UncompressedPlan.of(specs, wire_dtype_of(self.dtype))
