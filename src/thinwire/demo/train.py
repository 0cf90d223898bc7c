"""A process of the demo: it trains with every algorithm in turn."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import REGISTRY
from thinwire.checks import cores, processes_here, whole_number
from thinwire.demo.gpt import (
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
from thinwire.launch import join_group, leave_group, python_module

ALGORITHMS = {registered.name: registered for registered in REGISTRY}
BATCH_SIZE = 8
PEAK_LEARNING_RATE = 0.12
MAX_GRADIENT_NORM = 1.0  # without it, the first steps overshoot, and the final loss is 0.4 higher
TIMEOUT_SECONDS = 1800.0  # of a collective: others wait while the first process measures the held-out loss
LINES = 10  # printed per training


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The settings of a run, checked before anything starts; `thinwire demo --help` explains them."""

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
            self.algorithm(name)  # raises if its settings are wrong

    def algorithm(self, name: str) -> Algorithm:
        if name not in ALGORITHMS:
            raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")
        return ALGORITHMS[name].made(matrix_rank=self.matrix_rank)

    def record_path(self, algorithm: str) -> Path:
        return Path(self.output, f"{algorithm}.jsonl")

    def command(self) -> list[str]:
        """Return the command line that runs this module with these options."""
        return [*python_module("thinwire.demo.train"), json.dumps(asdict(self), default=str)]


def train(options: DemoOptions, algorithm: str, text: Text) -> None:
    """Train a new model; process 0 records every step, and the held-out loss at the last one."""
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
        # The same batch for every algorithm.
        generator = batch_generator(seed=options.seed, step=step, process_rank=rank)
        length = model.config.context_length
        batch = sample_batch(text.train, batch_size=BATCH_SIZE, context_length=length, generator=generator)
        loss = next_byte_loss(ddp_model, *batch)
        torch.autograd.backward(loss)
        # After averaging: the means are the same on all processes, and so is the clipping.
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        if watch is not None:
            watch.log(loss=loss.item())
            if step % max(1, options.steps // LINES) == 0 or step == options.steps:
                speed = step / (time.monotonic() - start)
                # Ignore a closed stdout: printing the table at the end will report it.
                with suppress(OSError):
                    line = f"{algorithm:>10}  step {step}/{options.steps}  loss {loss.item():.3f}"
                    print(f"{line}  {speed:.1f} steps/s", flush=True)
    if watch is not None:
        # All have the same model, so one process measures; the others wait for it in the next training.
        watch.log(heldout_loss=heldout_loss(model, text.heldout))
        watch.close()


@record
def main() -> None:
    """Train with the options in the first argument, as a process of a job."""
    options, text = DemoOptions(**json.loads(sys.argv[1])), load_text()
    # Processes share the cores of one machine; each would otherwise start a thread for every core.
    torch.set_num_threads(max(1, cores() // options.processes))
    join_group("gloo", timeout_seconds=TIMEOUT_SECONDS)
    for algorithm in options.algorithms:
        train(options, algorithm, text)
    leave_group()


if __name__ == "__main__":
    main()
    # Everything is written and the group is destroyed; interpreter teardown sometimes aborts in a thread.
    os._exit(0)
