"""A member of a real elastic group: trains a small model and tells of every averaging, a line each."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.algorithms import Quantize
from thinwire.elastic import DiLoCo, TorchftGroup


def new_model(seed: int, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, 4))


def train(
    path: str,
    lighthouse: str,
    member: int,
    steps: int,
    *,
    every_steps: int = 4,
    step_seconds: float = 0.01,
    width: int = 16,
    **options: Any,
) -> None:
    """Train up to so many steps of the group, and append to a file what happens."""
    torch.set_num_threads(1)
    out = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends, however it does

    def tell(**said: Any) -> None:
        out.write(json.dumps({"pid": os.getpid(), "member": member, "time": time.time(), **said}) + "\n")

    model = new_model(member, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1000 + member)
    target = torch.linspace(-1, 1, 32 * 4).view(32, 4)
    settings = {"timeout_seconds": 5.0, "wait_seconds": 60.0, "hostname": "127.0.0.1", **options}
    try:
        local = DiLoCo(
            model,
            optimizer,
            every_steps=every_steps,
            group=TorchftGroup(lighthouse, name=f"member{member}", **settings),
            algorithm=Quantize(bits=4, block=16, error_feedback=True),
        )
        with local:
            tell(event="joined", step=local.steps, checksum=checksum(model))
            while local.steps < steps:
                inputs = torch.randn(64, 32)
                loss = (model(inputs) - (inputs @ target).sin()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                time.sleep(step_seconds)
                optimizer.step()
                if local.steps % every_steps == 0:
                    told = vars(local.membership()) | {"loss": loss.item()}
                    tell(event="averaged", step=local.steps, checksum=checksum(model), **told)
        tell(event="left" if local.steps < steps else "done", **vars(local.membership()))
    except Exception as error:
        tell(event="raised", error=type(error).__name__, message=str(error))
        raise


def checksum(model: nn.Module) -> str:
    held = [each.detach().float().reshape(-1) for each in model.state_dict().values()]
    return hashlib.sha256(torch.cat(held).numpy().tobytes()).hexdigest()[:16]
