"""A process of the demo: it trains with every algorithm in turn, or as an elastic member."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import elastic
from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import REGISTRY
from thinwire.checks import cores, processes_here, whole_number
from thinwire.demo.model import (
    GPT,
    SIZES,
    Text,
    batch_generator,
    heldout_loss,
    load_text,
    next_byte_loss,
    sample_batch,
)
from thinwire.errors import ConfigError
from thinwire.launch import LOOK_EVERY_SECONDS, join_group, leave_group, python_module
from thinwire.local_sgd.groups.torchft_group import MEMBER

ALGORITHMS = {registered.name: registered for registered in REGISTRY}
BATCH_SIZE = 8
PEAK_LEARNING_RATE = 0.12
MAX_GRADIENT_NORM = 1.0  # without it, the first steps overshoot, and training ends 0.4 worse
TIMEOUT_SECONDS = 1800.0  # of a collective: others wait while the first process measures the held-out loss
LINES = 10  # that are printed in a training

ELASTIC_LEARNING_RATE = 2e-3
AVERAGED_EVERY_STEPS = 10
ELASTIC_TIMEOUT_SECONDS = 30.0  # of a message; longer than a busy computer lets any member stand still
WAIT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The settings of a run, checked before anything starts; `thinwire demo --help` says what each is."""

    processes: int = 2
    steps: int = 250
    algorithms: Sequence[str] = ("fp16", "quantize", "powersgd")
    matrix_rank: int = 4
    model_size: str = "small"
    seed: int = 0
    output: str | Path = "thinwire-demo"

    def __post_init__(self) -> None:
        processes_here("processes", self.processes, minimum=2)
        whole_number("steps", self.steps, minimum=1)
        if whole_number("seed", self.seed, minimum=0) >= 1 << 64:
            raise ConfigError(f"seed must be below 2**64, which torch's generators take, got {self.seed}")
        if self.model_size not in SIZES:
            raise ConfigError(f"model_size must be one of {', '.join(SIZES)}, got {self.model_size!r}")
        for name in self.algorithms:
            if self.algorithms.count(name) > 1:
                raise ConfigError(f"got algorithm={name!r} twice, expected each name once")
            self.algorithm(name)  # its settings are refused here

    def algorithm(self, name: str) -> Algorithm:
        """Return the algorithm of a name, with this run's settings."""
        if name not in ALGORITHMS:
            raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")
        return ALGORITHMS[name].made(matrix_rank=self.matrix_rank)

    def record_path(self, name: str | int) -> Path:
        """Return where the steps trained with an algorithm, or by an elastic member, are recorded."""
        return Path(self.output, f"member-{name}.jsonl" if isinstance(name, int) else f"{name}.jsonl")

    @property
    def may_join(self) -> Path:
        """The file that is there once the last elastic member may join."""
        return Path(self.output, "may-join")

    def command(self) -> list[str]:
        """Return the command line that runs this module with these options."""
        return [*python_module("thinwire.demo.train"), json.dumps(asdict(self), default=str)]


def loss_of(module: nn.Module, model: GPT, text: Text, options: DemoOptions, step: int, rank: int) -> Tensor:
    """Return a module's loss on a process's batch of a step, the same one for every algorithm."""
    generator = batch_generator(seed=options.seed, step=step, process_rank=rank)
    length = model.config.context_length
    batch = sample_batch(text.train, batch_size=BATCH_SIZE, context_length=length, generator=generator)
    return next_byte_loss(module, *batch)


def train(options: DemoOptions, algorithm: str, text: Text) -> None:
    """Train a new model; process 0 records every step, and at the last one the held-out loss."""
    torch.manual_seed(options.seed)  # before the model: every algorithm starts from the same one
    model = GPT(SIZES[options.model_size])
    ddp_model = DistributedDataParallel(model)
    sync = thinwire.attach(ddp_model, options.algorithm(algorithm))
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_LEARNING_RATE, momentum=0.9)
    rank, start = dist.get_rank(), time.monotonic()
    watch = thinwire.Watch(sync, options.record_path(algorithm), name=algorithm) if rank == 0 else None
    for step in range(1, options.steps + 1):
        # A linear rise over a tenth of the steps, then half a cosine.
        rise = min(1.0, 10 * step / options.steps)
        fall = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 1) / options.steps)) / 2
        optimizer.param_groups[0]["lr"] = PEAK_LEARNING_RATE * rise * fall
        optimizer.zero_grad()
        loss = loss_of(ddp_model, model, text, options, step, rank)
        torch.autograd.backward(loss)
        # After the averaging: the means are the same on all processes, and so is what is cut.
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        if watch is not None:
            watch.log(loss=loss.item())
            if step % max(1, options.steps // LINES) == 0 or step == options.steps:
                speed = step / (time.monotonic() - start)
                # If no one reads it, the table at the end meets that as well.
                with suppress(OSError):
                    line = f"{algorithm:>10}  step {step}/{options.steps}  loss {loss.item():.3f}"
                    print(f"{line}  {speed:.1f} steps/s", flush=True)
    if watch is not None:
        # All hold the same model, so one measures; the others wait for it in the next training.
        watch.log(heldout_loss=heldout_loss(model, text.heldout))
        watch.close()


def train_as_member(options: DemoOptions, member: int, text: Text) -> None:
    """Train with all who are there, and record every step; the first member measures the held-out loss."""
    # Each draws another model: all start from the first one's, or from that of those who are there.
    torch.manual_seed(options.seed + member)
    model = GPT(SIZES[options.model_size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=ELASTIC_LEARNING_RATE)
    # Started with the others, though it joins later: what a process loads first takes longer than they train.
    # Before its group, which announces it to the others.
    while member == options.processes and not options.may_join.exists():
        time.sleep(LOOK_EVERY_SECONDS)
    group = elastic.TorchftGroup(timeout_seconds=ELASTIC_TIMEOUT_SECONDS, wait_seconds=WAIT_SECONDS)
    with (
        elastic.DiLoCo(model, optimizer, every_steps=AVERAGED_EVERY_STEPS, group=group) as local,
        thinwire.Watch(local, options.record_path(member), name=f"member {member}") as watch,
    ):
        while local.steps < options.steps:
            optimizer.zero_grad()
            loss = loss_of(model, model, text, options, local.steps, member)
            torch.autograd.backward(loss)
            optimizer.step()
            watch.log(loss=loss.item())
        with local.averaged():
            held = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            watch.log(checksum=zlib.crc32(held.numpy().tobytes()))
            if member == 0:
                watch.log(heldout_loss=heldout_loss(model, text.heldout))


@record
def main() -> None:
    """Train as the first argument asks, and as the environment says: a process of a job, or a member."""
    options, text = DemoOptions(**json.loads(sys.argv[1])), load_text()
    # They share the cores of one machine, and would else start a thread for every core each.
    if MEMBER in os.environ:
        torch.set_num_threads(1)
        train_as_member(options, int(os.environ[MEMBER]), text)
        return
    torch.set_num_threads(max(1, cores() // options.processes))
    join_group("gloo", timeout_seconds=TIMEOUT_SECONDS)
    for algorithm in options.algorithms:
        train(options, algorithm, text)
    leave_group()


if __name__ == "__main__":
    main()
    # All is written and the group is gone; interpreter teardown now and then aborts in a native thread.
    os._exit(0)
