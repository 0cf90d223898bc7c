"""Parameters that no process used in a step, such as those of a layer that all have skipped.

DDP ignores their means (`find_unused_parameters=True`), and their gradients may be from an earlier pass. So
they are not averaged, and their residuals stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.algorithms import Bucket, Commit, Mean, Requests
from thinwire.comm import Transport
from thinwire.sync.partition import Specs
from thinwire.tensors import accelerators

GLANCE = 64


class UnusedParameters:
    """Finds them, in one message that is sent with the buckets' second."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # once found
        # By bucket, in message order: 1 for each parameter that this process used, else 0.
        self._flags: dict[Specs, torch.Tensor] = {}

    def note(self, bucket: Bucket, used: Sequence[bool] | None) -> None:
        """Record which parameters of a bucket this process `used`; None: those with a nonzero gradient."""
        # Before the bucket is sent, because that may overwrite the gradients.
        if used is None:
            self._flags[bucket.specs] = used_flags(bucket)
        else:
            flags = torch.tensor(used, dtype=torch.float32, device="cpu")
            self._flags[bucket.specs] = accelerators.to_device_async(bucket.flat.device, flags)

    def run(self, buckets: Sequence[Bucket], intra_node: Transport | None, step: str) -> Requests:
        """Find the parameters that no process used, in one round; `Step.finish` restores their residuals."""
        names = [spec.name for specs in self._flags for spec in specs]
        flags = list(self._flags.values())
        used = torch.cat([flag.to(flags[0].device) for flag in flags])
        if intra_node is not None:
            intra_node.all_reduce(used, f"{step}, which parameters the machine used").wait()
        # The mean of the flags, not the maximum: a mean can join a message that is sent anyway.
        used = yield Mean(used)
        self.names = {name for name, share in zip(names, used.tolist(), strict=True) if share == 0}
        yield Commit(lambda: torch.tensor(True, device="cpu"))
        for bucket in buckets:
            for spec, gradient in zip(bucket.specs, bucket.gradients, strict=True):
                if spec.name in self.names:
                    gradient.zero_()  # it stays in the residual, so it must not be applied now as well


def used_flags(bucket: Bucket) -> torch.Tensor:
    """Return 1 for each parameter whose gradient on this process is not zero, else 0: fp32; not read back."""
    if accelerators.is_accelerator(bucket.flat.device):
        # The sum of magnitudes, since empty tensors have no maximum.
        return (torch.stack(list(torch._foreach_norm(list(bucket.gradients), 1))) != 0).float()
    # A nonzero gradient mostly shows in its first elements.
    used = [bool(gradient[:GLANCE].any() or gradient.any()) for gradient in bucket.gradients]
    return torch.tensor(used, dtype=torch.float32, device="cpu")
