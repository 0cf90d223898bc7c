"""Accelerate with PowerSGD and resume. Run: torchrun --nproc-per-node 2 examples/accelerate_ddp.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from thinwire.integrations.accelerate import DDPCommunicationHookType, DistributedDataParallelKwargs

BATCHES, BATCH, CONTEXT = 40, 16, 32  # batches a process; two make a step


class Windows(Dataset[torch.Tensor]):
    """Windows of Python's standard library, as bytes."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
        self.text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)

    def __len__(self) -> int:
        return BATCHES * BATCH * 2

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * 997 % (len(self.text) - CONTEXT - 1)
        return self.text[start : start + CONTEXT + 1].long()


def new_model(width: int = 256) -> nn.Module:
    """The next byte from the one before it."""
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("accelerate-output"), help="for the checkpoint")
    parser.add_argument("--save-after", type=int, default=20, help="batches")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD,
        comm_state_option={"matrix_approximation_rank": 4, "start_powerSGD_iter": 2},
    )
    on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=2, kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Windows(), BATCH))
    if options.resume:
        accelerator.load_state(options.folder)
    done = options.save_after if options.resume else 0
    for batch, window in enumerate(accelerator.skip_first_batches(loader, done), start=done + 1):
        with accelerator.accumulate(model):
            logits = model(window[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if batch % 10 == 0:
            accelerator.print(f"batch {batch}: loss {loss.item():.3f}", flush=True)
        if batch == options.save_after and not options.resume:
            accelerator.save_state(options.folder)
    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    told = f"compression ratio {handler.sync.stats().compression_ratio:.2f}, checksum {checksum:.9f}"
    print(f"process {accelerator.process_index}: {told}", flush=True)
    model, optimizer = accelerator.free_memory(model, optimizer)  # the model goes before its process group
    accelerator.end_training()


if __name__ == "__main__":
    main()
