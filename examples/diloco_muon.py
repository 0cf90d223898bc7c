"""DiLoCo with Muon inside (MuLoCo). Run: torchrun --nproc-per-node 2 examples/diloco_muon.py.

Two fragments travel behind the computing. Muon needs torch 2.9 or later.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire

STEPS, BATCH, CONTEXT, EVERY_STEPS = 30, 16, 16, 10


def training_text() -> torch.Tensor:
    """Bytes of Python's standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()


class ByteModel(nn.Module):
    """The next byte from those before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(nn.GRU(width, width, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, (batch, context, 256)."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)[0]
        logits: torch.Tensor = self.head(hidden)
        return logits


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = training_text()
    model = ByteModel()
    # Muon is for the matrices inside; embedding, head and biases stay with AdamW.
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(others, lr=2e-3)
    draws = torch.Generator().manual_seed(dist.get_rank())
    streaming = thinwire.Streaming(fragments=2, delay_steps=2)
    with thinwire.DiLoCo(model, [muon, adamw], every_steps=EVERY_STEPS, streaming=streaming) as local:
        for step in range(STEPS):
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draws)
            window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
            loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            model.zero_grad()
            loss.backward()
            muon.step()
            adamw.step()
            if step % 10 == 9 and dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    print(
        f"process {dist.get_rank()}: compression ratio {local.stats().compression_ratio:.2f}, "
        f"checksum {checksum:.9f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # nothing holds the group here; its threads must end before Python does
