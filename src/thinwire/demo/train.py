"""The demo: one training for each algorithm, in processes of this machine, and the figures of each.

`run_job` starts this module as each training process, with its options as JSON.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import thinwire
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
from thinwire.errors import ConfigError, ThinwireError
from thinwire.launch import LocalJob, join_local_job, leave_group, python_module
from thinwire.plan import compression_ratio
from thinwire.probe.result import ring_share
from thinwire.watch.records import Growing, Record

ALGORITHMS = {registered.name: registered for registered in REGISTRY}
SEEDS = 1 << 64
COUNTED = ("step_seconds", "waiting_seconds", "message_bytes", "gradient_bytes")
BATCH_SIZE = 8
PEAK_LEARNING_RATE = 0.12
# Of a collective: longer than one process measures the held-out loss, on any machine.
TIMEOUT_SECONDS = 1800.0
# Without it, the first steps overshoot, and training ends 0.4 worse.
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The settings of a run, checked before anything starts; `thinwire demo --help` says what each is."""

    processes: int = 2
    steps: int = 250
    algorithms: tuple[str, ...] = ("fp16", "quantize", "powersgd")
    matrix_rank: int = 4
    model_size: str = "small"
    seed: int = 0
    output: Path = Path("thinwire-demo")

    def __post_init__(self) -> None:
        processes_here("processes", self.processes, minimum=2)
        whole_number("steps", self.steps, minimum=1)
        whole_number("seed", self.seed, minimum=0)
        if self.seed >= SEEDS:
            raise ConfigError(f"seed must be below 2**64, which torch's generators take, got {self.seed}")
        _check_choice("model_size", self.model_size, tuple(SIZES))
        if not self.algorithms:
            raise ConfigError(f"got no algorithms, expected at least one of {', '.join(ALGORITHMS)}")
        for name in self.algorithms:
            _check_choice("algorithm", name, tuple(ALGORITHMS))
            if self.algorithms.count(name) > 1:
                raise ConfigError(f"got algorithm={name!r} twice, expected each name once")
            # Its settings are refused here, before anything is started.
            self.algorithm(name)

    def algorithm(self, name: str) -> Algorithm:
        """Return the algorithm of a name, with this run's settings."""
        # Those that have no such setting leave it aside.
        return ALGORITHMS[name].made(matrix_rank=self.matrix_rank)

    def record_path(self, algorithm: str) -> Path:
        """Return where the steps trained with `algorithm` are recorded."""
        return self.output / f"{algorithm}.jsonl"

    def to_json(self) -> str:
        """Return a line that `from_json` reads: how options travel to the training processes."""
        return json.dumps({**asdict(self), "output": str(self.output)})

    @classmethod
    def from_json(cls, line: str) -> DemoOptions:
        """Return the options that `to_json` wrote."""
        fields = json.loads(line)
        # JSON has neither tuples nor paths.
        fields.update(algorithms=tuple(fields["algorithms"]), output=Path(fields["output"]))
        return cls(**fields)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One training step, as process 0 saw it: `step` counts from 1, `loss` is of its batch."""

    algorithm: str
    processes: int
    step: int
    loss: float
    step_seconds: float
    waiting_seconds: float
    message_bytes: int
    gradient_bytes: int
    heldout_loss: float | None = None


class RecordFile:
    """The file of a watch that may still be going on."""

    def __init__(self, path: Path) -> None:
        self._file = Growing(path)
        self._run: Record = {}
        self._step: Record = {}

    def new_records(self) -> list[TrainedStep]:
        """Return the steps whose loss was logged since the last call."""
        found = []
        for line in self._file.new_records():
            if line["kind"] == "run":
                self._run = line
            elif line["kind"] == "step":
                self._step = line
            elif line["kind"] == "log":
                # A step is whole with its loss, which is logged behind the record of what it sent.
                found.append(
                    TrainedStep(
                        algorithm=self._run["name"],
                        processes=self._run["processes"],
                        step=line["step"],
                        # What was not finite is null in the file.
                        loss=math.nan if line["loss"] is None else line["loss"],
                        heldout_loss=line.get("heldout_loss"),
                        **{name: self._step[name] for name in COUNTED},
                    )
                )
        return found


def read_records(path: Path) -> list[TrainedStep]:
    """Return all complete records in a file; none if there is no such file."""
    return RecordFile(path).new_records()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What one algorithm did to one run: medians over steps, and what process 0 sent, a mean over steps."""

    algorithm: str
    processes: int
    heldout_loss: float | None
    step_seconds: float
    waiting_seconds: float
    working_seconds: float
    message_bytes: float
    compression_ratio: float

    def implied_step_seconds(self, bits_per_second: float) -> float:
        """Return the step time on a link of this rate, computed: nothing overlaps, latency is ignored."""
        return self.working_seconds + 8 * self.message_bytes * ring_share(self.processes) / bits_per_second


def summarize(steps: Sequence[TrainedStep]) -> Summary:
    """Return the figures of one algorithm's steps."""
    return Summary(
        algorithm=steps[-1].algorithm,
        processes=steps[-1].processes,
        heldout_loss=steps[-1].heldout_loss,
        step_seconds=median(step.step_seconds for step in steps),
        waiting_seconds=median(step.waiting_seconds for step in steps),
        # Of the differences: medians of two numbers do not subtract to the median of their difference.
        working_seconds=median(step.step_seconds - step.waiting_seconds for step in steps),
        # The mean, unlike above: some algorithms send much in one step of several, and links carry the sum.
        message_bytes=fmean(step.message_bytes for step in steps),
        compression_ratio=compression_ratio(
            sum(step.gradient_bytes for step in steps), sum(step.message_bytes for step in steps)
        ),
    )


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
