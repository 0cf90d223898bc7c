"""Lightning with PowerSGD and resume. Run: torchrun --nproc-per-node 2 examples/lightning_ddp.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

import thinwire
from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy

BATCHES, BATCH, CONTEXT = 15, 16, 32  # batches a process and epoch


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


class ByteModel(LightningModule):
    """The next byte from the one before it."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        layers = [nn.Embedding(256, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256)]
        self.layers = nn.Sequential(*layers)

    def training_step(self, window: torch.Tensor) -> torch.Tensor:
        logits = self.layers(window[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("lightning-output"), help="to write to")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", type=Path, help="a checkpoint")
    options = parser.parse_args()
    torch.manual_seed(0)
    strategy = ThinwireStrategy(thinwire.PowerSGD(matrix_rank=4, warmup_steps=2))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=options.epochs,
        callbacks=[ThinwireCallback(10), ModelCheckpoint(options.folder, "{epoch}", save_top_k=-1)],
        default_root_dir=options.folder,
        logger=CSVLogger(options.folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = ByteModel()
    trainer.fit(model, DataLoader(Windows(), BATCH), ckpt_path=options.resume)
    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    told = f"compression ratio {strategy.sync.stats().compression_ratio:.2f}, checksum {checksum:.9f}"
    print(f"process {trainer.global_rank}: {told}", flush=True)


if __name__ == "__main__":
    main()
