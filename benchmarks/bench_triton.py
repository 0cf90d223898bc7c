"""What each Triton kernel of a step takes on a GPU, its bytes a second beside a copy's, and the host's time.

One process; the exchange is with nobody. Kernels are timed by events while the device sleeps until all of a
step is queued, so that the host, which is timed apart, holds nothing up.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch

from models import GPT2_SMALL, buckets_of
from pages import markdown_table, page, save
from thinwire import PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm
from thinwire.comm import InProcessTransport
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.limits import installed
from thinwire.sync import Engine, Settings

UNTIMED_STEPS, TIMED_STEPS = 5, 5
# The device sleeps this many cycles, about 0.1 s: more than the host takes for a step.
ASLEEP_CYCLES = 200_000_000

LLAMA_LAYER = {"q": (4096, 4096), "gate": (11008, 4096), "down": (4096, 11008), "up": (11008, 4096)}
UNALIGNED = {"embedding": (50257, 768), "odd": (768, 3075), "head": (10,)}

Shapes = Mapping[str, tuple[int, ...]]

CASES: dict[str, tuple[Algorithm, Shapes, torch.dtype]] = {
    **{
        f"GPT-2 small, rank {rank}": (PowerSGD(matrix_rank=rank), GPT2_SMALL, torch.float32)
        for rank in (1, 4, 8, 32)
    },
    **{
        f"Llama's layer in bf16, rank {rank}": (PowerSGD(matrix_rank=rank), LLAMA_LAYER, torch.bfloat16)
        for rank in (4, 32)
    },
    "unaligned, rank 4": (PowerSGD(matrix_rank=4), UNALIGNED, torch.float32),
    **{f"GPT-2 small, {bits} bits": (Quantize(bits=bits), GPT2_SMALL, torch.float32) for bits in (8, 4, 2)},
    "Llama's layer in bf16, 4 bits": (Quantize(bits=4), LLAMA_LAYER, torch.bfloat16),
    "GPT-2 small, TopK": (TopK(), GPT2_SMALL, torch.float32),
}


def two_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return before, after


class Kind(NamedTuple):
    """What is compiled in."""

    kernel: str
    letter: str  # of the type of gradients
    size: int | None  # rows of a factor, or bits
    is_aligned: bool

    def __str__(self) -> str:
        return f"{self.kernel} {self.letter}{self.size or ''}" + ("" if self.is_aligned else ", unaligned")


def num_bytes_of(
    kernel: str, arguments: Sequence[torch.Tensor | int | None], constants: Mapping[str, Any]
) -> Callable[[], int]:
    """Return a function that returns the bytes that a launch reads and writes, and waits for the device."""
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    module, _, name = kernel.partition(".")
    if module in ("compiled_matrices", "compiled_bases"):
        # Tensors are found by addresses in a table, whose rows have their sizes, too.
        return lambda: sum(bytes_of_row(name, row, constants) for row in tensors[0].tolist())
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return lambda: num_bytes


def bytes_of_row(kernel: str, row: Sequence[int], constants: Mapping[str, Any]) -> int:
    """Return the bytes of one row of a table, as `compiled_matrices` and `compiled_bases` describe it."""
    itemsize = 4 if constants.get("G") == "f" else 2
    if kernel == "add_splits":
        return 4 * row[2] * (row[1] + 1)
    if kernel in ("write", "finite"):
        source: int = {None: 0, "f": 4}.get(constants.get("SOURCE"), 2)
        return row[-1] * (itemsize + source)
    if kernel in ("gram", "gram_again", "orthonormal"):
        factor, grams = 4 * row[4] * row[5], 8 * (2 * row[6] + 1) * constants["R"] ** 2
        return factor + (factor if kernel == "orthonormal" else grams)
    rows, columns, rank = row[3:6]
    writes = kernel == "reconstruct" or constants["KEEPS"]
    matrix: int = rows * columns * (itemsize * (1 + writes) + 4 * (row[1] != 0))
    if kernel == "reconstruct":
        pairs: int = 4 * rank * (rows + columns) * (1 + constants["TERMS"])
        return matrix + pairs + 4 * rows * columns * (row[6] != 0)
    splits: int = -(-rows // constants["SPLIT"]) if kernel == "projections" else 1
    return matrix + 4 * rank * (rows + columns * splits)


class Timed:
    """Stands for `launcher.launch`: notes two events and the bytes of each launch."""

    def __init__(self) -> None:
        self.launches: dict[Kind, list[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[], int]]]]
        self.launches = defaultdict(list)
        self._launch = launcher.launch

    def __call__(
        self,
        kernel: str,
        programs: int,
        arguments: Sequence[torch.Tensor | int | None],
        constants: Mapping[str, Any],
    ) -> None:
        before, after = two_events()
        before.record()
        self._launch(kernel, programs, arguments, constants)
        after.record()
        size = constants.get("R", constants.get("BITS"))
        name = kernel.partition(".")[2]
        kind = Kind(name, constants.get("G", "f"), size, constants.get("ALIGNED", True))
        self.launches[kind].append((before, after, num_bytes_of(kernel, arguments, constants)))

    def rows(self, case: str, copied_bytes_per_second: float) -> list[list[str]]:
        """Return a line for each kernel of a step."""
        found = []
        for kind, events in sorted(self.launches.items(), key=str):
            seconds = sum(before.elapsed_time(after) for before, after, _ in events) / TIMED_STEPS / 1e3
            num_bytes = sum(counted() for *_, counted in events) / TIMED_STEPS
            share = num_bytes / seconds / copied_bytes_per_second
            numbers = [f"{1e3 * seconds:.3f}", f"{num_bytes / 1e9:.3f}", f"{share:.0%}"]
            found.append([case, str(kind), str(len(events) // TIMED_STEPS), *numbers])
        return found


def measured(case: str, copied_bytes_per_second: float) -> tuple[list[str], list[list[str]]]:
    """Return a line of a step, and lines of its kernels."""
    algorithm, shapes, dtype = CASES[case]
    buckets = buckets_of(shapes, dtype)
    flats = [torch.randn(sum(spec.numel for spec in each), device="cuda").to(dtype) for each in buckets]
    specs, settings = chain.from_iterable(buckets), Settings(host_check="auto")
    engine = Engine(algorithm, InProcessTransport.group(1)[0], specs, settings)
    lanes = [engine.open(each, flats[0].device) for each in buckets]

    def step() -> tuple[float, float, float]:
        torch.cuda.synchronize()
        torch.cuda._sleep(ASLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start, end = two_events()
        start.record()
        began = time.perf_counter()
        work = engine.begin(pipelined=True)
        for lane, flat in zip(lanes, flats, strict=True):
            work.start(lane, flat)
        started = time.perf_counter()
        work.finish()
        finished = time.perf_counter()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * (started - began), 1e3 * (finished - started), start.elapsed_time(end)

    def steps() -> list[str]:
        for _ in range(UNTIMED_STEPS):
            step()
        return [f"{median(each):.2f}" for each in zip(*(step() for _ in range(TIMED_STEPS)), strict=True)]

    made = steps()
    timed, original = Timed(), launcher.launch
    launcher.launch = timed
    for _ in range(TIMED_STEPS):
        step()
    launcher.launch = original
    return [case, str(len(lanes)), *made], timed.rows(case, copied_bytes_per_second)


def copied_bytes_per_second() -> float:
    """Return what a copy of GPT-2 small's gradients reads and writes a second."""
    source = torch.randn(124_000_000, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        before, after = two_events()
        before.record()
        target.copy_(source)
        after.record()
        torch.cuda.synchronize()
        seconds.append(before.elapsed_time(after) / 1e3)
    return float(2 * source.nbytes / median(seconds[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--save", action="store_true", help="as a result page of today")
    asked = parser.parse_args()
    speed = copied_bytes_per_second()
    measurements = [measured(case, speed) for case in asked.cases]
    times = ["host: starts, ms", "host: finish, ms", "device, ms"]
    heads = ["step", "buckets", *times]
    kernel_heads = ["step", "kernel", "launches", "ms", "GB read and written", "of a copy's speed"]
    text = page(
        "Triton's kernels, and the host",
        f"{torch.cuda.get_device_name()}, Triton {installed()}; a copy reads and writes "
        f"{speed / 1e9:,.0f} GB/s. One process, which exchanges with nobody. "
        "The host's time is its own: the device sleeps meanwhile. "
        f"Medians of {TIMED_STEPS} steps; of kernels means.",
        markdown_table(heads, [step for step, _ in measurements]),
        markdown_table(kernel_heads, [row for _, rows in measurements for row in rows]),
    )
    print(text)
    if asked.save:
        print(f"saved as {save(text, 'triton')}")


if __name__ == "__main__":
    main()
