"""nanoGPT's recipe for CPUs, whose authors publish a validation loss of 1.88, by members that send less.

    python benchmarks/bench_nanogpt.py train input.txt    # the text of its data/shakespeare_char/prepare.py
    python benchmarks/bench_nanogpt.py page

Members of one process share a step's batch. Each run adds a line to a file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from pages import RESULTS_FOLDER, markdown_table, page, spread, with_interval
from thinwire import AllReduce, LocalSGD, Quantize, TopK
from thinwire.adapters.tensors import GradientListAdapter
from thinwire.algorithms import Algorithm
from thinwire.comm import InProcessTransport, Transport, run_members
from thinwire.demo.model import GPT, GPTConfig, fixed_batches, next_byte_loss, sample_batch
from trainings import EXACT, command_line, percents, train_all

RECORDS = RESULTS_FOLDER / "nanogpt.jsonl"
# config/train_shakespeare_char.py, with what the README changes of it for a CPU.
STEPS, BATCH, CONTEXT_LENGTH = 2_000, 12, 64
PEAK, LOWEST, WARMUP_STEPS, BETAS, WEIGHT_DECAY, MAX_GRADIENT_NORM = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0
TRAINED_SHARE, PUBLISHED = 0.9, 1.88
MIX = "2 bits for 45% of the steps, then LocalSGD every 5, TopK"
AVERAGED_SHARE = {MIX: 0.45}  # of the steps, in which gradients are averaged
METHODS: dict[str, Algorithm] = {
    EXACT: AllReduce(),
    **{f"Quantize, {bits} bits": Quantize(bits=bits) for bits in (4, 2)},
    MIX: Quantize(bits=2),
}


@dataclass(frozen=True)
class Record:
    """A line of the file: what was trained, and what came of it."""

    method: str
    members: int
    seed: int
    loss: float = math.nan  # of validation, in nats a character
    times_fewer: float = math.nan  # bytes than bf16

    @property
    def key(self) -> tuple[str, int, int]:
        """Which training it is."""
        return self.method, self.members, self.seed

    def __str__(self) -> str:
        return f"{self.method}, {self.members} members, seed {self.seed}"


@cache
def characters(path: Path) -> Tensor:
    """Return a text as numbers of its own characters."""
    content = path.read_text()
    numbers = {each: number for number, each in enumerate(sorted(set(content)))}
    return torch.tensor([numbers[each] for each in content])


def new_model(vocabulary: int) -> GPT:
    """4 layers of width 128 without biases, whose head is the embedding: 0.8 M parameters."""
    model = GPT(GPTConfig(layers=4, heads=4, width=128, context_length=CONTEXT_LENGTH, vocabulary=vocabulary))
    for module in model.modules():
        if hasattr(module, "bias"):
            module.register_parameter("bias", None)
    model.head.weight = model.bytes.weight
    return model


def new_optimizer(model: nn.Module) -> AdamW:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=PEAK, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def share_of_peak(step: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / (WARMUP_STEPS + 1)
    done = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    lowest = LOWEST / PEAK
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2


def train(path: Path, run: Record, at_step: Callable[[int], None]) -> Record:
    """Train; return the same with what came of it."""
    groups = InProcessTransport.group(run.members)
    results = run_members(run.members, lambda rank: train_member(path, run, rank, groups[rank], at_step))
    loss, ratio = results[0]
    return replace(run, loss=loss, times_fewer=ratio / 2)


def train_member(
    path: Path, run: Record, rank: int, transport: Transport, at_step: Callable[[int], None]
) -> tuple[float, float]:
    text = characters(path)
    trained, validation = text.split_with_sizes([n := int(TRAINED_SHARE * len(text)), len(text) - n])
    torch.manual_seed(run.seed)
    model = new_model(int(text.max()) + 1)
    parameters, optimizer = list(model.parameters()), new_optimizer(model)
    schedule = LambdaLR(optimizer, share_of_peak)
    draws = torch.Generator().manual_seed(1_000 * run.seed + rank)

    adapter = GradientListAdapter(parameters, METHODS[run.method], transport=transport)
    averaged_steps = round(AVERAGED_SHARE.get(run.method, 1.0) * STEPS)

    def take(steps: range) -> None:
        for step in steps:
            if rank == 0:
                at_step(step)
            batch = sample_batch(
                trained, batch_size=BATCH // run.members, context_length=CONTEXT_LENGTH, generator=draws
            )
            optimizer.zero_grad()
            torch.autograd.backward(next_byte_loss(model, *batch))
            if step < averaged_steps:
                means, _ = adapter.average([each.grad for each in parameters])
                for parameter, mean in zip(parameters, means, strict=True):
                    parameter.grad = mean
            nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()

    take(range(averaged_steps))
    # Bytes of a step, in those of fp32.
    sent = averaged_steps / adapter.sync.stats().compression_ratio
    if averaged_steps < STEPS:
        with LocalSGD(model, optimizer, every_steps=5, algorithm=TopK(), replicas=transport) as local:
            take(range(averaged_steps, STEPS))
        sent += (STEPS - averaged_steps) / local.stats().compression_ratio
    ratio = STEPS / sent
    assert run.method == EXACT or ratio > 2, "nothing was compressed"
    return (validation_loss(model, validation) if rank == 0 else math.nan), ratio


@torch.no_grad()
def validation_loss(model: nn.Module, validation: Tensor) -> float:
    """Return the loss of all of the text that was kept back."""
    batches = len(validation) // CONTEXT_LENGTH // BATCH
    drawn = fixed_batches(validation, batches=batches, batch_size=BATCH, context_length=CONTEXT_LENGTH)
    return float(torch.stack([next_byte_loss(model, *each) for each in drawn]).mean())


def records(path: Path) -> list[Record]:
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def add_runs(arguments: argparse.Namespace) -> None:
    done = {each.key for each in records(arguments.file)}
    wanted = [
        Record(method, members, seed)
        for seed in range(arguments.seeds)
        for members in arguments.members
        for method in METHODS
    ]

    def add(_: Record, record: Record) -> None:
        with arguments.file.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    missing = {run: STEPS for run in wanted if run.key not in done}
    train_all(partial(train, arguments.text), missing, arguments.jobs, arguments.file, add)


EXPLANATION = (
    "nanoGPT's configuration for the characters of Shakespeare, as its README changes it for CPUs: 4 layers "
    "of 4 heads and width 128 (0.8 M parameters), no biases, a tied head, context "
    f"{CONTEXT_LENGTH}, {BATCH} windows a step of all members together, {STEPS:,} steps, AdamW (betas 0.9 "
    f"and 0.99, weight decay {WEIGHT_DECAY}), peak rate {PEAK:g}, clipped gradients. Its authors publish a "
    f"validation loss of {PUBLISHED}, of 20 random batches. Loss in nats a character on all of the last "
    "tenth of the text, ± standard deviation over seeds; gaps to exact averaging by as many members are "
    "taken seed by seed, with the 95 % interval of their mean (Student's t). Bytes are those of a bf16 ring "
    "over the method's."
)


def made_page(file: Path) -> str:
    found, rows = records(file), []
    for members in sorted({each.members for each in found}):
        exact = {each.seed: each.loss for each in found if (each.members, each.method) == (members, EXACT)}
        for method in METHODS:
            runs = [each for each in found if (each.members, each.method) == (members, method)]
            losses = {each.seed: each.loss for each in runs}
            gap = "" if method == EXACT else with_interval(percents(losses, exact))
            fewer, loss = f"{runs[0].times_fewer:.1f}", spread(list(losses.values()), ".4f")
            rows.append([str(members), method, fewer, str(len(runs)), loss, gap])
    header = ["members", "method", "times fewer bytes than bf16", "seeds", "validation loss", "beside exact"]
    return page("nanoGPT's recipe for CPUs", EXPLANATION, markdown_table(header, rows))


def main() -> None:
    parser, training = command_line(__doc__, RECORDS, add_runs, made_page, "nanogpt")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    training.add_argument("text", type=Path, help="a file of text, such as tiny Shakespeare")
    training.add_argument("--members", type=int, nargs="+", default=[2, 4])
    training.add_argument("--seeds", type=int, default=3, help="how many")
    training.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
