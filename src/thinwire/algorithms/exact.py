"""The exact mean: every gradient travels whole, in its own type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire.algorithms.base import Algorithm, Bucket, Memory, Rounds
from thinwire.plan import ParameterSpec, Plan, Route

__all__ = ["AllReduce", "Payment", "exchange_whole", "keep_unpaid", "with_owed"]


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Average gradients exactly, as DDP does without a hook.

    If an algorithm with error feedback ran before it (`GradientSync.use`), its first step also pays
    back all the error memory, so nothing that was owed is lost. (What fp16 gradients can't hold of it
    is paid in the steps after.)

    Cost: one round of the gradient's own bytes; no memory.

    Examples:
        >>> AllReduce().plan([ParameterSpec("weight", (8, 4), (4, 1), torch.float32)]).message_bytes
        128
    """

    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """Everything travels whole."""
        return Plan(tuple(Route((spec.name,), spec.gradient_bytes, spec.gradient_bytes) for spec in specs))

    def exchange(self, bucket: Bucket, memory: Memory) -> Rounds:
        """One round: the flat gradient."""
        yield from exchange_whole(bucket, memory, wire_dtype=None)


def exchange_whole(
    bucket: Bucket, memory: Memory, wire_dtype: torch.dtype | None, *, gated: bool = False
) -> Rounds:
    """Send the flat gradient, and whatever an algorithm with error feedback left owed, in one round.

    Args:
        bucket: Becomes the mean, in place.
        memory: Its error for these parameters is paid back, as far as the types on the way can hold it.
        wire_dtype: The type to send in, None for the gradient's own.
        gated: Whether a step with a mean that is not finite is taken back even if nothing was owed.
    """
    names = [spec.name for spec in bucket.specs]
    owed = any(name in memory.error for name in names)
    payment = with_owed(bucket, memory, range(len(names)), wire_dtype) if owed else Payment([], {})
    message = torch.cat(payment.parts) if owed else bucket.flat
    mean = yield message if wire_dtype is None else message.to(wire_dtype)
    if owed or gated:
        yield None
        keep_unpaid(memory, names, payment, mean[len(bucket.flat) :])
    if mean is not bucket.flat:
        bucket.flat.copy_(mean[: len(bucket.flat)])


class Payment(NamedTuple):
    """Gradients that travel whole, with what was owed on them.

    Attributes:
        parts: Flat gradients; new tensors where something was owed. Then, if any of it may not fit, one
            element more that tells whether something remains unpaid on this process.
        unpaid: What would not have fitted into the range of the types on the way, by parameter name,
            in its type, in units of the unscaled loss. The same names on all processes.
    """

    parts: list[torch.Tensor]
    unpaid: dict[str, torch.Tensor]


def with_owed(
    bucket: Bucket, memory: Memory, indices: Iterable[int], wire_dtype: torch.dtype | None
) -> Payment:
    """Some of a bucket's gradients, each plus what is owed on it, to be sent in `wire_dtype`."""
    gradients, most = bucket.gradients(), _most(bucket.flat.dtype, wire_dtype)
    payment = Payment([], {})
    for index in indices:
        gradient, name = gradients[index], bucket.specs[index].name
        error = memory.error.get(name)
        if error is not None:
            owed = error if bucket.loss_scale is None else error * bucket.loss_scale
            paid = owed if most is None else _fitting(owed, gradient, most)
            if paid is not owed:
                rest = owed - paid
                payment.unpaid[name] = rest if bucket.loss_scale is None else rest / bucket.loss_scale
            gradient = gradient + paid
        payment.parts.append(gradient)
    if payment.unpaid:
        remains = torch.stack([rest.any() for rest in payment.unpaid.values()]).any()
        payment.parts.append(remains.to(bucket.flat.dtype).view(1))
    return payment


def _most(*dtypes: torch.dtype | None) -> float | None:
    """The largest number that all the types hold, None if that is no less than fp32's."""
    most = min(torch.finfo(dtype).max for dtype in dtypes if dtype is not None)
    return most if most < torch.finfo(torch.bfloat16).max else None


def _fitting(owed: torch.Tensor, gradient: torch.Tensor, most: float) -> torch.Tensor:
    """As much of `owed` as leaves the sum within ±`most`; a gradient that is not finite stays so."""
    room = (most - gradient.to(owed.dtype).abs()).clamp_min(0)
    return owed.clamp(-room, room)


def keep_unpaid(memory: Memory, names: Iterable[str], payment: Payment, remaining: torch.Tensor) -> None:
    """Drop the error of parameters that have been paid back, but for what did not fit.

    Args:
        memory: Owes the same parameters on all processes, before and after.
        names: Of the parameters that were paid.
        payment: As sent.
        remaining: The mean of its last element, if it had one more than gradients.
    """
    for name in names:
        memory.error.pop(name, None)
        memory.sent.pop(name, None)
    if payment.unpaid and remaining.any():
        memory.error.update(payment.unpaid)
