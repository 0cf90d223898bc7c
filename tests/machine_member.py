"""A script for `thinwire run --processes-per-member`: one process of an elastic member, which tells of it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from experts import Mixture, divide
from thinwire import checkpoint
from thinwire.algorithms import Quantize
from thinwire.comm import Message, Work
from thinwire.comm.metered import Wrapped
from thinwire.elastic import DiLoCo, Steps, TorchftGroup
from thinwire.tensors.layout import local_tensor

EVERY_STEPS = 2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Wrapped):
    """Kills this process when it sends a message whose purpose has some words in it, the nth time."""

    def __init__(self, inner: Wrapped, words: str, number: int) -> None:
        super().__init__(inner.transport)
        self.words, self.number = words, number

    def start(self, message: Message) -> Work:
        self.number -= self.words in message.purpose
        work = super().start(message)
        if self.number == 0 and self.words in message.purpose:
            die()
        return work


def new_model(seed: int, width: int, has_buffers: bool, inside: str) -> nn.Module:
    torch.manual_seed(seed)
    if inside == "experts":
        return Mixture(32, 4)
    norm = nn.BatchNorm1d(width) if has_buffers else nn.Identity()
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), norm, nn.Linear(width, 4))


def wrapped(model: nn.Module, inside: str) -> nn.Module:
    """Let the processes of a member train a model together."""
    if inside == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if isinstance(model, Mixture):
        divide(model, mesh, how="beside")
    else:
        fully_shard(model, mesh=mesh)
    return model


def main(path: str, settings: dict[str, Any]) -> None:
    """Train up to so many steps of the group, and append to a file what happens."""
    torch.set_num_threads(1)
    out = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends, however it does
    member, rank = int(os.environ["THINWIRE_MEMBER"]), int(os.environ.get("RANK", "0"))
    member += settings.pop("first_member", 0)
    settings |= settings.pop("of_member", {}).get(str(member), {})

    def tell(**event: Any) -> None:
        who = {"pid": os.getpid(), "member": member, "rank": rank, "time": time.time()}
        out.write(json.dumps({**who, **event}) + "\n")

    try:
        train(tell, member, rank, **settings)
    except Exception as error:
        tell(event="raised", error=type(error).__name__, message=str(error))
        raise


def held_checksum(model: nn.Module) -> str:
    """Of what this process holds and what is averaged: a BatchNorm's count of steps is not."""
    held = [local_tensor(each) for each in model.state_dict().values() if each.is_floating_point()]
    flat = torch.cat([each.float().view(-1) for each in held])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def train(
    tell: Any,
    member: int,
    rank: int,
    *,
    steps: int,
    inside: str = "ddp",
    width: int = 16,
    averages_gradients: bool = False,
    dies_at: tuple[str, int] | None = None,
    saves_at: int = -1,
    resumes: bool = False,
) -> None:
    path = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = TorchftGroup(timeout_seconds=3, wait_seconds=60, name=f"member{member}", hostname="127.0.0.1")
    if dies_at is not None and rank == 0 and '"joined"' not in path.read_text():
        group.transport = Deadly(group.transport, *dies_at)
    # Each process its own at first: DDP takes the first one's.
    model = wrapped(new_model(10 * member + rank, width, not averages_gradients, inside), inside)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    algorithm = Quantize(bits=4, block=16, error_feedback=True)
    local: Any
    if averages_gradients:
        local = Steps(model, optimizer, algorithm, group=group)
    else:
        local = DiLoCo(model, optimizer, every_steps=EVERY_STEPS, group=group, algorithm=algorithm)
    target = torch.linspace(-1, 1, 32 * 4).view(32, 4)
    file = path.with_name(f"state-{member}-{rank}.pt")
    if resumes:
        local.load_state_dict(checkpoint.load(file))
    with local:
        tell(event="joined", step=local.steps, checksum=held_checksum(model))
        while local.steps < steps:
            draws = torch.Generator().manual_seed(1000 * member + 500 * rank + local.steps)
            inputs = torch.randn(64, 32, generator=draws)
            loss = (model(inputs) - (inputs @ target).sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            time.sleep(0.1)  # so that members that wait for another one do not work all the time
            local.step() if averages_gradients else optimizer.step()
            if local.steps == saves_at:
                checkpoint.save(local.state_dict(), file)
            if local.steps % EVERY_STEPS == 0:
                numbers = vars(local.membership()) | {"processes": dist.get_world_size()}
                numbers["ratio"] = local.sync.stats().compression_ratio
                tell(event="averaged", step=local.steps, checksum=held_checksum(local.module), **numbers)
    tell(event="left" if local.steps < steps else "done", **vars(local.membership()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
