"""Error feedback: what a step could not transmit is added to the gradient of the next one.

Sources: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Karimireddy et al., "Error
Feedback Fixes SignSGD" (arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from thinwire.algorithms.base import Bucket, Memory, Slot

ERROR = Slot("error", is_local=True, is_elementwise=True)
"""The residual: what this member has not transmitted yet. fp32 (fp64 for fp64 gradients), in units of the
unscaled loss."""


@contextmanager
def residuals_restored(memory: Memory, names: Collection[str]) -> Iterator[None]:
    """Restore the residuals of some parameters at the end; not if an exception ends the block."""
    errors = memory[ERROR]
    before = {name: errors[name].clone() for name in names if name in errors}
    yield
    for name in names:
        errors.pop(name, None)
    errors.update(before)


class WithResidual(NamedTuple):
    """Gradients sent uncompressed, with their residual."""

    # Flat; then, if some residual may not fit, one element that says whether any remains on this member.
    parts: list[torch.Tensor]
    # The overflow of the types on the way, by parameter; all members have the same names.
    remainders: dict[str, torch.Tensor]


def with_residual(
    bucket: Bucket,
    memory: Memory,
    names: Sequence[str],
    gradients: Sequence[torch.Tensor],
    wire_dtype: torch.dtype | None,
) -> WithResidual:
    """Return gradients of a bucket, each plus its residual, to be sent uncompressed."""
    errors, dtype, scale = memory[ERROR], bucket.flat.dtype, bucket.loss_scale
    limit = min(torch.finfo(kind).max for kind in (dtype, wire_dtype or dtype))
    is_narrow = limit < torch.finfo(torch.bfloat16).max  # bf16 has fp32's range, or nearly
    sent = WithResidual([], {})
    for name, gradient in zip(names, gradients, strict=True):
        error = errors.get(name)
        if error is not None:
            fitting = residual = error if scale is None else error * scale
            if is_narrow:
                # Add only as much residual as keeps the sum finite in this type. A step with an infinite sum
                # would be skipped, and so would every later one: the residual would never be sent. A gradient
                # that is not finite itself stays so.
                headroom = (limit - gradient.to(residual.dtype).abs()).clamp_min(0)
                fitting = residual.clamp(-headroom, headroom)
                remainder = residual - fitting
                # Even if it is zero: the names must be the same on all members, but the amounts differ.
                sent.remainders[name] = remainder if scale is None else remainder / scale
            sent.parts.append(gradient + fitting)
        else:
            sent.parts.append(gradient)
    if sent.remainders:
        # The mean of this shows every member whether any keeps a remainder: all must keep one, or none.
        remains = torch.stack([remainder.any() for remainder in sent.remainders.values()]).any()
        sent.parts.append(remains.to(dtype).view(1))
    return sent


def keep_remainder(
    memory: Memory, names: Iterable[str], sent: WithResidual, means: Sequence[torch.Tensor] | torch.Tensor
) -> None:
    """Drop the residuals that were sent, except for what did not fit."""
    errors = memory[ERROR]
    for name in names:
        errors.pop(name, None)
    if sent.remainders and means[-1].any():
        errors.update(sent.remainders)
