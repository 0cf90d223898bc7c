"""Held-out loss after equally many steps: a byte GPT trained with every algorithm, from the same seeds.

Simulated workers (`thinwire.simulation`) take different batches; one model steps with their mean gradient.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from pages import markdown_table, page, save, spread
from progress import Kept
from thinwire import AllReduce, Cast, PowerSGD
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.demo.gpt import GPT, GPTConfig, heldout_loss, next_byte_loss
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from trainings import EXACT, cosine, text, train_all, windows

MODEL = GPTConfig(layers=3, heads=4, width=128, context_length=64)
MAX_GRADIENT_NORM = 1.0
HELDOUT_BATCHES = 64
# Of the steps: while the learning rate rises, and for the PowerSGD that starts later.
WARMUP_SHARE = 0.1
KEPT = Kept("quality")

# Peak learning rates by optimizer. The one in use is the best for exact averaging, found with --tune.
LEARNING_RATES = {"SGD, momentum 0.9": 0.12, "AdamW": 2e-3}
CANDIDATES = {
    "SGD, momentum 0.9": (0.03, 0.06, 0.12, 0.25, 0.5),
    "AdamW": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
}
TUNING_SEED = 1_000

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD, momentum 0.9": lambda model: SGD(model.parameters(), lr=0.0, momentum=0.9),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.0),
}


@dataclass(frozen=True)
class Run:
    """One training, from its seed to its end."""

    optimizer: str
    learning_rate: float
    algorithm_name: str
    algorithm: Algorithm
    seed: int
    steps: int
    num_workers: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.optimizer} {self.learning_rate:g}, {self.algorithm_name}, seed {self.seed}"

    @property
    def key(self) -> dict[str, object]:
        """Which training it is."""
        sizes = {"steps": self.steps, "num_workers": self.num_workers, "batch_size": self.batch_size}
        return {"run": str(self), **sizes}


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    heldout_loss: float
    compression_ratio: float


Outcomes: TypeAlias = dict[Run, Outcome]


def algorithms(steps: int) -> dict[str, Algorithm]:
    """Everything that is compared, by its name in the tables."""
    late = PowerSGD(matrix_rank=4, warmup_steps=round(WARMUP_SHARE * steps))
    return {
        EXACT: AllReduce(),
        "fp16": Cast("fp16"),
        "bf16": Cast("bf16"),
        **{f"powersgd-{matrix_rank}": PowerSGD(matrix_rank=matrix_rank) for matrix_rank in (1, 2, 4, 16)},
        "powersgd-4-late": late,
        # Of the bytes of powersgd-4.
        "powersgd-8-alternating": PowerSGD(matrix_rank=8, alternating=True),
        "batched-powersgd-1": BatchedPowerSGD(matrix_rank=1),
    }


class Workers:
    """Simulated workers that share one model: each has its own gradients, all flat in one bucket."""

    def __init__(self, model: nn.Module, algorithm: Algorithm, num_workers: int) -> None:
        self.parameters = list(model.parameters())
        specs = tuple(ParameterSpec.of(name, each) for name, each in model.named_parameters())
        self.simulation = Simulation(algorithm, [specs], num_workers=num_workers)
        self.flats = [torch.zeros(sum(spec.numel for spec in specs)) for _ in range(num_workers)]

    def __iter__(self) -> Iterator[int]:
        """Take each worker's turn: its gradients, zeroed, are the model's."""
        for worker, flat in enumerate(self.flats):
            flat.zero_()
            self._show(flat)
            yield worker

    def average(self) -> None:
        """The mean of all gradients becomes the model's."""
        committed = self.simulation.step([[flat] for flat in self.flats])
        assert committed, "a mean gradient was not finite"
        self._show(self.flats[0])

    def _show(self, flat: torch.Tensor) -> None:
        parts = flat.split_with_sizes([each.numel() for each in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def train(run: Run, at_step: Callable[[int], None]) -> Outcome:
    """Train one model; on the same batches whatever the algorithm."""
    torch.manual_seed(run.seed)
    model = GPT(MODEL)
    optimizer = OPTIMIZERS[run.optimizer](model)
    workers = Workers(model, run.algorithm, run.num_workers)
    for step in range(run.steps):
        at_step(step)
        for worker in workers:
            drawn = {"seed": run.seed, "step": step, "rank": worker}
            batch = windows(text().train, run.batch_size, MODEL.context_length, **drawn)
            torch.autograd.backward(next_byte_loss(model, *batch))
        workers.average()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate * cosine(step, run.steps, warmup_share=WARMUP_SHARE, lowest=0.1)
        optimizer.step()
    compression_ratio = workers.simulation.syncs[0].stats().compression_ratio
    compressed = compression_ratio > 1.9
    assert compressed == (run.algorithm_name != EXACT), f"{run} compressed {compression_ratio} times"
    return Outcome(heldout_loss(model, text().heldout, batches=HELDOUT_BATCHES), compression_ratio)


def outcomes_of(runs: Sequence[Run], num_jobs: int) -> Outcomes:
    """Train what is not kept, in as many processes."""
    found = {run: KEPT.find(**run.key) for run in runs}

    def add(run: Run, outcome: Outcome) -> None:
        found[run] = asdict(outcome)
        KEPT.add(found[run], **run.key)

    missing = {run: run.steps for run in runs if found[run] is None}
    train_all(train, missing, num_jobs, KEPT.path, add)
    return {run: Outcome(**found[run]) for run in runs}


def comparison_table(outcomes: Outcomes, optimizer: str) -> str:
    """One row an algorithm; differences are taken seed by seed."""
    by_name: dict[str, list[tuple[Run, Outcome]]] = {}
    for run, outcome in outcomes.items():
        if run.optimizer == optimizer:
            by_name.setdefault(run.algorithm_name, []).append((run, outcome))
    exact_losses = [outcome.heldout_loss for _, outcome in by_name[EXACT]]
    rows = []
    for name, results in by_name.items():
        losses = [outcome.heldout_loss for _, outcome in results]
        differences = [100 * (a / b - 1) for a, b in zip(losses, exact_losses, strict=True)]
        run, outcome = results[0]
        rows.append(
            [
                name,
                spread(losses, ".3f"),
                "" if name == EXACT else spread(differences, "+.2f") + " %",
                f"{outcome.compression_ratio:.1f}",
                str(getattr(run.algorithm, "warmup_steps", 0)),
            ]
        )
    header = ["algorithm", "held-out loss", "difference to exact", "compression ratio", "warm-up steps"]
    return markdown_table(header, rows)


def setting(arguments: argparse.Namespace) -> str:
    num_parameters = sum(parameter.numel() for parameter in GPT(MODEL).parameters())
    return (
        f"A byte GPT of {num_parameters / 1e6:.2f} M parameters ({MODEL.layers} layers, width {MODEL.width}, "
        f"context {MODEL.context_length}) on the standard library of this Python, {arguments.steps} "
        f"steps, {arguments.workers} simulated workers of {arguments.batch_size} windows each. The gradient "
        f"norm is clipped to {MAX_GRADIENT_NORM:g}; the learning rate rises for {WARMUP_SHARE:.0%} of the "
        f"steps, then falls along a cosine to a tenth. Loss in nats a byte on {16 * HELDOUT_BATCHES} fixed "
        "windows of files not trained on."
    )


def compared(arguments: argparse.Namespace) -> str:
    """The result page of all algorithms at the learning rates in use."""
    steps, only, sizes = arguments.steps, arguments.only, (arguments.workers, arguments.batch_size)
    runs = [
        Run(optimizer, learning_rate, name, algorithm, seed, steps, *sizes)
        for seed in range(arguments.seeds)
        for optimizer, learning_rate in LEARNING_RATES.items()
        for name, algorithm in algorithms(steps).items()
        if only is None or name in (EXACT, *only)
    ]
    outcomes = outcomes_of(runs, arguments.jobs)
    sections = [
        f"## {optimizer}\n\nPeak learning rate {learning_rate:g}.\n\n{comparison_table(outcomes, optimizer)}"
        for optimizer, learning_rate in LEARNING_RATES.items()
    ]
    explanation = (
        f"{setting(arguments)} Mean ± standard deviation over {arguments.seeds} seeds; differences are taken "
        "seed by seed. Learning rates are the best for exact averaging (`--tune`), the same for all "
        "algorithms. The number in an algorithm's name is the matrix rank."
    )
    return page("Model quality after equally many steps", explanation, *sections)


def tuned(arguments: argparse.Namespace) -> str:
    """The result page of exact averaging at all candidate learning rates."""
    sizes = (arguments.workers, arguments.batch_size)
    runs = [
        Run(optimizer, learning_rate, EXACT, AllReduce(), TUNING_SEED, arguments.steps, *sizes)
        for optimizer, learning_rates in CANDIDATES.items()
        for learning_rate in learning_rates
    ]
    outcomes = outcomes_of(runs, arguments.jobs)
    rows = [[run.optimizer, f"{run.learning_rate:g}", f"{outcomes[run].heldout_loss:.3f}"] for run in runs]
    return page(
        "Learning rates for exact averaging",
        f"{setting(arguments)} One seed, which the comparison does not use.",
        markdown_table(["optimizer", "peak learning rate", "held-out loss"], rows),
    )


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3, help="how many, at least 2")
    parser.add_argument("--only", nargs="+", choices=tuple(algorithms(1)), help="beside exact")
    parser.add_argument("--workers", type=int, default=2, help="simulated ones")
    parser.add_argument("--batch-size", type=int, default=8, help="windows a worker and step")
    parser.add_argument("--tune", action="store_true", help="try learning rates for exact, compare nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, one thread each")
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("a standard deviation needs at least 2 seeds")
    return arguments


def main() -> None:
    arguments = parsed_arguments()
    result = tuned(arguments) if arguments.tune else compared(arguments)
    print(result)
    if arguments.save:
        only = "-".join(arguments.only) if arguments.only else None
        workers = None if arguments.workers == 2 else f"{arguments.workers}-workers"
        print(f"saved as {save(result, 'quality', 'tuning' if arguments.tune else only, workers)}")
    KEPT.finish()


if __name__ == "__main__":
    main()
