"""Held-out loss of byte GPTs of 0.7 to 85 M parameters with AdamW: gradients in few bits beside exact ones.

    python benchmarks/bench_sizes.py train --seconds 270   # what the file lacks, the most valuable first
    python benchmarks/bench_sizes.py page

An H100 makes about 100 steps a second with 85 M parameters, of ten trainings side by side together.

Made for one GPU and a few minutes. All members receive the same mean, so they share one model. A whole step
(each member's pass, the algorithm's arithmetic and messages, AdamW) is captured as a CUDA graph, and several
trainings run side by side on streams of a process. Each run adds a line to a file: one that is stopped loses
nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from statistics import fmean
from typing import Any

import torch
from torch import nn

from captured import (
    CONTEXT_LENGTH,
    DEVICE,
    FIRST_TUNING_SEED,
    HELDOUT_BATCHES,
    HELDOUT_WINDOWS,
    KINDS,
    MAX_GRADIENT_NORM,
    WARMUP_SHARE,
    Outcome,
    Run,
    Training,
)
from models import new_lstm
from pages import RESULTS_FOLDER, markdown_table, page, save, spread, with_interval
from thinwire import AllReduce, Cast, Quantize
from thinwire.algorithms import Algorithm
from thinwire.demo.model import GPT, SIZES, GPTConfig
from trainings import EXACT, percents

RECORDS = RESULTS_FOLDER / "sizes.jsonl"
SEEDS, MORE_SEEDS = 3, 10
SHORT_STEPS = 375
# They have about as many parameters as 3 M, in more or fewer layers.
SHAPES = ("3 M, 16 layers", "3 M, 1 layer")
IDLE_SECONDS = 5e-4
METHODS: dict[str, Algorithm] = {
    EXACT: AllReduce(),
    "bf16": Cast("bf16"),
    **{f"{bits} bits": Quantize(bits=bits) for bits in (4, 3, 2)},
}


# Models.


@dataclass(frozen=True)
class Model:
    """What learns, and how long.

    Attributes:
        new: Makes it.
        steps: Of the comparison.
        tuning_steps: With which the peak rate is searched for.
        rates: Of AdamW, that are tried.
    """

    new: Callable[[], nn.Module]
    steps: int
    tuning_steps: int
    rates: tuple[float, ...]


def gpt(layers: int, heads: int, width: int) -> Callable[[], nn.Module]:
    return partial(GPT, GPTConfig(layers, heads, width, CONTEXT_LENGTH))


MODELS = {
    "0.7 M": Model(gpt(3, 4, 128), 1_500, 600, (2e-3, 4e-3, 8e-3)),
    "3 M": Model(gpt(4, 4, 256), 1_500, 600, (1e-3, 2e-3, 4e-3)),
    "10.9 M": Model(partial(GPT, SIZES["medium"]), 1_125, 450, (5e-4, 1e-3, 2e-3)),
    "25 M": Model(gpt(8, 8, 512), 750, 300, (5e-4, 1e-3, 2e-3)),
    "85 M": Model(gpt(12, 12, 768), 450, 188, (3e-4, 6e-4, 1.2e-3)),
    "3 M, 16 layers": Model(gpt(16, 2, 128), 1_500, 600, (1e-3, 2e-3, 4e-3)),
    "3 M, 1 layer": Model(gpt(1, 8, 512), 1_500, 600, (1e-3, 2e-3, 4e-3)),
    "LSTM, 1.2 M": Model(new_lstm, 1_500, 600, (2e-3, 4e-3, 8e-3)),
}


def new_training(run: Run, *, captures: bool) -> Training:
    return Training(run, MODELS[run.model].new, METHODS[run.method], captures=captures)


# Trainings side by side, in several processes.


def work(tasks: Any, results: Any, side_by_side: int, captures: bool) -> None:
    """In a process of its own, until it is ended: train what comes."""
    torch.set_num_threads(1)
    trainings: list[Training] = []
    while True:
        if len(trainings) < side_by_side:
            take(tasks, results, trainings, captures=captures)
        if not go_on(results, trainings):
            time.sleep(IDLE_SECONDS)


def take(tasks: Any, results: Any, trainings: list[Training], *, captures: bool) -> None:
    """Begin the next training, if there is one; wait for it if there is nothing else to do."""
    with suppress(Empty):
        run = tasks.get(block=not trainings)
        with reporting(results, run):
            trainings.append(new_training(run, captures=captures))


def go_on(results: Any, trainings: list[Training]) -> bool:
    """Hand the device some steps of each training that needs them; return whether one did."""
    has_advanced = False
    for training in tuple(trainings):
        with reporting(results, training.run):
            # Taken out if it fails.
            trainings.remove(training)
            has_advanced |= training.advance()
            if training.is_over():
                results.put((training.run, training.outcome(), ""))
            else:
                trainings.append(training)
    return has_advanced


@contextmanager
def reporting(results: Any, run: Run) -> Iterator[None]:
    """Report the failure of a training; the others go on, unless the device itself has failed."""
    try:
        yield
    except Exception:
        results.put((run, None, traceback.format_exc()))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


class Schedule:
    """Which run is next: the first of the plan that can be made now."""

    def __init__(self, plan: Sequence[Run], found: Sequence[Record]) -> None:
        self._pending, self._found = list(plan), list(found)
        self._seconds_a_step: dict[str, float] = {}
        self.in_flight: list[Run] = []

    def next_run(self, seconds_left: float) -> Run | None:
        """Return a run that is not done yet and will have ended in time; None if there is none now."""
        done = {record.run for record in self._found}
        for planned in tuple(self._pending):
            run = planned
            if not run.rate:
                if self._is_tuning(run.model):
                    continue
                run = replace(run, rate=round(best_rate(self._found, run.model) * run.times_rate, 8))
            self._pending.remove(planned)
            if (
                run.rate
                and run not in done
                and self._seconds_a_step.get(run.model, 0.0) * run.steps < seconds_left
            ):
                self.in_flight.append(run)
                return run
        return None

    def _is_tuning(self, model: str) -> bool:
        open_runs = [*self._pending, *self.in_flight]
        return any(run.model == model and run.is_tuning for run in open_runs)

    def ended(self, run: Run, outcome: Outcome | None) -> None:
        self.in_flight.remove(run)
        if outcome is not None:
            self._found.append(Record(run, outcome))
            self._seconds_a_step[run.model] = outcome.seconds / run.steps


def best_rate(found: Sequence[Record], model: str) -> float:
    """Return the peak rate at which exact averaging ended lowest, on a seed of its own; 0 if none ended."""
    losses = {
        each.run.rate: each.outcome.loss for each in found if each.run.model == model and each.run.is_tuning
    }
    return min(losses, key=lambda rate: losses[rate], default=0.0)


def the_plan() -> list[Run]:
    """Return all runs, the most valuable first."""
    few = (EXACT, "4 bits", "2 bits")
    small = ("0.7 M", "3 M", "10.9 M", "25 M")
    runs = [
        *tuning(MODELS),
        # Two bits lose in short runs: are four times as many steps enough?
        *(replace(run, steps=4 * run.steps) for run in compared(("85 M",), few)),
        *compared(small, (EXACT, "bf16", "4 bits", "2 bits")),
        *compared(("LSTM, 1.2 M", *SHAPES), few),
    ]
    # One thing at a time that a gap could depend on.
    for other in (
        {"times_rate": 0.5},
        {"times_rate": 2.0},
        {"steps": SHORT_STEPS},
        {"steps": SHORT_STEPS, "times_rate": 0.5},
        {"steps": SHORT_STEPS, "times_rate": 2.0},
    ):
        runs += [replace(run, **other) for run in compared(("3 M",), few)]
    for windows in (Run.windows, 8, 128):
        of_small = compared(("0.7 M",), (EXACT, "2 bits"))
        runs += [replace(run, steps=SHORT_STEPS, windows=windows) for run in of_small]
    runs += compared(("85 M",), (EXACT, "bf16", "4 bits", "2 bits"))
    for seed in range(SEEDS, MORE_SEEDS):
        runs += compared(("85 M", "10.9 M", "LSTM, 1.2 M"), few, seeds=(seed,))
    runs += compared(("10.9 M", "3 M"), ("3 bits",))
    return runs


def tuning(models: Iterable[str]) -> Iterator[Run]:
    for name in models:
        for rate in MODELS[name].rates:
            yield Run(name, EXACT, FIRST_TUNING_SEED, MODELS[name].tuning_steps, rate)


def compared(
    models: Sequence[str], methods: Iterable[str], seeds: Iterable[int] = range(SEEDS)
) -> Iterator[Run]:
    for seed in seeds:
        for name in models:
            for method in methods:
                yield Run(name, method, seed, MODELS[name].steps)


# Records.


@dataclass(frozen=True)
class Record:
    """A line of the file: what was trained, and what came of it."""

    run: Run
    outcome: Outcome

    def line(self) -> str:
        return json.dumps({**asdict(self.run), **asdict(self.outcome)})

    @classmethod
    def of_line(cls, line: str) -> Record:
        values = json.loads(line)
        run, outcome = ({each.name: values[each.name] for each in fields(kind)} for kind in (Run, Outcome))
        return cls(Run(**run), Outcome(**outcome))


def records(path: Path) -> list[Record]:
    return [Record.of_line(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(arguments: argparse.Namespace) -> None:
    """Train what the file lacks, as long as there is time."""
    start, slots = time.monotonic(), arguments.workers * arguments.side_by_side
    plan = [run for run in the_plan() if run.model in arguments.models and run.method in arguments.methods]
    schedule = Schedule(plan, records(arguments.file))
    tasks, results, workers = started(arguments.workers, arguments.side_by_side, captures=arguments.captures)
    try:
        while (left := arguments.seconds - (time.monotonic() - start)) > 0:
            while len(schedule.in_flight) < slots and (run := schedule.next_run(left)):
                tasks.put(run)
            if not schedule.in_flight or not any(worker.is_alive() for worker in workers):
                break
            with suppress(Empty):
                run, outcome, error = results.get(timeout=min(left, 1.0))
                schedule.ended(run, outcome)
                seconds = time.monotonic() - start
                print(f"{seconds:.0f} s: {run}: {error or outcome}", flush=True)
                if outcome is not None:
                    with arguments.file.open("a") as file:
                        file.write(Record(run, outcome).line() + "\n")
    finally:
        for worker in workers:
            worker.terminate()
    print(f"in flight at the end: {len(schedule.in_flight)}")


def started(num_workers: int, side_by_side: int, *, captures: bool) -> tuple[Any, Any, list[Any]]:
    """Start processes; return the queues of their tasks and results, and them."""
    context = get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    # Nobody needs the remaining tasks when this process ends.
    tasks.cancel_join_thread()
    workers = [
        context.Process(target=work, args=(tasks, results, side_by_side, captures), daemon=True)
        for _ in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    return tasks, results, workers


# The page.

EXPLANATION = (
    "Byte GPTs (and an LSTM) learn the standard library of a Python, in bf16 autocast, with AdamW as torch "
    "has it (weight decay 0.01, betas 0.9 and 0.999). A step takes windows of "
    f"{CONTEXT_LENGTH} bytes, of which each member has its share, so exact averaging is the same training "
    f"however many share them. The gradient norm is clipped to {MAX_GRADIENT_NORM:g}; the learning rate "
    f"rises for {WARMUP_SHARE:.0%} of the steps, then falls along a cosine to nothing. Its peak is that of "
    "those tried at which exact averaging ended lowest, with fewer steps, on a seed that nothing else uses. "
    f"Loss in nats a byte on {HELDOUT_BATCHES * HELDOUT_WINDOWS:,} fixed windows of files not trained on, "
    "± standard deviation over seeds; all methods have the same starts and windows. Gaps to exact averaging "
    "are taken seed by seed: mean, and the 95 % interval of the mean (Student's t); in training, of the mean "
    "loss of the last tenth of the steps. Bytes leave a member in a step, counted as of a ring. Errors "
    "are those of the means after the last step, squared, relative to the true means: of embeddings and "
    "head, of vectors (biases, LayerNorms), and of matrices; with error feedback they say nothing. bf16 is "
    "the control: passes on a GPU differ in their last bits, so it differs by chance."
)


def make_page(arguments: argparse.Namespace) -> None:
    result = made_page(records(arguments.file))
    print(result)
    if arguments.save:
        print(f"saved as {save(result, 'sizes')}")


def made_page(found: Sequence[Record]) -> str:
    """Return the page: what grows with the size first, then a table a setting."""
    gpus = ", ".join(sorted({f"{each.outcome.device}; {each.outcome.versions}" for each in found}))
    parts: dict[str, list[Record]] = {}
    for each in found:
        if not each.run.is_tuning:
            parts.setdefault(title(each.run), []).append(each)
    order = list(MODELS)
    ordered = sorted(parts, key=lambda part: order.index(parts[part][0].run.model))
    sections = [f"## {part}\n\n{table(parts[part])}" for part in ordered]
    summary = f"## Gap to exact averaging\n\n{summed_up({part: parts[part] for part in ordered})}"
    tuned = f"## Peak rates\n\n{rates_table(found)}"
    return page("Few bits, by size", f"Trained on {gpus}.", EXPLANATION, summary, *sections, tuned)


def title(run: Run) -> str:
    return (
        f"{run.model}, {run.members} members, {run.windows * CONTEXT_LENGTH:,} bytes a step, "
        f"{run.steps:,} steps, peak rate {run.rate:g}"
    )


def by_method(runs: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Return them by method, in the order of `METHODS`, and seed."""
    return {
        method: {each.run.seed: each for each in runs if each.run.method == method}
        for method in METHODS
        if any(each.run.method == method for each in runs)
    }


def gaps(runs: Mapping[int, Record], exact: Mapping[int, Record]) -> tuple[list[float], list[float]]:
    """Return by how many percent held-out losses, and those of the end of training, exceed exact ones."""
    heldout, training = (
        ({seed: each.outcome.loss for seed, each in some.items()} for some in (runs, exact)),
        ({seed: each.outcome.curve[-1] for seed, each in some.items()} for some in (runs, exact)),
    )
    return percents(*heldout), percents(*training)


def table(runs: Sequence[Record]) -> str:
    """One row a method."""
    methods = by_method(runs)
    exact = methods.get(EXACT, {})
    rows = []
    for method, by_seed in methods.items():
        outcomes = [each.outcome for each in by_seed.values()]
        heldout, training = gaps(by_seed, exact)
        is_exact = method == EXACT
        rows.append(
            [
                method,
                f"{outcomes[0].bytes_a_step:,.0f}",
                f"{outcomes[0].times_fewer:.1f}",
                str(len(outcomes)),
                spread([each.loss for each in outcomes], ".4f"),
                "" if is_exact else with_interval(heldout),
                "" if is_exact else with_interval(training),
                " ".join(f"{fmean(each.errors[kind] for each in outcomes):.3f}" for kind in KINDS),
            ]
        )
    header = ["method", "bytes", "times fewer than bf16", "seeds", "held-out loss", "gap", "gap in training"]
    return markdown_table([*header, "errors"], rows)


def summed_up(parts: Mapping[str, Sequence[Record]]) -> str:
    """One row a setting, of the methods that all are compared by."""
    rows = []
    for name, runs in parts.items():
        methods = by_method(runs)
        exact = methods.get(EXACT, {})
        cells = [
            with_interval(gaps(methods.get(method, {}), exact)[0]) for method in METHODS if method != EXACT
        ]
        rows.append([name, str(len(exact)), *cells])
    return markdown_table(["model", "seeds", *(method for method in METHODS if method != EXACT)], rows)


def rates_table(found: Sequence[Record]) -> str:
    """One row a model: the loss at each rate that was tried."""
    tuned: dict[str, list[Record]] = {}
    for each in sorted(found, key=lambda record: record.run.rate):
        if each.run.is_tuning:
            tuned.setdefault(each.run.model, []).append(each)
    rows = [
        [
            name,
            f"{runs[0].run.steps:,}",
            "; ".join(f"{each.run.rate:g}: {each.outcome.loss:.4f}" for each in runs),
        ]
        for name, runs in tuned.items()
    ]
    return markdown_table(["model", "steps", "peak rate: held-out loss"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, default=RECORDS, help="one line a training")
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="what the file lacks")
    training.set_defaults(command=train)
    training.add_argument("--seconds", type=float, default=math.inf, help="after which it ends")
    training.add_argument("--workers", type=int, default=2, help="processes")
    training.add_argument("--side-by-side", type=int, default=6, help="trainings of each process")
    training.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    training.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    training.add_argument(
        "--captures",
        action=argparse.BooleanOptionalAction,
        default=DEVICE.type == "cuda",
        help="a step as a CUDA graph; if not, better many processes with one training each",
    )
    making = commands.add_parser("page", help="of all that the file holds")
    making.set_defaults(command=make_page)
    making.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
