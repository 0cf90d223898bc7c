"""Parameters that no process used in a step: DDP ignores their gradient, so what they were paid stays owed.

Without this, a step in which a layer is left out by all processes (`find_unused_parameters=True`: tasks
in turn, dropped layers) would pay error memory into a gradient that nobody applies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.algorithms import Bucket, Memory, Rounds

__all__ = ["keep_owed", "used_flags"]

GLANCE = 64


def used_flags(bucket: Bucket) -> torch.Tensor:
    """1 for each parameter whose gradient on this process is not zero, else 0; fp32; before the exchange.

    Cost: on the CPU, a glance at each gradient that is used; on an accelerator, one read of the bucket.
    """
    return torch.stack([_is_used(gradient) for gradient in bucket.gradients()]).float()


def _is_used(gradient: torch.Tensor) -> torch.Tensor:
    glance = gradient[:GLANCE].any()
    return glance if gradient.device.type == "cpu" and glance else gradient.any()


def keep_owed(buckets: Sequence[Bucket], flags: Sequence[torch.Tensor], memory: Memory) -> Rounds:
    """One round that finds the parameters that nobody used; their means go back to the error memory.

    Args:
        buckets: All of the step, averaged when this passes its gate.
        flags: Of each bucket, from `used_flags`.
        memory: Its error takes up the means that DDP will not apply.
    """
    shares = yield torch.cat([each.to(flags[0].device) for each in flags])
    yield None
    parts = [
        (bucket, each) for bucket in buckets for each in zip(bucket.specs, bucket.gradients(), strict=True)
    ]
    for (bucket, (spec, gradient)), share in zip(parts, shares.tolist(), strict=True):
        if share == 0 and gradient.any():
            owed = gradient.to(spec.memory_dtype)
            owed = owed if bucket.loss_scale is None else owed / bucket.loss_scale
            error = memory.error.get(spec.name)
            memory.error[spec.name] = owed.clone() if error is None else error.add_(owed)
            gradient.zero_()
