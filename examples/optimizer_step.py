"""PowerSGD without DDP. Run: torchrun --nproc-per-node 2 examples/optimizer_step.py."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from thinwire.powersgd import Config, PowerSGD, optimizer_step

STEPS, BATCH, CONTEXT = 30, 16, 32


def training_text() -> torch.Tensor:
    """Bytes of Python's standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()


class ByteModel(nn.Module):
    """The next byte from those before it."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, (batch, context, 256)."""
        logits: torch.Tensor = self.head(self.recur(self.embed(tokens))[0])
        return logits


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = training_text()
    model = ByteModel()  # the same on all processes: they have the same seed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    powersgd = PowerSGD(
        model.parameters(), Config(rank=4, num_iters_per_step=2, start_compressing_after_num_steps=5)
    )
    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draws)
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer_step(optimizer, powersgd)
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    print(
        f"process {dist.get_rank()}: compression ratio {powersgd.stats().compression_ratio:.2f}, "
        f"checksum {checksum:.9f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # nothing holds the group here; its threads must end before Python does
