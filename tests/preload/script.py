"""An ordinary training script, which knows nothing of Thinwire, unless it is told to attach by itself."""

from __future__ import annotations

import gc
import io
import os
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


class Own(DistributedDataParallel):
    def forward(self, *inputs: Any) -> Any:
        self.reducer.prepare_for_backward([])
        return self.module(*inputs)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if "bf16" in sys.argv else torch.float32)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    build = Own if "own forward" in sys.argv else DistributedDataParallel
    model: Any = replicate(module) if "replicate" in sys.argv else build(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "late" in sys.argv:
        model(torch.zeros(1, 64))
    if "hook" in sys.argv:
        model.register_comm_hook(None, fp16_compress_hook)
    model.train("eval" not in sys.argv)
    model.training &= "validated" not in sys.argv  # as Lightning's validation leaves the DDP model
    model.require_backward_grad_sync = "no_sync" not in sys.argv  # without it, as Composer's forced_sync
    model.requires_grad_("replicate" in sys.argv)(torch.zeros(1, 64))  # as CycleGAN's discriminators
    model.requires_grad_(True)
    if "attach" in sys.argv:
        import thinwire  # noqa: PLC0415

        thinwire.attach(model, thinwire.Quantize(bits=4, error_feedback=True))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        forward = model.forward if "forward" in sys.argv else model
        forward(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    if "attach" not in sys.argv and "replicate" not in sys.argv:
        torch.save(model, io.BytesIO())  # whole, as some scripts do
    if dist.get_rank() == 0:
        print("weights", sum(parameter.double().sum().item() for parameter in model.parameters()), flush=True)


dist.init_process_group("gloo")
if "thread" in sys.argv:  # as Ray Train does
    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join()
    os._exit(0)
main()
gc.collect()  # the model goes before the process ends, as in many scripts
if "hook" not in sys.argv:  # torch 2.6 ends a group under the GIL; its callback may still wait for that
    dist.destroy_process_group()
