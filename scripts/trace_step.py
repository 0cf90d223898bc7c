"""What one steady backward pass runs of Thinwire: files and functions, beside the most that they may be.

    python scripts/trace_step.py [--show]

Two Gloo processes (four for machines of two), DDP with two buckets; the seventh step is traced, on the
first process. `--show` lists the functions. Exits with 1 if a bar is exceeded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.algorithms import Algorithm

ROOT = Path(thinwire.__file__).parent
STEPS_BEFORE = 6
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Bar:
    """A way to average, and what a steady pass may run at most."""

    algorithm: Algorithm
    files: int
    functions: int
    machines: list[list[int]] | bool = False

    @property
    def num_processes(self) -> int:
        """As many as the machines have, else two."""
        return sum(map(len, self.machines)) if isinstance(self.machines, list) else 2


BARS = {
    "AllReduce": Bar(thinwire.AllReduce(), 10, 60),
    "4 bits": Bar(thinwire.Quantize(bits=4), 14, 85),
    "low rank": Bar(thinwire.PowerSGD(matrix_rank=4), 18, 130),
    "4 bits, 2 machines of 2": Bar(thinwire.Quantize(bits=4), 17, 105, [[0, 1], [2, 3]]),
}


@dataclass
class Trace:
    """The functions that were called, by file."""

    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    calls: int = 0

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; for `sys.setprofile`."""
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            self.functions[str(path.relative_to(ROOT))].add(f"{frame.f_code.co_firstlineno} {name}")
            self.calls += 1

    @property
    def num_functions(self) -> int:
        """Distinct ones."""
        return sum(map(len, self.functions.values()))


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace this thread, which runs the backward passes of tensors on the CPU."""
    trace = Trace()
    sys.setprofile(trace.note)
    try:
        yield trace
    finally:
        sys.setprofile(None)


def steady_pass(bar: Bar) -> Trace:
    """Train some steps, and trace the next one's backward pass."""
    layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.6, gradient_as_bucket_view=True)
    sync = thinwire.attach(model, bar.algorithm, machines=bar.machines)
    batch = torch.randn(8, 256)

    def loss() -> torch.Tensor:
        model.zero_grad()
        total: torch.Tensor = model(batch).sum()
        return total

    for _ in range(STEPS_BEFORE):
        torch.autograd.backward(loss())
    last = loss()
    with traced() as trace:
        torch.autograd.backward(last)
    assert sync.steps == STEPS_BEFORE + 1
    return trace


def process(rank: int, names: list[str], store: str, results: Any) -> None:
    """Take part in the passes of some bars; the first process tells what it has run."""
    size = BARS[names[0]].num_processes
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    traces = {name: steady_pass(BARS[name]) for name in names}
    if rank == 0:
        results.put({name: (dict(trace.functions), trace.calls) for name, trace in traces.items()})
    dist.barrier()
    dist.destroy_process_group()


def traces_of(names: list[str]) -> dict[str, Trace]:
    """Run the passes of bars with one number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        results = context.Queue()
        start: Callable[..., Any] = mp.start_processes  # type: ignore[attr-defined]
        arguments = (names, f"{folder}/store", results)
        running = start(process, arguments, BARS[names[0]].num_processes, join=False)
        found = results.get(timeout=TIMEOUT_SECONDS)
        running.join()
    return {name: Trace(functions, calls) for name, (functions, calls) in found.items()}


def main() -> int:
    """Print each way's figures beside its bar; return 1 if one is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="list the functions")
    shows = parser.parse_args().show
    traces: dict[str, Trace] = {}
    for size in sorted({bar.num_processes for bar in BARS.values()}):
        traces |= traces_of([name for name, bar in BARS.items() if bar.num_processes == size])
    is_over = False
    for name, trace in traces.items():
        bar = BARS[name]
        exceeds = len(trace.functions) > bar.files or trace.num_functions > bar.functions
        is_over |= exceeds
        print(
            f"{name}: {len(trace.functions)} files (at most {bar.files}), {trace.num_functions} functions "
            f"(at most {bar.functions}), {trace.calls} calls{': too many' if exceeds else ''}"
        )
        for file, functions in sorted(trace.functions.items()) if shows else ():
            print(*(f"    {file} {function}" for function in sorted(functions)), sep="\n")
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
