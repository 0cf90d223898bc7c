"""Wall-clock time to the same held-out loss over a slow network, in `thinwire lab`.

Exact averaging trains for a fixed number of steps; the loss it ends with is what all others must reach, with
the same learning rate and the same batches. The clock stands still while the loss is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import plots
import thinwire
from in_lab import interface_sent_bytes, leave_job, run_in_lab
from lstm import new_lstm
from pages import markdown_table, page, save, save_json
from thinwire.algorithms import Algorithm
from thinwire.demo.model import GPT, GPTConfig, next_byte_loss
from thinwire.demo.text import batch_generator, fixed_batches, load_text, sample_batch

NUM_HOSTS = 2
CONTEXT_LENGTH = 64
BATCH_SIZE = 8
MAX_GRADIENT_NORM = 1.0
WARMUP_STEPS = 30
EVALUATE_EVERY_STEPS = 20
HELDOUT_BATCHES = 32
SEED = 0
EXACT = "AllReduce()"
SIXTEEN_BIT = 'Cast("fp16")'

TASKS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: GPT(GPTConfig(layers=3, heads=4, width=128, context_length=CONTEXT_LENGTH)),
    "LSTM": new_lstm,
}
# The best of five each for exact averaging after 300 steps, on another seed; of GPT, as in bench_quality.py.
OPTIMIZERS: dict[str, dict[str, Callable[[nn.Module], Optimizer]]] = {
    "SGD": {
        "GPT": lambda model: SGD(model.parameters(), lr=0.12, momentum=0.9),
        "LSTM": lambda model: SGD(model.parameters(), lr=4.0, momentum=0.9),
    },
    "AdamW": {
        "GPT": lambda model: AdamW(model.parameters(), lr=2e-3),
        "LSTM": lambda model: AdamW(model.parameters(), lr=2e-3),
    },
}


@dataclass(frozen=True)
class Setting:
    """One lab: all algorithms run in it, one after the other."""

    task: str
    optimizer: str
    rate: str

    def __str__(self) -> str:
        return f"{self.task}, {self.optimizer}, {self.rate}"


class Reached(NamedTuple):
    """When a loss was reached."""

    seconds: float
    steps: float


@dataclass(frozen=True)
class Curve:
    """One training: steps, seconds on the clock, held-out loss and bytes sent at each evaluation."""

    algorithm: str
    steps: list[int]
    seconds: list[float]
    losses: list[float]
    sent_bytes: list[int]

    def when(self, target: float) -> Reached | None:
        """When the loss reaches `target`, linear between evaluations; None if never."""
        for i in range(1, len(self.losses)):
            if self.losses[i] <= target:
                share = (self.losses[i - 1] - target) / (self.losses[i - 1] - self.losses[i])
                between = [
                    each[i - 1] + share * (each[i] - each[i - 1]) for each in (self.seconds, self.steps)
                ]
                return Reached(*between)
        return None


Averaging = Callable[[nn.Module, Optimizer], AbstractContextManager[nn.Module]]


def each_step(algorithm: Algorithm) -> Averaging:
    @contextmanager
    def averaging(model: nn.Module, optimizer: Optimizer) -> Iterator[nn.Module]:
        wrapped = DistributedDataParallel(model)
        thinwire.attach(wrapped, algorithm)
        yield wrapped

    return averaging


def every_ten_steps(outer: Callable[[list[torch.Tensor]], Optimizer] | None = None) -> Averaging:
    @contextmanager
    def averaging(model: nn.Module, optimizer: Optimizer) -> Iterator[nn.Module]:
        with thinwire.LocalSGD(model, optimizer, every_steps=10, outer=outer):
            yield model

    return averaging


ALGORITHMS: dict[str, Averaging] = {
    EXACT: each_step(thinwire.AllReduce()),
    SIXTEEN_BIT: each_step(thinwire.Cast("fp16")),
    "PowerSGD(matrix_rank=4)": each_step(thinwire.PowerSGD(matrix_rank=4)),
    "PowerSGD(matrix_rank=8)": each_step(thinwire.PowerSGD(matrix_rank=8)),
    "LocalSGD(every_steps=10)": every_ten_steps(),
    "LocalSGD, DiLoCo's outer": every_ten_steps(lambda p: SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
}


class Work:
    """On each host: all algorithms in turn."""

    def __init__(self, setting: Setting, target_steps: int, most_steps: int) -> None:
        self.setting, self.target_steps, self.most_steps = setting, target_steps, most_steps
        self.text = load_text()
        self.target = -math.inf

    def curves(self) -> list[Curve]:
        """One an algorithm; the first, exact, sets the target."""
        found = []
        for name, averaging in ALGORITHMS.items():
            found.append(self._train(name, averaging))
            if name == EXACT:
                self.target = found[0].losses[-1]
            if dist.get_rank() == 0:
                print(name, found[-1].steps[-1], "steps", f"{found[-1].seconds[-1]:.1f} s", flush=True)
        return found

    def _train(self, name: str, averaging: Averaging) -> Curve:
        torch.manual_seed(SEED)
        model = TASKS[self.setting.task]()
        optimizer = OPTIMIZERS[self.setting.optimizer][self.setting.task](model)
        peak = optimizer.param_groups[0]["lr"]
        curve = Curve(name, [0], [0.0], [self._loss(model)], [0])
        most_steps = self.target_steps if name == EXACT else self.most_steps
        with averaging(model, optimizer) as called:
            while curve.steps[-1] < most_steps and curve.losses[-1] > self.target:
                dist.barrier()
                start_seconds, start_bytes = time.perf_counter(), interface_sent_bytes()
                for step in range(curve.steps[-1], curve.steps[-1] + EVALUATE_EVERY_STEPS):
                    optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / WARMUP_STEPS)
                    self._step(called, optimizer, step)
                dist.barrier()
                curve.seconds.append(curve.seconds[-1] + time.perf_counter() - start_seconds)
                curve.sent_bytes.append(curve.sent_bytes[-1] + interface_sent_bytes() - start_bytes)
                curve.steps.append(step + 1)
                curve.losses.append(self._loss(model))
        return curve

    def _step(self, called: nn.Module, optimizer: Optimizer, step: int) -> None:
        generator = batch_generator(seed=SEED, step=step, process_rank=dist.get_rank())
        inputs, targets = sample_batch(
            self.text.train, batch_size=BATCH_SIZE, context_length=CONTEXT_LENGTH, generator=generator
        )
        optimizer.zero_grad()
        torch.autograd.backward(next_byte_loss(called, inputs, targets))
        nn.utils.clip_grad_norm_(called.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        """Held-out, that of the first host on all, so that all end at the same step."""
        batches = fixed_batches(
            self.text.heldout, batches=HELDOUT_BATCHES, batch_size=BATCH_SIZE, context_length=CONTEXT_LENGTH
        )
        losses = [next_byte_loss(model, inputs, targets) for inputs, targets in batches]
        mean = torch.stack(losses).mean()
        dist.broadcast(mean, src=0)
        return mean.item()


def work(setting: Setting, arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    curves = Work(setting, arguments.target_steps, arguments.most_steps).curves()
    if dist.get_rank() == 0:
        arguments.work.write_text(json.dumps([asdict(curve) for curve in curves]))
    leave_job()


def measured(setting: Setting, arguments: argparse.Namespace) -> list[Curve]:
    """Run all algorithms in the lab."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "curves.json")
        script = [__file__, f"--work={out}", f"--target-steps={arguments.target_steps}"]
        script += [f"--most-steps={arguments.most_steps}", f"--tasks={setting.task}"]
        script += [f"--optimizers={setting.optimizer}", f"--rates={setting.rate}"]
        run_in_lab(NUM_HOSTS, setting.rate, script)
        curves = [Curve(**each) for each in json.loads(out.read_text())]
    exact_bytes = curves[0].sent_bytes[-1] / curves[0].steps[-1]
    for curve in curves[1:]:
        sent_bytes = curve.sent_bytes[-1] / curve.steps[-1]
        assert sent_bytes < exact_bytes / 1.8, f"{curve.algorithm} sent {sent_bytes} bytes per step"
    return curves


def table(by_rate: dict[str, list[Curve]]) -> str:
    """One row an algorithm; the target is the last loss of exact."""
    names = list(ALGORITHMS)
    rows = []
    for index, name in enumerate(names):
        cells, steps, loss = [], [], ""
        for curves in by_rate.values():
            target = curves[0].losses[-1]
            reached, sixteen = curves[index].when(target), curves[1].when(target)
            loss = f"{curves[index].losses[-1]:.3f}"
            if reached is None:
                cells += [f"> {curves[index].seconds[-1]:.0f}", ""]
                steps.append("not reached")
                continue
            cells += [f"{reached.seconds:.1f}", f"{sixteen.seconds / reached.seconds:.1f}" if sixteen else ""]
            steps.append(f"{reached.steps:.0f}")
        sent = curves[index].sent_bytes[-1] / curves[index].steps[-1] / 1e6
        rows.append([name, *cells, " / ".join(steps), loss, f"{sent:.2f}"])
    header = ["", *[cell for rate in by_rate for cell in (f"s at {rate}", "faster than 16-bit")]]
    return markdown_table([*header, "steps", "last loss", "MB sent per step"], rows)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--target-steps", type=int, default=300, help="of exact")
    parser.add_argument("--most-steps", type=int, default=600, help="of all others")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    if arguments.work is not None:
        setting = Setting(arguments.tasks[0], arguments.optimizers[0], arguments.rates[0])
        work(setting, arguments)
        return
    sizes = [f"{task}: {num_parameters(make()) / 1e6:.1f} M parameters" for task, make in TASKS.items()]
    sections = [
        f"{NUM_HOSTS} hosts, {BATCH_SIZE} windows of {CONTEXT_LENGTH} bytes each a step, of the standard "
        f"library of this Python. {', '.join(sizes)}. "
        "The learning rate is constant after "
        f"{WARMUP_STEPS} steps, the best for exact averaging, the same for all. Exact trains for "
        f"{arguments.target_steps} steps; how long it takes the others to reach its loss, within "
        f"{arguments.most_steps} steps (loss every {EVALUATE_EVERY_STEPS} steps, linear between). One seed. "
        "The hosts share one machine's processors."
    ]
    raw, figures = [], {}
    for task in arguments.tasks:
        for optimizer in arguments.optimizers:
            by_rate = {}
            for rate in arguments.rates:
                setting = Setting(task, optimizer, rate)
                print(f"{setting} …", flush=True)
                by_rate[rate] = figures[str(setting)] = measured(setting, arguments)
                raw += [asdict(setting) | asdict(curve) for curve in by_rate[rate]]
            target = by_rate[arguments.rates[0]][0].losses[-1]
            sections.append(f"## {task}, {optimizer}, to {target:.3f} nats a byte\n\n{table(by_rate)}")
            print(sections[-1], flush=True)
            save_json(raw, "time-to-loss")
    sections.append(f"![loss against seconds]({plots.loss_against_time(figures)[0]})")
    print(save(page("Time to the same loss", *sections), "time-to-loss"))


if __name__ == "__main__":
    main()
