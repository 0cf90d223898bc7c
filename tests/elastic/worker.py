"""A member of a real elastic group: trains a small model and tells of every averaging, a line each."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire import checkpoint
from thinwire.algorithms import Quantize
from thinwire.channel import Message, Work
from thinwire.channel.metered import Wrapped
from thinwire.elastic import DiLoCo, Steps, TorchftGroup
from thinwire.localsgd.members import torchft_group


def new_model(seed: int, width: int = 16, *, has_buffers: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(width) if has_buffers else nn.Identity()
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), norm, nn.Linear(width, 4))


class Deadly(Wrapped):
    """Kills this process when it sends a message whose purpose has some words in it, the nth time."""

    def __init__(self, inner: Wrapped, words: str, place: int) -> None:
        super().__init__(inner.transport)
        self.words, self.place = words, place

    def start(self, message: Message) -> Work:
        self.place -= self.words in message.purpose
        work = super().start(message)
        if self.place == 0 and self.words in message.purpose:
            os.kill(os.getpid(), signal.SIGKILL)
        return work


def die_at_second_call() -> None:
    """Let this process die when it serves newcomers again: the first are those who began with it."""
    send_state, calls = torchft_group.send_state, []  # type: ignore[attr-defined]

    def deadly(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        send_state(*args)

    torchft_group.send_state = deadly  # type: ignore[assignment, attr-defined]


def train(
    path: str,
    lighthouse: str,
    member: int,
    steps: int,
    *,
    every_steps: int = 4,
    step_seconds: float = 0.01,
    width: int = 16,
    dies_at: tuple[str, int] | None = None,
    averages_gradients: bool = False,
    saves_at: int = -1,
    resumes: bool = False,
    **options: Any,
) -> None:
    """Train up to so many steps of the group, and append to a file what happens.

    `dies_at`: words of a message's purpose, and the how manieth such kills the process as it is sent.
    `saves_at`: after which step it saves to a file of its own, from which one that `resumes` goes on.
    """
    torch.set_num_threads(1)
    out = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends, however it does

    def tell(**said: Any) -> None:
        out.write(json.dumps({"pid": os.getpid(), "member": member, "time": time.time(), **said}) + "\n")

    model = new_model(member, width, has_buffers=not averages_gradients)  # which leaves buffers alone
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    target = torch.linspace(-1, 1, 32 * 4).view(32, 4)
    settings = {"timeout_seconds": 5.0, "wait_seconds": 60.0, "hostname": "127.0.0.1", **options}
    try:
        group = TorchftGroup(lighthouse, name=f"member{member}", **settings)
        if dies_at is not None and dies_at[0] == "handing":
            die_at_second_call()
        elif dies_at is not None:
            group.transport = Deadly(group.transport, *dies_at)
        algorithm = Quantize(bits=4, block=16, error_feedback=True)
        local: DiLoCo | Steps
        if averages_gradients:
            local = Steps(model, optimizer, algorithm, group=group)
        else:
            local = DiLoCo(model, optimizer, every_steps=every_steps, group=group, algorithm=algorithm)
        file = Path(path).with_name(f"member{member}.pt")
        if resumes:
            local.load_state_dict(checkpoint.load(file))
        with local:
            tell(event="joined", step=local.steps, checksum=checksum(model))
            while local.steps < steps:
                draws = torch.Generator().manual_seed(1000 * member + local.steps)
                inputs = torch.randn(64, 32, generator=draws)
                loss = (model(inputs) - (inputs @ target).sin()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                time.sleep(step_seconds)
                local.step() if isinstance(local, Steps) else optimizer.step()
                if local.steps == saves_at:
                    checkpoint.save(local.state_dict(), file)
                if local.steps % every_steps == 0:
                    told = vars(local.membership()) | {"loss": loss.item()}
                    tell(event="averaged", step=local.steps, checksum=checksum(model), **told)
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        event = "left" if local.steps < steps else "done"
        tell(event=event, threads=names, **vars(local.membership()))
    except Exception as error:
        tell(event="raised", error=type(error).__name__, message=str(error))
        raise


def checksum(model: nn.Module) -> str:
    held = [each.detach().float().reshape(-1) for each in model.state_dict().values()]
    return hashlib.sha256(torch.cat(held).numpy().tobytes()).hexdigest()[:16]
