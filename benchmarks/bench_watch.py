"""What does watching a run cost? The time inside `thinwire.Watch`, as a share of the steps.

One process trains a byte GPT on the standard library with DDP and PowerSGD; every step is watched. With more
processes a step takes longer, and watching does not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from in_lab import leave_job
from pages import markdown_table, page, save
from progress import Progress
from thinwire.demo.model import GPT, SIZES, next_byte_loss
from thinwire.watch import Writer
from trainings import text, windows

UNTIMED_STEPS = 20
BATCH_SIZE = 8
WRITERS: dict[str, Callable[[Path], Writer]] = {
    "JSONLWriter": lambda folder: thinwire.watch.JSONLWriter(folder / "run.jsonl"),
    "TensorBoardWriter": thinwire.watch.TensorBoardWriter,
}


class TimedWatch(thinwire.Watch):
    """Tells how long each step was watched."""

    def __init__(self, sync: thinwire.GradientSync, writer: Writer) -> None:
        self.seconds: list[float] = []
        super().__init__(sync, writer)

    def _after_step(self, committed: bool) -> None:
        start = time.perf_counter()
        super()._after_step(committed)
        self.seconds.append(time.perf_counter() - start)


def watched(
    size: str, writer: Writer, steps: int, at_step: Callable[[int], None]
) -> tuple[float, float, float]:
    """Of a step, in seconds: its median, and the mean and the largest time of watching."""
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(SIZES[size]), gradient_as_bucket_view=True)
    sync = thinwire.attach(model, thinwire.PowerSGD(matrix_rank=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step_seconds = []
    with (watch := TimedWatch(sync, writer)):
        for step in range(UNTIMED_STEPS + steps):
            at_step(step)
            batch = windows(text().train, BATCH_SIZE, SIZES[size].context_length, seed=0, step=step)
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.autograd.backward(next_byte_loss(model, *batch))
            optimizer.step()
            step_seconds.append(time.perf_counter() - start)
        assert sync.stats().compression_ratio > 10
    timed = watch.seconds[UNTIMED_STEPS:]
    return median(step_seconds[UNTIMED_STEPS:]), sum(timed) / len(timed), max(timed)


def show_step(progress: Progress, before: int, now: str, step: int) -> None:
    progress.show(before + step, now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = UNTIMED_STEPS + arguments.steps
    with (
        TemporaryDirectory() as folder,
        Progress(len(arguments.sizes) * len(WRITERS) * steps) as progress,
    ):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        rows: list[list[str]] = []
        for size in arguments.sizes:
            for name, new_writer in WRITERS.items():
                at_step = partial(show_step, progress, steps * len(rows), f"{size}, {name}")
                step, mean, most = watched(size, new_writer(Path(folder)), arguments.steps, at_step)
                milliseconds = [f"{1e3 * each:.3f}" for each in (step, mean, most)]
                rows.append([f"{size}, {name}", *milliseconds, f"{100 * mean / step:.2f} %"])
    header = ["model, writer", "ms per step, median", "ms watching, mean", "largest", "share"]
    result = page(
        "What watching costs",
        f"One process and thread, PowerSGD(matrix_rank=4), a batch of {BATCH_SIZE}, {arguments.steps} steps. "
        "A record every step, and a look at the norms every 20.",
        markdown_table(header, rows),
    )
    print(result)
    print(save(result, "watch"), flush=True)
    leave_job()


if __name__ == "__main__":
    main()
