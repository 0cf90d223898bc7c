"""A member of a real elastic group that learns to predict bytes: by Thinwire, or by torchft's own DiLoCo.

It tells of every averaging, a line each, and at the end of its held-out loss. SIGUSR1 lets it die in the
middle of its next all-to-all (torchft's: all-reduce), SIGUSR2 when it next serves a newcomer.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from machine_member import Deadly, die
from thinwire import checkpoint
from thinwire.algorithms import Quantize
from thinwire.demo.gpt import Text, fixed_batches, load_text, sample_batch
from thinwire.elastic import DiLoCo, Group, Steps, TorchftGroup
from thinwire.local_sgd.groups import torchft_group
from thinwire.tensors.layout import local_tensor

EVERY, BATCH, CONTEXT, LR = 4, 64, 8, 3e-3
USUAL = 4  # members: torchft's outer learning rate is chosen for so many
WAIT_SECONDS = 120.0
FEW_BITS = Quantize(bits=4, error_feedback=True)
MOMENTS = {
    "all-to-all": "round 1",
    "all-gather": "round 2",
    "vote": "whether all have",
    "asking": "who takes",
}


def new_model(seed: int, width: int, has_buffers: bool) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.Tanh(), *([nn.BatchNorm1d(width)] if has_buffers else [])]
    first = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, width)]
    return nn.Sequential(*first, *middle, nn.Linear(width, 256))


def wrapped(model: nn.Module, inside: str) -> nn.Module:
    """Return the model of a process whose member has several."""
    dist.init_process_group("gloo")
    return DistributedDataParallel(model) if inside == "ddp" else fully_shard(model)  # type: ignore[return-value]


def checksum(model: nn.Module) -> str:
    """Of what this process holds."""
    held = [local_tensor(each.detach()).float().reshape(-1) for each in model.state_dict().values()]
    return hashlib.sha256(torch.cat(held).numpy().tobytes()).hexdigest()[:16]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), targets[:, -1])


@torch.no_grad()
def heldout_loss(model: nn.Module, text: Text, batches: int = 32) -> float:
    drawn = fixed_batches(text.heldout, batches=batches, batch_size=1024, context_length=CONTEXT)
    return float(torch.stack([loss_of(model, *each) for each in drawn]).mean())


class Learner:
    """What both kinds of members have in common.

    `dies_at`: a moment of an averaging, and the how manieth such this process dies in: see `MOMENTS`.
    `inside`: what the processes of a member have in common, "ddp" or "fsdp"; none if it has one.
    `heldout_batches`: by which it tells of its loss after each averaging.
    """

    def __init__(
        self,
        path: str,
        member: int,
        *,
        steps: int,
        seed: int,
        dies_at: tuple[str, int] | None = None,
        width: int = 64,
        has_buffers: bool = False,
        inside: str = "",
        every_steps: int = EVERY,
        every_seconds: float | None = None,
        heldout_batches: int = 0,
        rate: float = LR,
    ) -> None:
        torch.set_num_threads(1)
        self.every_steps, self.every_seconds = every_steps, every_seconds
        self.heldout_batches, self.rate = heldout_batches, rate
        self.out = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends, however it does
        self.member, self.num_steps, self.dies_at = member, steps, dies_at
        self.file = Path(path).with_name(f"member{member}.pt")
        self.text = load_text(max_train_bytes=2_000_000, max_heldout_bytes=200_000)
        self.model = new_model(seed, width, has_buffers)
        self.rank = int(os.environ.get("RANK", "0"))
        if inside:
            self.model = wrapped(self.model, inside)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.first_draw = 1_000_000_000 * seed + 1_000_000 * member + 500_000 * self.rank
        self.serves_deadly = False
        self.die_in_all_to_all: Callable[[], None] = die

    def tell(self, **said: Any) -> None:
        who = {"pid": os.getpid(), "member": self.member, "rank": self.rank, "time": time.time()}
        self.out.write(json.dumps(who | said) + "\n")

    def tell_averaged(self, **said: Any) -> None:
        if self.heldout_batches:
            said["loss"] = heldout_loss(self.model, self.text, self.heldout_batches)
        self.tell(event="averaged", checksum=checksum(self.model), **said)

    def learn(self, steps_done: int, step: Callable[[], object] | None = None) -> None:
        """Take a step of the inner optimizer, or that `step`; the rate falls to zero at the end."""
        # Of the group's steps: who joins late has the others' rate.
        self.optimizer.param_groups[0]["lr"] = self.rate * max(0.0, 1 - steps_done / self.num_steps)
        self.optimizer.zero_grad()
        # Of the member and the step alone: a run that resumes draws the same.
        draws = torch.Generator().manual_seed(self.first_draw + steps_done)
        drawn = sample_batch(self.text.train, batch_size=BATCH, context_length=CONTEXT, generator=draws)
        loss = loss_of(self.model, *drawn)
        torch.autograd.backward(loss)
        (step or self.optimizer.step)()

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
    step_seconds: float = 0.01,
    dies_at: tuple[str, int] | None = None,
    learning: Mapping[str, Any] | None = None,
    min_members: int = 1,
    timeout_seconds: float = 4.0,
    hostname: str = "127.0.0.1",
    **options: Any,
) -> None:
    """Learn with the others at a lighthouse.

    `peer`: with torchft's DiLoCo; `learning`: how, as of `Learner`; `options`: of the member.
    """
    learner = Learner(path, member, steps=steps, seed=seed, dies_at=dies_at, **(learning or {}))
    learner.tell(event="ready")
    # Ordered as their numbers: the first of those who are furthest serves newcomers.
    settings = {"name": f"member{member:03}", "min_members": min_members, "hostname": hostname, **options}
    signal.signal(signal.SIGUSR1, lambda *_: learner.die_in_all_to_all())
    signal.signal(signal.SIGUSR2, lambda *_: setattr(learner, "serves_deadly", True))
    # Imported here: it builds on this module.
    member_of = import_module("peer").torchft_member if peer else thinwire_member
    try:
        with member_of(learner, lighthouse, timeout_seconds, **settings) as step:
            while step(step_seconds):
                pass
    except Exception as error:
        learner.tell(event="raised", error=type(error).__name__, message=str(error)[:1000])
        raise


def diloco(learner: Learner, group: Group) -> DiLoCo | Steps:
    settings: dict[str, Any] = {"every_steps": learner.every_steps, "algorithm": FEW_BITS}
    if learner.every_seconds is not None:
        settings |= {"every_steps": None, "every_seconds": learner.every_seconds}
    return DiLoCo(learner.model, learner.optimizer, group=group, **settings)


def made_deadly(learner: Learner, group: TorchftGroup) -> None:
    """Let the process die where `dies_at` says, and where a signal says later."""
    moment, place = learner.dies_at or ("", 0)
    deadly = group.transport = Deadly(group.transport, MOMENTS.get(moment, "no such message"), place)

    def die_in_all_to_all() -> None:
        deadly.words, deadly.number = MOMENTS["all-to-all"], 1

    learner.die_in_all_to_all = die_in_all_to_all
    if moment == "receiving":
        torchft_group.receive_state = lambda *_: die()  # type: ignore[attr-defined]
    send_state = torchft_group.send_state  # type: ignore[attr-defined]

    def serve(*args: Any) -> None:
        learner.serve()
        send_state(*args)

    torchft_group.send_state = serve  # type: ignore[assignment, attr-defined]


@contextmanager
def thinwire_member(
    learner: Learner,
    lighthouse: str,
    timeout_seconds: float,
    *,
    averages_gradients: bool = False,
    saves_at: int = -1,
    resumes: bool = False,
    **settings: Any,
) -> Iterator[Callable[[float], bool]]:
    """Yield what takes a step: one of `diloco`'s, or one that averages gradients.

    After step `saves_at` it saves to a file, from which one that `resumes` goes on.
    """
    group = TorchftGroup(lighthouse, timeout_seconds=timeout_seconds, wait_seconds=WAIT_SECONDS, **settings)
    made_deadly(learner, group)
    file, local, was_averaged = learner.file, diloco(learner, group), -1
    seconds: list[float] = []  # of each step
    if averages_gradients:
        local = Steps(learner.model, learner.optimizer, FEW_BITS, group=group)
    if resumes:
        local.load_state_dict(checkpoint.load(file))

    def stats() -> dict[str, Any]:
        told = {"lineage": local._contributor.lineage, "step": local.steps}
        return vars(local.membership()) | told | {"ratio": local.stats().compression_ratio}

    def step(pause_seconds: float) -> bool:
        if local.steps >= learner.num_steps:
            return False
        start = time.monotonic()
        learner.learn(local.steps, local.step if isinstance(local, Steps) else None)
        if local.steps == saves_at:
            checkpoint.save(local.state_dict(), file)
        time.sleep(pause_seconds)
        seconds.append(time.monotonic() - start)
        nonlocal was_averaged
        is_due = local.steps % learner.every_steps == 0 and learner.every_seconds is None
        if is_due and local.steps > was_averaged:
            was_averaged = local.steps
            learner.tell_averaged(**stats())
        return True

    with local:
        was_averaged = local.steps
        learner.tell(event="joined", checksum=checksum(learner.model), **stats())
        yield step
    if local.steps < learner.num_steps:
        threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        learner.tell(event="left", threads=threads)
    else:
        loss, sent_bytes = heldout_loss(learner.model, learner.text), local.stats().message_bytes
        said = {"loss": loss, "checksum": checksum(learner.model), "sent_bytes": sent_bytes}
        learner.tell(event="done", step_seconds=seconds, **stats() | said)
