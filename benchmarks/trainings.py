"""What benchmarks of loss share: text, learning rates, trainings side by side, gaps to exact averaging."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import cache
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pages import save
from progress import TERMINAL_EVERY_SECONDS, Progress
from thinwire.demo.gpt import Text, batch_generator, load_text, sample_batch

EXACT = "exact"
SHARED_STEPS: Any = None

Part = TypeVar("Part")
Found = TypeVar("Found")


@cache
def text() -> Text:
    return load_text()


def windows(
    data: Tensor, number: int, length: int, *, seed: int, step: int, rank: int = 0
) -> tuple[Tensor, Tensor]:
    """Random windows of text and the bytes after them: a member's in a step, whatever the method."""
    generator = batch_generator(seed=seed, step=step, process_rank=rank)
    return sample_batch(data, batch_size=number, context_length=length, generator=generator)


def cosine(step: int, steps: int, *, warmup_share: float, lowest: float = 0.0) -> float:
    """Share of the peak learning rate at `step`: a linear rise, then half a cosine to the lowest share."""
    rise = min(1.0, (step + 1) / (warmup_share * steps))
    return rise * (lowest + (1 - lowest) * (1 + math.cos(math.pi * step / steps)) / 2)


def command_line(
    description: str | None,
    file: Path,
    add_runs: Callable[[argparse.Namespace], None],
    made_page: Callable[[Path], str],
    name: str,
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of a benchmark that keeps a line a training in a file, and that of its `train`."""

    def add_page(arguments: argparse.Namespace) -> None:
        result = made_page(arguments.file)
        print(result)
        if arguments.save:
            print(f"saved as {save(result, name)}")

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--file", type=Path, default=file, help="one line a training")
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="what the file lacks")
    training.set_defaults(command=add_runs)
    making = commands.add_parser("page", help="of all that the file holds")
    making.set_defaults(command=add_page)
    making.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    return parser, training


def percents(losses: Mapping[int, float], exact: Mapping[int, float]) -> list[float]:
    """By how much more loss than exact averaging's, in percent, of seeds that both have."""
    return [100 * (loss / exact[seed] - 1) for seed, loss in losses.items() if seed in exact]


def train_all(
    train: Callable[[Part, Callable[[int], None]], Found],
    parts: Mapping[Part, int],
    num_jobs: int,
    kept: Path,
    add: Callable[[Part, Found], None],
) -> None:
    """Train in as many processes, with one thread each; tell on stderr how far it is.

    Args:
        train: Is given a part, and what it calls with the number of each of its steps.
        parts: What is to be trained, with the steps of each.
        num_jobs: Processes.
        kept: Where `add` keeps what was found.
        add: Is called with each part as it ends.
    """
    context = get_context("spawn")
    steps = context.Array("l", len(parts))
    with (
        Progress(sum(parts.values()), kept=kept) as progress,
        ProcessPoolExecutor(num_jobs, context, _share_steps, (steps,)) as pool,
    ):
        training = {pool.submit(_trained, train, each, n): (n, each) for n, each in enumerate(parts)}
        try:
            while training:
                ended, _ = wait(training, TERMINAL_EVERY_SECONDS, FIRST_COMPLETED)
                for future in ended:
                    number, part = training.pop(future)
                    add(part, future.result())
                    steps[number] = parts[part]
                counts = dict(zip(parts, steps[:], strict=True))
                now = [str(part) for part, count in counts.items() if 0 < count < parts[part]]
                progress.show(sum(counts.values()), "; ".join(now))
        except BaseException:
            # Else the pool would wait for trainings of minutes.
            for process in active_children():
                process.terminate()
            raise


def _share_steps(steps: Any) -> None:
    """In a new process: what it tells its steps in, by training."""
    global SHARED_STEPS  # noqa: PLW0603 - a pool's processes have no other room
    SHARED_STEPS = steps
    torch.set_num_threads(1)
    # Ctrl-C reaches all; the first process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _trained(train: Callable[[Part, Callable[[int], None]], Found], part: Part, number: int) -> Found:
    def at_step(step: int) -> None:
        SHARED_STEPS[number] = step

    return train(part, at_step)
