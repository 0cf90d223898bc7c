"""The exact mean: every gradient travels whole, in its own type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from thinwire.algorithms.base import Algorithm, Bucket, Memory, Rounds
from thinwire.plan import ParameterSpec, Plan, Route

__all__ = ["AllReduce", "exchange_whole", "forget", "with_owed"]


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Average gradients exactly, as DDP does without a hook.

    If an algorithm with error feedback ran before it (`GradientSync.use`), its first step also pays
    back all the error memory, so nothing that was owed is lost.

    Cost: one round of the gradient's own bytes; no memory.

    >>> AllReduce().plan([ParameterSpec("weight", (8, 4), (4, 1), torch.float32)]).message_bytes
    128
    """

    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """Everything travels whole."""
        return Plan(tuple(Route((spec.name,), spec.gradient_bytes, spec.gradient_bytes) for spec in specs))

    def exchange(self, bucket: Bucket, memory: Memory) -> Rounds:
        """One round: the flat gradient."""
        yield from exchange_whole(bucket, memory, wire_dtype=None)


def exchange_whole(bucket: Bucket, memory: Memory, wire_dtype: torch.dtype | None) -> Rounds:
    """Send the flat gradient, and whatever an algorithm with error feedback left owed, in one round.

    Args:
        bucket: Becomes the mean, in place.
        memory: Its error for these parameters is paid back and dropped.
        wire_dtype: The type to send in, None for the gradient's own.
    """
    owed = [spec.name for spec in bucket.specs if spec.name in memory.error]
    message = torch.cat(with_owed(bucket, memory, range(len(bucket.specs)))) if owed else bucket.flat
    mean = yield message if wire_dtype is None else message.to(wire_dtype)
    if owed:
        yield None
        forget(memory, owed)
    if mean is not bucket.flat:
        bucket.flat.copy_(mean)


def with_owed(bucket: Bucket, memory: Memory, indices: Iterable[int]) -> list[torch.Tensor]:
    """Flat gradients that will travel whole, each plus what is owed on it; new tensors where something is."""
    gradients = bucket.gradients()
    return [
        _plus_error(gradients[index], bucket, memory.error.get(bucket.specs[index].name)) for index in indices
    ]


def _plus_error(gradient: torch.Tensor, bucket: Bucket, error: torch.Tensor | None) -> torch.Tensor:
    if error is None:
        return gradient
    return gradient + (error if bucket.loss_scale is None else error * bucket.loss_scale)


def forget(memory: Memory, names: Iterable[str]) -> None:
    """Drop the error of parameters that have been paid back."""
    for name in names:
        memory.error.pop(name, None)
        memory.sent.pop(name, None)
