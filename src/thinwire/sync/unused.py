"""Parameters that no process used in a step: DDP ignores their gradient, so it goes back to the residual.

Without this, a step in which a layer is left out by all processes (`find_unused_parameters=True`: tasks
in turn, dropped layers) would move the residual into a gradient that nobody applies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.algorithms import Bucket, Commit, Mean, Memory, Requests
from thinwire.algorithms.error_feedback import ERROR
from thinwire.tensors import accelerators

GLANCE = 64


def used_flags(bucket: Bucket) -> torch.Tensor:
    """Return 1 for each parameter whose gradient on this process is not zero, else 0: fp32.

    Cost: on the CPU, a glance at each gradient that is used; on an accelerator, one read of the bucket in a
    few launches.
    """
    if accelerators.pays_per_launch(bucket.flat.device):
        # Sum of magnitudes: a maximum is not defined for tensors without elements.
        return (torch.stack(list(torch._foreach_norm(list(bucket.gradients), 1))) != 0).float()
    # A used gradient mostly shows at once.
    used = [bool(each[:GLANCE].any() or each.any()) for each in bucket.gradients]
    return torch.tensor(used, dtype=torch.float32)


def keep_unapplied(buckets: Sequence[Bucket], flags: Sequence[torch.Tensor], memory: Memory) -> Requests:
    """Find the parameters that nobody used, in one round; their means go back to the residual."""
    # Take the mean of the flags, not the maximum: the mean travels in a message that is sent anyway.
    used = yield Mean(torch.cat([each.to(flags[0].device) for each in flags]))
    yield Commit(lambda: torch.tensor(True))
    parts = [
        (bucket, each) for bucket in buckets for each in zip(bucket.specs, bucket.gradients, strict=True)
    ]
    for (bucket, (spec, gradient)), used_share in zip(parts, used.tolist(), strict=True):
        if used_share == 0 and gradient.any():
            unapplied = gradient.to(spec.memory_dtype)
            unapplied = unapplied if bucket.loss_scale is None else unapplied / bucket.loss_scale
            error = memory[ERROR].get(spec.name)
            # All of the mean on every member: so the mean residual grows by just what is not applied.
            memory[ERROR][spec.name] = unapplied.clone() if error is None else error.add_(unapplied)
            gradient.zero_()  # what is kept for later must not be applied now as well
