"""Time to the same held-out loss over a slow network, in `thinwire lab`.

Exact averaging trains for a fixed number of steps; the loss it ends with is what all others must reach, with
the same learning rate and the same batches. What loss a step ends with does not depend on the network, so
every algorithm trains once, without a slow link; then all take turns over each link, a few steps each, and a
loss's time is its steps times the median step. So a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count, islice, product
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import plots
import thinwire
from in_lab import UNSHAPED, leave_job, run_in_lab
from models import new_lstm
from pages import markdown_table, page, save, save_json
from progress import Kept, Progress
from thinwire.algorithms import Algorithm
from thinwire.demo.model import GPT, SIZES, GPTConfig, fixed_batches, next_byte_loss
from torchft_diloco import OUTER_LR, OUTER_MOMENTUM, torchft_diloco
from trainings import text, windows
from turns import Contender, take_turns, turns_done

NUM_HOSTS = 2
CONTEXT_LENGTH = 64
BATCH_SIZE = 8
MAX_GRADIENT_NORM = 1.0
WARMUP_STEPS = 30
EVALUATE_EVERY_STEPS = 30
HELDOUT_BATCHES = 32
SEED = 0
EXACT = "AllReduce()"
SIXTEEN_BIT = 'Cast("bf16")'
SMALL_BUCKET_MB = 4
CONSTANT, COSINE = "constant", "cosine"
KEPT = Kept("time-to-loss")
DILOCO_EVERY_STEPS = 30

TASKS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: GPT(GPTConfig(layers=3, heads=4, width=128, context_length=CONTEXT_LENGTH)),
    "LSTM": new_lstm,
    "larger GPT": lambda: GPT(SIZES["medium"]),
}
# The best of five each for exact averaging after 300 steps, on another seed; of GPT, as in bench_quality.py.
# The larger GPT's were not searched for.
RATES = {
    "SGD": {"GPT": 0.12, "LSTM": 4.0, "larger GPT": 0.05},
    "AdamW": {"GPT": 2e-3, "LSTM": 2e-3, "larger GPT": 1e-3},
}


@dataclass(frozen=True)
class Setting:
    """What is trained with what."""

    task: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.task}, {self.optimizer}"


@dataclass(frozen=True)
class Curve:
    """One training: steps and held-out loss at each evaluation."""

    algorithm: str
    steps: list[int]
    losses: list[float]

    def when(self, target: float) -> float | None:
        """Steps until the loss reaches `target`, linear between evaluations; None if it never does."""
        for i in range(1, len(self.losses)):
            if self.losses[i] <= target:
                share = (self.losses[i - 1] - target) / (self.losses[i - 1] - self.losses[i])
                return self.steps[i - 1] + share * (self.steps[i] - self.steps[i - 1])
        return None


@dataclass(frozen=True)
class Way:
    """A way to average: a context in which what it yields is trained."""

    averaging: Callable[[nn.Module, Optimizer], AbstractContextManager[nn.Module]]
    period_steps: int = 1  # after which what it does begins again


def each_step(algorithm: Algorithm) -> Way:
    @contextmanager
    def averaging(model: nn.Module, optimizer: Optimizer) -> Iterator[nn.Module]:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKET_MB, gradient_as_bucket_view=True)
        thinwire.attach(wrapped, algorithm)
        yield wrapped

    return Way(averaging)


def now_and_then(every_steps: int, algorithm: Algorithm, outer: thinwire.Nesterov | None = None) -> Way:
    @contextmanager
    def averaging(model: nn.Module, optimizer: Optimizer) -> Iterator[nn.Module]:
        with thinwire.LocalSGD(model, optimizer, every_steps=every_steps, algorithm=algorithm, outer=outer):
            yield model

    return Way(averaging, every_steps)


def diloco(algorithm: Algorithm) -> Way:
    return now_and_then(
        DILOCO_EVERY_STEPS, algorithm, thinwire.Nesterov(lr=OUTER_LR, momentum=OUTER_MOMENTUM)
    )


@contextmanager
def torchft(model: nn.Module, optimizer: Optimizer) -> Iterator[nn.Module]:
    with torchft_diloco(model, optimizer, [model], every_steps=DILOCO_EVERY_STEPS):
        yield model


@contextmanager
def accelerate_local(model: nn.Module, optimizer: Optimizer) -> Iterator[nn.Module]:
    """Accelerate's own: a reduction in fp32 for each parameter."""
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    wrapped: nn.Module = accelerator.prepare_model(model)
    assert isinstance(wrapped, DistributedDataParallel), "it averages nothing in one process"
    local_sgd = import_module("accelerate.local_sgd").LocalSGD
    with local_sgd(accelerator, wrapped, local_sgd_steps=ACCELERATE_EVERY_STEPS) as local:
        with_step = optimizer.register_step_post_hook(lambda *_: local.step())
        yield wrapped
        with_step.remove()


TORCHFT = "torchft DiLoCo"
ACCELERATE_EVERY_STEPS = 10
ACCELERATE = f"Accelerate's LocalSGD({ACCELERATE_EVERY_STEPS})"
ALGORITHMS: dict[str, Way] = {
    EXACT: each_step(thinwire.AllReduce()),
    SIXTEEN_BIT: each_step(thinwire.Cast("bf16")),
    "PowerSGD(matrix_rank=4)": each_step(thinwire.PowerSGD(matrix_rank=4)),
    "PowerSGD(matrix_rank=8)": each_step(thinwire.PowerSGD(matrix_rank=8)),
    **{f"Quantize(bits={bits})": each_step(thinwire.Quantize(bits=bits)) for bits in (8, 4, 2)},
    "TopK()": each_step(thinwire.TopK()),
    "LocalSGD(every_steps=10)": now_and_then(10, thinwire.AllReduce()),
    "LocalSGD(every_steps=10), 4 bits": now_and_then(10, thinwire.Quantize(bits=4)),
    "LocalSGD(every_steps=5), TopK": now_and_then(5, thinwire.TopK()),
    "DiLoCo, exact": diloco(thinwire.AllReduce()),
    "DiLoCo, 4 bits": diloco(thinwire.Quantize(bits=4)),
    TORCHFT: Way(torchft, DILOCO_EVERY_STEPS),
    ACCELERATE: Way(accelerate_local, ACCELERATE_EVERY_STEPS),
}


Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def new_training(setting: Setting) -> tuple[nn.Module, Optimizer]:
    """The same on every host, and for every algorithm."""
    torch.manual_seed(SEED)
    model, rate = TASKS[setting.task](), RATES[setting.optimizer][setting.task]
    if setting.optimizer == "AdamW":
        return model, AdamW(model.parameters(), lr=rate)
    return model, SGD(model.parameters(), lr=rate, momentum=0.9)


def train(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(next_byte_loss(model, *batch))
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()


def batch_of(step: int) -> Batch:
    return windows(text().train, BATCH_SIZE, CONTEXT_LENGTH, seed=SEED, step=step, rank=dist.get_rank())


@torch.no_grad()
def heldout_loss(model: nn.Module) -> float:
    """Each host on its part, so that all end at the same step."""
    batches = fixed_batches(
        text().heldout, batches=HELDOUT_BATCHES, batch_size=BATCH_SIZE, context_length=CONTEXT_LENGTH
    )
    losses = [next_byte_loss(model, *batch) for batch in islice(batches, dist.get_rank(), None, NUM_HOSTS)]
    mean = torch.stack(losses).mean() / NUM_HOSTS
    dist.all_reduce(mean)
    return mean.item()


def trained(setting: Setting, name: str, target: float, most_steps: int, schedule: str) -> Curve:
    """On each host: train until a loss is reached, or for as many steps."""
    model, optimizer = new_training(setting)
    peak = optimizer.param_groups[0]["lr"]
    curve = Curve(name, [0], [heldout_loss(model)])
    with ALGORITHMS[name].averaging(model, optimizer) as called:
        while curve.steps[-1] < most_steps and curve.losses[-1] > target:
            for step in range(curve.steps[-1], curve.steps[-1] + EVALUATE_EVERY_STEPS):
                share = min(1.0, (step + 1) / WARMUP_STEPS)
                if schedule == COSINE:
                    share *= (1 + math.cos(math.pi * step / most_steps)) / 2
                optimizer.param_groups[0]["lr"] = peak * share
                train(called, optimizer, batch_of(step))
            curve.steps.append(step + 1)
            curve.losses.append(heldout_loss(model))
            if dist.get_rank() == 0:
                print(name, curve.steps[-1], f"{curve.losses[-1]:.4f}", flush=True)
    return curve


def timed(setting: Setting, arguments: argparse.Namespace) -> dict[str, object]:
    """On each host: time whole steps of algorithms in turns."""
    contenders, contexts = {}, []
    for name in arguments.algorithms:
        model, optimizer = new_training(setting)
        # Kept: a generator's context that nobody holds is closed, and then nothing is averaged.
        contexts.append(ALGORITHMS[name].averaging(model, optimizer))
        step = partial(train, contexts[-1].__enter__(), optimizer)
        contenders[name] = Contender[Batch](step, ALGORITHMS[name].period_steps)
    numbers = count()
    found = take_turns(
        contenders,
        lambda: batch_of(next(numbers)),
        rounds=arguments.rounds,
        steps=arguments.steps,
        kept=KEPT,
        setting=arguments.setting,
    )
    return {name: asdict(measured) for name, measured in found.items()}


def work(arguments: argparse.Namespace) -> NoReturn:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    setting, names = Setting(arguments.tasks[0], arguments.optimizers[0]), arguments.algorithms
    if arguments.part == "curve":
        until = arguments.target, arguments.most_steps, arguments.schedule
        leave_job(asdict(trained(setting, names[0], *until)), arguments.work)
    leave_job(timed(setting, arguments), arguments.work)


class Lab:
    """Runs parts of the benchmark on the hosts of a lab."""

    def __init__(self, arguments: argparse.Namespace, names: Sequence[str]) -> None:
        self.arguments, self.names = arguments, names
        self.settings = [Setting(*each) for each in product(arguments.tasks, arguments.optimizers)]
        self._timings = [self._timing(*each) for each in product(self.settings, arguments.rates)]
        self._curves = Kept(arguments.curves.stem, arguments.curves.parent)
        self._before = self._done_steps()
        every_steps = len(self.settings) * sum(map(self._steps, names))
        every_steps += len(self._timings) * len(names) * arguments.rounds * arguments.steps
        self.progress = Progress(every_steps - self._before, kept=arguments.curves)

    def curve(self, setting: Setting, name: str, target: float) -> Curve:
        """Train, unless the file of curves has it; add it there."""
        key = self._key(setting, name)
        curve = self._curves.find(**key)
        if curve is None:
            part = ["--part=curve", f"--target={target}", f"--most-steps={self._steps(name)}"]
            curve = self._run(setting, UNSHAPED, [name], part)
            self._curves.add(curve, **key)
        return Curve(**curve)

    def times(self, setting: Setting, rate: str) -> dict[str, dict[str, Any]]:
        """Time steps over a link."""
        part = ["--part=times", f"--rounds={self.arguments.rounds}", f"--steps={self.arguments.steps}"]
        part += [f"--setting={self._timing(setting, rate)}"]
        found: dict[str, dict[str, Any]] = self._run(setting, rate, self.names, part)
        return found

    def _key(self, setting: Setting, name: str) -> dict[str, object]:
        schedule = self.arguments.schedule
        return {"setting": str(setting), "seed": SEED, "schedule": schedule, "algorithm": name}

    def _steps(self, name: str) -> int:
        steps: int = self.arguments.target_steps if name == EXACT else self.arguments.most_steps
        return steps

    def _timing(self, setting: Setting, rate: str) -> str:
        return f"{setting}, {rate}, {self.arguments.steps} steps"

    def _done_steps(self) -> int:
        """Return how many steps lie behind: of a training that ended sooner, as many as it was allowed."""
        kept = [key for key, _ in self._curves.all()]
        trained = [name for each, name in product(self.settings, self.names) if self._key(each, name) in kept]
        turns: int = turns_done(KEPT, self._timings, self.names, self.arguments.rounds)
        steps: int = turns * self.arguments.steps
        return steps + sum(map(self._steps, trained))

    def _run(self, setting: Setting, rate: str, names: Sequence[str], part: Sequence[str]) -> Any:
        script = [__file__, f"--tasks={setting.task}", f"--optimizers={setting.optimizer}"]
        script += [f"--schedule={self.arguments.schedule}", *part, "--algorithms", *names]
        now = f"{setting}, {names[0] if len(names) == 1 else rate}"
        show = partial(self.progress.show, now=now)
        return run_in_lab(NUM_HOSTS, rate, script, meanwhile=lambda: show(self._done_steps() - self._before))


def table(curves: Sequence[Curve], times: dict[str, dict[str, Any]]) -> str:
    """One row an algorithm; the target is the last loss of exact."""
    target = curves[0].losses[-1]
    sixteen = next(curve for curve in curves if curve.algorithm == SIXTEEN_BIT).when(target)
    rows = []
    for curve in curves:
        steps = curve.when(target)
        cells = []
        for by_name in times.values():
            ms, of_sixteen = (median(by_name[name]["step_ms"]) for name in (curve.algorithm, SIXTEEN_BIT))
            if steps is None:
                cells += [f"{ms:.0f}", f"> {curve.steps[-1] * ms / 1e3:.0f}", ""]
                continue
            faster = "" if sixteen is None else f"{sixteen * of_sixteen / (steps * ms):.2f}"
            cells += [f"{ms:.0f}", f"{steps * ms / 1e3:.0f}", faster]
        sent_bytes = next(iter(times.values()))[curve.algorithm]["sent_bytes"]
        reached = f"> {curve.steps[-1]}" if steps is None else f"{steps:.0f}"
        rows.append([curve.algorithm, reached, f"{curve.losses[-1]:.3f}", *cells, f"{sent_bytes / 1e6:.3f}"])
    header = ["", "steps", "last loss"]
    for rate in times:
        header += [f"ms per step at {rate}", "s", "sooner than 16 bits"]
    return markdown_table([*header, "MB sent per step"], rows)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=["GPT", "LSTM"])
    parser.add_argument("--optimizers", nargs="+", choices=tuple(RATES), default=list(RATES))
    parser.add_argument("--algorithms", nargs="+", choices=tuple(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    words = "of the learning rate: a cosine falls to nothing at the last step that is allowed"
    parser.add_argument("--schedule", choices=(CONSTANT, COSINE), default=CONSTANT, help=words)
    parser.add_argument("--target-steps", type=int, default=300, help="of exact")
    parser.add_argument("--most-steps", type=int, default=600, help="of all others")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each when steps are timed")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--curves", type=Path, default=Path("time-to-loss.jsonl"), help="trainings, kept")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    if arguments.work is not None:
        work(arguments)
    names = [name for name in ALGORITHMS if name in (EXACT, SIXTEEN_BIT, *arguments.algorithms)]
    if TORCHFT in names and find_spec("torchft") is None:
        print("SKIPPED: torchft is not installed, so it is not measured")
        names.remove(TORCHFT)
    lab = Lab(arguments, names)
    with lab.progress:
        compare(names, lab, arguments)
    KEPT.finish()


def compare(names: Sequence[str], lab: Lab, arguments: argparse.Namespace) -> None:
    elements = {task: sum(each.numel() for each in TASKS[task]().parameters()) for task in arguments.tasks}
    sizes = [f"{task}: {number / 1e6:.1f} M parameters" for task, number in elements.items()]
    then = "falls along a cosine to nothing at the last step that is allowed"
    then = then if arguments.schedule == COSINE else "is constant then"
    sections = [
        f"{NUM_HOSTS} hosts, {BATCH_SIZE} windows of {CONTEXT_LENGTH} bytes each per step, of the standard "
        f"library of this Python. {', '.join(sizes)}. The learning rate is exact averaging's best, the same "
        f"for all; it rises for {WARMUP_STEPS} steps, and {then}. Exact trains for "
        f"{arguments.target_steps} steps; how long it takes the others to reach its loss, within "
        f"{arguments.most_steps} steps (loss every {EVALUATE_EVERY_STEPS} steps, linear between). One seed. "
        f"Buckets of {SMALL_BUCKET_MB} MB. DiLoCo, ours and torchft's, averages every {DILOCO_EVERY_STEPS} "
        f"steps, outer SGD with rate {OUTER_LR} and Nesterov momentum {OUTER_MOMENTUM}. Seconds are steps "
        f"times the median step over the link, timed in {arguments.rounds} turns of at least "
        f"{arguments.steps} steps each. The hosts share one machine's processors."
    ]
    raw, figures = [], {}
    for setting in lab.settings:
        curves = [lab.curve(setting, EXACT, -math.inf)]
        target = curves[0].losses[-1]
        curves += [lab.curve(setting, name, target) for name in names if name != EXACT]
        times = {rate: lab.times(setting, rate) for rate in arguments.rates}
        for by_name in times.values():
            for name in names[1:]:
                sent_bytes = by_name[name]["sent_bytes"]
                assert 0 < sent_bytes < by_name[EXACT]["sent_bytes"] / 1.8, f"{name} sent {sent_bytes} bytes"
        for rate, by_name in times.items():
            seconds = {name: median(each["step_ms"]) / 1e3 for name, each in by_name.items()}
            figures[f"{setting}, {rate}"] = [
                (each.algorithm, [seconds[each.algorithm] * step for step in each.steps], each.losses)
                for each in curves
            ]
        raw.append({"setting": str(setting), "curves": [asdict(curve) for curve in curves], "times": times})
        save_json(raw, "time-to-loss")
        sections.append(f"## {setting}, to {target:.3f} nats a byte\n\n{table(curves, times)}")
        print(sections[-1], flush=True)
    sections.append(f"![loss against seconds]({plots.loss_against_time(figures)[0]})")
    print(save(page("Time to the same loss", *sections), "time-to-loss"))


if __name__ == "__main__":
    main()
