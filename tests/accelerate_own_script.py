"""Accelerate's own test script for communication hooks, with Thinwire's handler in its place.

Launched by test_accelerate.py, with the argument `as-it-is` (it never compresses: its one step is less than
PowerSGD's default warm-up) or `compress` (without warm-up).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate.test_utils.scripts import test_ddp_comm_hook as script
from torch.nn.parallel import DistributedDataParallel

from thinwire import GradientSync
from thinwire.integrations import accelerate as ours

LOW_RANK = (ours.DDPCommunicationHookType.POWER_SGD, ours.DDPCommunicationHookType.BATCHED_POWER_SGD)
syncs: list[GradientSync] = []


class Recorded(ours.DistributedDataParallelKwargs):
    """Keeps the handles, for the script drops its models."""

    def __post_init__(self) -> None:
        if sys.argv[1] == "compress" and self.comm_hook in LOW_RANK:
            self.comm_state_option: dict[str, Any] = {"start_powerSGD_iter": 0, **self.comm_state_option}
        super().__post_init__()

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        super().register_comm_hook(model)
        syncs.extend(self.syncs)


class WithoutDevices(DistributedDataParallel):
    """The script gives its reference model a device index, which DDP refuses on a CPU."""

    def __init__(
        self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        super().__init__(module, **options)


if __name__ == "__main__":
    torch.nn.parallel.DistributedDataParallel = WithoutDevices  # type: ignore[assignment,misc]
    script.DDPCommunicationHookType = ours.DDPCommunicationHookType
    script.DistributedDataParallelKwargs = Recorded
    script.main()
    ratios = [round(sync.stats().compression_ratio, 1) for sync in syncs]
    print(f"ratios {ratios}", flush=True)
