"""A member of a real elastic group that learns to predict bytes: Thinwire's DiLoCo, or torchft's own.

It tells of every averaging, a line each, and at the end of its held-out loss. SIGUSR1 lets it die in the
middle of its next all-to-all (torchft's: all-reduce), SIGUSR2 when it next serves a newcomer.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.worker import Deadly, checksum
from thinwire.algorithms import Quantize
from thinwire.demo.model import Text, fixed_batches, load_text, sample_batch
from thinwire.elastic import DiLoCo, Group, TorchftGroup
from thinwire.localsgd.members import torchft_group

EVERY, BATCH, CONTEXT, LR = 4, 64, 8, 3e-3
USUAL = 4  # members: torchft's outer learning rate is chosen for so many
WAIT_SECONDS = 120.0
MOMENTS = {
    "all-to-all": "round 1",
    "all-gather": "round 2",
    "vote": "whether all have",
    "asking": "who takes",
}


def new_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.Tanh(), nn.Linear(64, 256)
    )


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), targets[:, -1])


@torch.no_grad()
def heldout_loss(model: nn.Module, text: Text) -> float:
    batches = fixed_batches(text.heldout, batches=32, batch_size=1024, context_length=CONTEXT)
    return float(torch.stack([loss_of(model, *each) for each in batches]).mean())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Learner:
    """What both kinds of members have in common.

    `dies_at`: a moment of an averaging, and the how manieth such this process dies in: see `MOMENTS`.
    """

    def __init__(
        self, path: str, member: int, *, steps: int, seed: int, dies_at: tuple[str, int] | None
    ) -> None:
        torch.set_num_threads(1)
        self.out = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends, however it does
        self.member, self.num_steps, self.dies_at = member, steps, dies_at
        self.text = load_text(max_train_bytes=2_000_000, max_heldout_bytes=200_000)
        self.model = new_model(seed)  # all alike, so that it does not matter whose they start from
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.draws = torch.Generator().manual_seed(1_000_000 * seed + member)
        self.serves_deadly = False
        self.die_in_all_to_all: Callable[[], None] = die

    def tell(self, **said: Any) -> None:
        said = {"pid": os.getpid(), "member": self.member, "time": time.time(), **said}
        self.out.write(json.dumps(said) + "\n")

    def learn(self, steps_done: int) -> None:
        """Take a step of the inner optimizer, whose rate falls to zero at the end."""
        # Of the group's steps: who joins late has the others' rate.
        self.optimizer.param_groups[0]["lr"] = LR * max(0.0, 1 - steps_done / self.num_steps)
        self.optimizer.zero_grad()
        drawn = sample_batch(self.text.train, batch_size=BATCH, context_length=CONTEXT, generator=self.draws)
        loss = loss_of(self.model, *drawn)
        torch.autograd.backward(loss)
        self.optimizer.step()

    def serve(self) -> None:
        """Die, if it is to."""
        if self.serves_deadly:
            die()


def learn(
    path: str,
    lighthouse: str,
    member: int,
    *,
    peer: bool = False,
    steps: int = 1_000_000,
    seed: int = 0,
    step_seconds: float = 0.0,
    dies_at: tuple[str, int] | None = None,
    min_members: int = 1,
    timeout_seconds: float = 4.0,
    hostname: str = "127.0.0.1",
) -> None:
    """Learn with the others at a lighthouse; `peer`: with torchft's DiLoCo."""
    learner = Learner(path, member, steps=steps, seed=seed, dies_at=dies_at)
    # Ordered as their numbers: the first of those who are furthest serves newcomers.
    settings = {"name": f"member{member:03}", "min_members": min_members, "hostname": hostname}
    signal.signal(signal.SIGUSR1, lambda *_: learner.die_in_all_to_all())
    signal.signal(signal.SIGUSR2, lambda *_: setattr(learner, "serves_deadly", True))
    # Imported here: it builds on this module.
    member_of = import_module("elastic.peer").torchft_member if peer else thinwire_member
    try:
        with member_of(learner, lighthouse, timeout_seconds, **settings) as step:
            while step(step_seconds):
                pass
    except Exception as error:
        learner.tell(event="raised", error=type(error).__name__, message=str(error)[:300])
        raise


def diloco(learner: Learner, group: Group) -> DiLoCo:
    return DiLoCo(
        learner.model,
        learner.optimizer,
        every_steps=EVERY,
        group=group,
        algorithm=Quantize(bits=4, error_feedback=True),
    )


@contextmanager
def thinwire_member(
    learner: Learner, lighthouse: str, timeout_seconds: float, **settings: Any
) -> Iterator[Callable[[float], bool]]:
    group = TorchftGroup(lighthouse, timeout_seconds=timeout_seconds, wait_seconds=WAIT_SECONDS, **settings)
    moment, place = learner.dies_at or ("", 0)
    deadly = group.transport = Deadly(group.transport, MOMENTS.get(moment, "no such message"), place)

    def die_in_all_to_all() -> None:
        deadly.words, deadly.place = MOMENTS["all-to-all"], 1

    learner.die_in_all_to_all = die_in_all_to_all
    if moment == "receiving":
        torchft_group.receive_state = lambda *_: die()  # type: ignore[attr-defined]
    send_state = torchft_group.send_state  # type: ignore[attr-defined]

    def serve(*args: Any) -> None:
        learner.serve()
        send_state(*args)

    torchft_group.send_state = serve  # type: ignore[assignment, attr-defined]
    local = diloco(learner, group)
    was_averaged = -1

    def tell(event: str) -> None:
        nonlocal was_averaged
        was_averaged = local.steps
        stats = vars(local.membership()) | {"lineage": local._membership.lineage}
        learner.tell(event=event, step=local.steps, checksum=checksum(learner.model), **stats)

    def step(pause_seconds: float) -> bool:
        if local.steps >= learner.num_steps:
            return False
        learner.learn(local.steps)
        time.sleep(pause_seconds)
        if local.steps % EVERY == 0 and local.steps > was_averaged:
            tell("averaged")
        return True

    with local:
        tell("joined")
        yield step
    if local.steps < learner.num_steps:
        learner.tell(event="left")
    else:
        loss, stats = heldout_loss(learner.model, learner.text), local.stats()
        learner.tell(
            event="done", loss=loss, checksum=checksum(learner.model), sent_bytes=stats.message_bytes
        )
