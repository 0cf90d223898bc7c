"""Ray Train with PowerSGD. Run: python examples/ray_train.py (needs `pip install 'ray[train]'`)."""

from __future__ import annotations

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import thinwire


def train() -> None:
    model = prepare_model(torch.nn.Linear(256, 128))
    sync = thinwire.attach(model, thinwire.PowerSGD(matrix_rank=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
    print(f"compression ratio {sync.stats().compression_ratio:.1f}", flush=True)


if __name__ == "__main__":
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()
