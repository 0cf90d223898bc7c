"""Parameters that no process used in a step, such as those of a layer that all have left out.

DDP ignores their means (`find_unused_parameters=True`), and what they hold may be a gradient of an earlier
pass: so they are not averaged, and their residuals stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.algorithms import Bucket, Commit, Mean, Memory, Requests
from thinwire.algorithms.error_feedback import put_back_residuals, residuals_of
from thinwire.comm import Transport
from thinwire.sync.partition import Specs
from thinwire.tensors import accelerators

GLANCE = 64


class UnusedParameters:
    """Finds them, in one message that travels with the buckets' second."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # once found
        # By bucket, in the order of messages: 1 for each parameter that this process used, else 0.
        self._flags: dict[Specs, torch.Tensor] = {}

    def note(self, bucket: Bucket, used: Sequence[bool] | None) -> None:
        """Note which parameters of a bucket this process `used`; None: those whose gradient is not zero."""
        # Before the bucket is sent, which may write to the gradients.
        if used is None:
            self._flags[bucket.specs] = used_flags(bucket)
        else:
            flags = torch.tensor(used, dtype=torch.float32)
            self._flags[bucket.specs] = accelerators.to_device_async(bucket.flat.device, flags)

    def run(
        self, memory: Memory, buckets: Sequence[Bucket], intra_node: Transport | None, step: str
    ) -> Requests:
        """Find the parameters that no one used, in one round; their residuals stay as they were."""
        names = [spec.name for specs in self._flags for spec in specs]
        flags = list(self._flags.values())
        used = torch.cat([flag.to(flags[0].device) for flag in flags])
        if intra_node is not None:
            intra_node.all_reduce(used, f"{step}, which parameters the machine used").wait()
        # Take the mean of the flags, not the maximum: the mean travels in a message that is sent anyway.
        used = yield Mean(used)
        self.names = {name for name, share in zip(names, used.tolist(), strict=True) if share == 0}
        before = residuals_of(memory, self.names)
        yield Commit(lambda: torch.tensor(True))
        put_back_residuals(memory, self.names, before)
        for bucket in buckets:
            for spec, gradient in zip(bucket.specs, bucket.gradients, strict=True):
                if spec.name in self.names:
                    gradient.zero_()  # what is kept for later must not be applied now as well


def used_flags(bucket: Bucket) -> torch.Tensor:
    """Return 1 for each parameter whose gradient on this process is not zero, else 0: fp32; not read back."""
    if accelerators.is_accelerator(bucket.flat.device):
        # Sum of magnitudes: a maximum is not defined for tensors without elements.
        return (torch.stack(list(torch._foreach_norm(list(bucket.gradients), 1))) != 0).float()
    # A used gradient mostly shows at once.
    used = [bool(gradient[:GLANCE].any() or gradient.any()) for gradient in bucket.gradients]
    return torch.tensor(used, dtype=torch.float32)
