"""A job that survives lost machines. Run: torchrun --nproc-per-node 2 examples/elastic.py.

Run it again: it resumes. On several machines, with a checkpoint on a shared disk: see docs/clusters.md.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

STEPS, SAVE_EVERY, BATCH, CONTEXT = 60, 5, 16, 32


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


def main(checkpoint: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))  # what a stalled machine costs at most
    me, text = dist.get_rank(), training_text()
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteModel())
    sync = thinwire.attach(model, thinwire.PowerSGD(matrix_rank=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sync.load_state_dict(saved["sync"])
        start = saved["step"]
    for step in range(start, STEPS):
        if step % SAVE_EVERY == 0:
            parts = {"model": model.module, "optimizer": optimizer, "sync": sync}
            state = {name: part.state_dict() for name, part in parts.items()}  # on all: it is collective
            if me == 0:
                torch.save({"step": step, **state}, f"{checkpoint}.part")
                os.replace(f"{checkpoint}.part", checkpoint)
        draws = torch.Generator().manual_seed(1000 * step + me)
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draws)
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}, process {me} of {dist.get_world_size()}: loss {loss.item():.4f}", flush=True)
    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    ratio = sync.stats().compression_ratio
    print(f"process {me}: compression ratio {ratio:.2f}, checksum {checksum:.9f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "elastic-checkpoint.pt"))
    dist.destroy_process_group()  # nothing holds the group here; its threads must end before Python does
