"""Error feedback: what a step could not transmit is added to the gradient of the next one.

Sources: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Karimireddy et al., "Error
Feedback Fixes SignSGD" (arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

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


def with_residual(
    bucket: Bucket, memory: Memory, names: Sequence[str], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return gradients of a bucket plus their residuals, in the residuals' dtype, to be sent uncompressed."""
    errors, dtype, scale = memory[ERROR], bucket.specs[0].memory_dtype, bucket.loss_scale
    sums = []
    for name, gradient in zip(names, gradients, strict=True):
        wide, error = gradient.to(dtype), errors.get(name)
        if error is not None:
            wide = wide + (error if scale is None else error * scale)
        sums.append(wide)
    return sums


def keep_excess(
    bucket: Bucket, memory: Memory, names: Sequence[str], means: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Drop the residuals that were sent; return what gradients can hold of the means, and keep the excess."""
    errors, scale, limit = memory[ERROR], bucket.loss_scale, torch.finfo(bucket.flat.dtype).max
    for name in names:
        errors.pop(name, None)
    if means[0].dtype == bucket.flat.dtype:
        return list(means)
    fitting = [mean.clamp(-limit, limit) for mean in means]
    excess = torch._foreach_sub(list(means), fitting)
    # The same on all members, as the means are: it decides who has a residual.
    if torch.stack([part.any() for part in excess]).any():
        errors.update(zip(names, excess if scale is None else torch._foreach_div(excess, scale), strict=True))
    return fitting
