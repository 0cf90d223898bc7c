"""Members that come and go (DiLoCo). Run: thinwire run --min 2 --max 3 examples/elastic_diloco.py.

Kill one: it comes back, and takes the model of the others. On several machines: see docs/elastic.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from thinwire import elastic

STEPS, BATCH, CONTEXT, EVERY_STEPS = 60, 16, 32, 10


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = training_text()
    model = ByteModel().to(device)  # a member that joins takes the weights of the others
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draws = torch.Generator()
    draws.seed()  # draws differ between members
    with elastic.DiLoCo(model, optimizer, every_steps=EVERY_STEPS) as local:
        while local.steps < STEPS:  # counted by the members that have been here longest
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draws)
            window = text[starts[:, None] + torch.arange(CONTEXT + 1)].to(device)
            loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if local.steps % EVERY_STEPS == 0:
                members = local.membership().members
                print(f"step {local.steps}, {members} members: loss {loss.item():.3f}", flush=True)
    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    ratio, member = local.stats().compression_ratio, os.environ.get("THINWIRE_MEMBER", "0")
    print(
        f"process {member}: compression ratio {ratio:.2f}, checksum {checksum:.9f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
