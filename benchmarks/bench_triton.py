"""What each Triton kernel of a step takes on a GPU, its bytes a second beside a copy's, and the host's time.

One process; the exchange is with nobody. Kernels are timed by events while the device sleeps until all of a
step is queued, so that the host, which is timed apart, holds nothing up.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from pages import markdown_table, page, save
from thinwire import PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm
from thinwire.channel import InProcessTransport
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.limits import installed
from thinwire.plan import ParameterSpec
from thinwire.selfcheck.device import GPT2_SMALL, _buckets
from thinwire.sync import Engine, Settings

UNTIMED_STEPS, TIMED_STEPS = 4, 5
# The device sleeps this many cycles, about 0.1 s: more than the host takes for a step.
ASLEEP_CYCLES = 200_000_000

LLAMA_LAYER = {"q": (4096, 4096), "gate": (11008, 4096), "down": (4096, 11008), "up": (11008, 4096)}
UNALIGNED = {"embedding": (50257, 768), "odd": (768, 3075), "head": (10,)}

Key = tuple[str, object, object, object]
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
    "GPT-2 small, 4 bits drawn": (Quantize(bits=4, rounding="stochastic"), GPT2_SMALL, torch.float32),
    "Llama's layer in bf16, 4 bits": (Quantize(bits=4), LLAMA_LAYER, torch.bfloat16),
    "GPT-2 small, TopK": (TopK(), GPT2_SMALL, torch.float32),
}


class Timed:
    """Stands for `launcher.launch`: notes two events and the bytes of each launch."""

    def __init__(self) -> None:
        self.launches: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event, int]]] = defaultdict(list)
        self._launch = launcher.launch

    def __call__(
        self,
        kernel: str,
        programs: int,
        arguments: Sequence[torch.Tensor | int | None],
        constants: Mapping[str, object],
        device: torch.device,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self._launch(kernel, programs, arguments, constants, device, reads=reads, writes=writes)
        after.record()
        told = constants.get("G", "f"), constants.get("R", constants.get("BITS")), constants.get("ALIGNED")
        num_bytes = sum(each.nbytes for each in (*reads, *writes))
        self.launches[kernel.partition(".")[2], *told].append((before, after, num_bytes))

    def rows(self, case: str, copied_bytes_per_second: float) -> list[list[object]]:
        """Return a line for each kernel of a step."""
        found: list[list[object]] = []
        for (kernel, letter, size, aligned), events in sorted(self.launches.items(), key=str):
            seconds = sum(before.elapsed_time(after) for before, after, _ in events) / TIMED_STEPS / 1e3
            num_bytes = sum(each for *_, each in events) / TIMED_STEPS
            share = num_bytes / seconds / copied_bytes_per_second
            name = f"{kernel}, {letter}{size}" + ("" if aligned in (None, True) else ", unaligned")
            found.append(
                [case, name, len(events) // TIMED_STEPS, f"{1e3 * seconds:.3f}", f"{num_bytes / 1e9:.3f}",
                 f"{share:.0%}"]
            )  # fmt: skip
        return found


def measured(
    case: str, copied_bytes_per_second: float
) -> tuple[list[list[object]], list[object]]:
    """Return lines of kernels, and the host's line."""
    algorithm, shapes, dtype = CASES[case]
    buckets = [
        tuple(ParameterSpec.of(spec.name, torch.empty(spec.shape, dtype=dtype, device="meta")) for spec in each)
        for each in _buckets(shapes)
    ]
    flats = [torch.randn(sum(spec.numel for spec in each), device="cuda").to(dtype) for each in buckets]
    engine = Engine(algorithm, InProcessTransport.group(1)[0], settings=Settings(host_check=False))
    lanes = [engine.open(each, flats[0].device) for each in buckets]
    timed, hooks, ends, gpu = Timed(), [], [], []
    original: Any = launcher.launch
    for step in range(UNTIMED_STEPS + 2 * TIMED_STEPS):
        # First the host's time alone, then that of each kernel.
        if step == UNTIMED_STEPS + TIMED_STEPS:
            launcher.launch = timed
        torch.cuda.synchronize()
        torch.cuda._sleep(ASLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work, began = engine.begin(pipelined=True), time.perf_counter()
        for lane, flat in zip(lanes, flats, strict=True):
            work.start(lane, flat)
        hooked = time.perf_counter()
        work.finish()
        ended = time.perf_counter()
        end.record()
        if UNTIMED_STEPS <= step < UNTIMED_STEPS + TIMED_STEPS:
            torch.cuda.synchronize()
            hooks.append(hooked - began)
            ends.append(ended - hooked)
            gpu.append(start.elapsed_time(end) / 1e3)
    torch.cuda.synchronize()
    launcher.launch = original
    host = [f"{1e3 * median(each):.2f}" for each in (hooks, ends, gpu)]
    return timed.rows(case, copied_bytes_per_second), [case, len(lanes), *host]


def copied_bytes_per_second() -> float:
    """Return what a copy of GPT-2 small's gradients reads and writes a second."""
    source = torch.randn(124_000_000, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        target.copy_(source)
        after.record()
        torch.cuda.synchronize()
        seconds.append(before.elapsed_time(after) / 1e3)
    return 2 * source.nbytes / median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    speed = copied_bytes_per_second()
    kernels: list[list[object]] = []
    hosts: list[list[object]] = []
    print(f"a copy: {speed / 1e9:,.0f} GB/s", flush=True)
    for case in asked.cases:
        rows, host = measured(case, speed)
        kernels += rows
        hosts.append(host)
        print(*(" | ".join(map(str, row)) for row in [*rows, host]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
