"""The demo: `run_job` starts this module as each training process, with its options as JSON."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.checks import cores
from thinwire.demo.model import GPT, SIZES, heldout_loss, next_byte_loss
from thinwire.demo.options import DemoOptions
from thinwire.demo.records import RecordFile, TrainedStep
from thinwire.demo.text import Text, batch_generator, load_text, sample_batch
from thinwire.errors import ThinwireError
from thinwire.launch import LocalJob, join_local_job, leave_group, python_module

BATCH_SIZE = 8
PEAK_LEARNING_RATE = 0.12
# Of a collective: longer than one process measures the held-out loss, on any machine.
TIMEOUT_SECONDS = 1800.0
# Without it, the first steps overshoot, and training ends 0.4 worse.
MAX_GRADIENT_NORM = 1.0


class JobError(ThinwireError, RuntimeError):
    """The training job failed; the message says where its log is."""


class JobInterruptedError(ThinwireError):
    """The job was asked to end, by Ctrl-C or another signal, and has ended.

    Attributes:
        signal_number: The signal.
    """

    def __init__(self, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(
            f"stopped by {name}; every process has ended. Its steps are on disk; a demo can't be resumed, "
            "the same command begins again"
        )
        self.signal_number = signal_number


def run_job(options: DemoOptions, on_record: Callable[[TrainedStep], None]) -> None:
    """Train with every algorithm of `options`, and hand over each step's record soon after the step."""
    options.output.mkdir(parents=True, exist_ok=True)
    paths = [options.record_path(name) for name in options.algorithms]
    for path in paths:
        # A watch goes on in a file that is there, as after a resume.
        path.unlink(missing_ok=True)
    log_path = options.output / "processes.log"
    files = [RecordFile(path) for path in paths]

    def hand_over() -> None:
        for file in files:
            for step in file.new_records():
                on_record(step)

    command = [*python_module("thinwire.demo.train"), options.to_json()]
    with log_path.open("wb") as log, LocalJob(command, options.processes, out=log) as job:
        received = job.run(hand_over)
    if received is not None:
        raise JobInterruptedError(received)
    if job.failure is not None:
        raise JobError(f"the training job failed: {job.failure}; see {log_path}")


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: a linear rise over a tenth of the steps, then half a cosine."""
    rise = min(1.0, (step + 1) / (0.1 * steps))
    return PEAK_LEARNING_RATE * rise * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)


class Trainer:
    """One model in training with one algorithm: from the seed, not from what was trained before."""

    def __init__(self, options: DemoOptions, algorithm: str, train: Tensor) -> None:
        # Before the model: every algorithm starts from the same one.
        torch.manual_seed(options.seed)
        self._options, self._train = options, train
        self.model = GPT(SIZES[options.model_size])
        self._ddp_model = DistributedDataParallel(self.model)
        self.sync = thinwire.attach(self._ddp_model, options.algorithm(algorithm))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=PEAK_LEARNING_RATE, momentum=0.9)

    def step(self, step: int) -> float:
        """Train on this process's batch of `step`, counted from 0, and return its loss."""
        inputs, targets = sample_batch(
            self._train,
            batch_size=BATCH_SIZE,
            context_length=self.model.config.context_length,
            # Each process draws its own batch, and every algorithm sees the same ones.
            generator=batch_generator(seed=self._options.seed, step=step, process_rank=dist.get_rank()),
        )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, self._options.steps)
        self._optimizer.zero_grad()
        loss = next_byte_loss(self._ddp_model, inputs, targets)
        torch.autograd.backward(loss)
        # After the averaging: the means are the same on all processes, and so is what is cut.
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        return loss.item()


def train(options: DemoOptions, algorithm: str, text: Text) -> None:
    """Train a new model; process 0 records every step, and at the last one the held-out loss."""
    trainer = Trainer(options, algorithm, text.train)
    path, is_first = options.record_path(algorithm), dist.get_rank() == 0
    # One process records: the bytes of all are alike, and a file takes one.
    watch = thinwire.Watch(trainer.sync, path, name=algorithm) if is_first else None
    for step in range(options.steps):
        logged = {"loss": trainer.step(step)}
        if watch is not None:
            if step == options.steps - 1:
                # All hold the same model, so one measures; the others wait in the next averaging, or for the
                # end.
                logged["heldout_loss"] = heldout_loss(trainer.model, text.heldout)
            watch.log(**logged)
    if watch is not None:
        watch.close()


@record
def main() -> None:
    """Train with each algorithm in turn, as asked for by the first argument and the job's environment."""
    options = DemoOptions.from_json(sys.argv[1])
    # Or each process would start a thread for every core of the machine, and they would fight for them.
    torch.set_num_threads(max(1, cores() // options.processes))
    join_local_job("gloo", timeout_seconds=TIMEOUT_SECONDS)
    text = load_text()
    for algorithm in options.algorithms:
        train(options, algorithm, text)
    leave_group()


if __name__ == "__main__":
    main()
    # All is written and the group is gone; interpreter teardown now and then aborts in a native thread.
    os._exit(0)
