"""FSDP2 inside a machine, Thinwire between machines. Run: torchrun --nproc-per-node 4 examples/fsdp2.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire

STEPS, MICRO_STEPS, BATCH, CONTEXT = 6, 2, 8, 32


def training_text() -> torch.Tensor:
    """Bytes of Python's standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()


class ByteModel(nn.Module):
    """The next byte from those before it."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        kind: dict[str, Any] = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, **kind) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x: torch.Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)  # type: ignore[no-any-return]


def main(shards: int) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    replicas = dist.get_world_size() // shards
    mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    text = training_text().to(device)
    model: Any = ByteModel().to(device)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"])
    sync = thinwire.attach(model, thinwire.Quantize(bits=4), replicas=mesh["replicate"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            model.set_requires_all_reduce(micro_step == MICRO_STEPS - 1)  # once per step over the slow links
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=draws)
            window = text[starts.to(device) + torch.arange(CONTEXT + 1, device=device)]
            loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            (loss / MICRO_STEPS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}, process {dist.get_rank()}: loss {loss.item():.3f}", flush=True)
    checksum = sum(p.full_tensor().detach().double().sum().item() for p in model.parameters())
    ratio = sync.stats().compression_ratio
    print(f"process {dist.get_rank()}: compression ratio {ratio:.2f}, checksum {checksum:.9f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 2)  # shards of a replica, such as the GPUs of a machine
    dist.destroy_process_group()  # nothing holds the group here; its threads must end before Python does
