"""A page about a device: arithmetic against float64, speed against a copy, and steps of GPT-2 small."""

from __future__ import annotations

import gc
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeAlias, TypeVar

import torch

from thinwire.algorithms import Algorithm, AllReduce, Cast, PowerSGD, Quantize
from thinwire.channel import Transport, gather_numbers
from thinwire.errors import CommunicationError
from thinwire.kernels.dispatch import orthonormal_rows, products, projections, reconstruct
from thinwire.kernels.matrices import Asked, Factors, MatrixGroup, Reconstruction
from thinwire.kernels.triton.limits import installed
from thinwire.plan import ParameterSpec
from thinwire.selfcheck.checks import gap
from thinwire.sync import Engine, Settings
from thinwire.sync.precision import full_precision
from thinwire.tensors.accelerators import shortfalls, wait_for
from thinwire.version import __version__

# Up to 4 the CPU has compiled its own kernels; above, torch's operations serve.
MATRIX_RANKS = (1, 4, 32)
# The first steps compile kernels, agree upon plans, lay memory out, and are recorded where steps are.
UNTIMED_STEPS, TIMED_STEPS = 5, 5
# As of DDP.
BUCKET_BYTES = 25 << 20
COPY, ARITHMETIC = "a copy", {f"arithmetic at matrix rank {rank}": rank for rank in MATRIX_RANKS}
NOT_BEGUN, NOT_ENDED = "it was not begun", "it has not ended"

Result = TypeVar("Result")
Row: TypeAlias = "dict[str, str | float | int | None]"
"""A line of a table, by column; None where a number is not known."""

ALGORITHMS: dict[str, Algorithm] = {
    "AllReduce()": AllReduce(),
    'Cast("bf16")': Cast("bf16"),
    "Quantize(bits=4)": Quantize(bits=4),
    **{f"PowerSGD(matrix_rank={rank})": PowerSGD(matrix_rank=rank) for rank in MATRIX_RANKS},
}

_BLOCK = {
    "attn.c_attn": (768, 2304),
    "attn.c_proj": (768, 768),
    "mlp.c_fc": (768, 3072),
    "mlp.c_proj": (3072, 768),
}
GPT2_SMALL: Mapping[str, tuple[int, ...]] = {
    "wte": (50257, 768),
    "wpe": (1024, 768),
    **{f"{layer}.{name}": shape for layer in range(12) for name, shape in _BLOCK.items()},
    **{f"{layer}.{name}.bias": shape[-1:] for layer in range(12) for name, shape in _BLOCK.items()},
}
"""Shapes of its parameters, but for those of its norms."""


@dataclass
class DevicePage:
    """All that was found so far. It is true at any time: what has not ended stands on it as such."""

    setting: dict[str, str]  # versions, device and group, and what has ended it early
    copied_bytes_per_second: float | None = None  # read and written, when gradients are copied
    kernels: list[Row] = field(default_factory=list)  # relative distance from float64, by matrix rank
    steps: list[Row] = field(default_factory=list)  # of each algorithm, first bucket to last mean
    failures: dict[str, str] = field(default_factory=dict)  # by part: it raised here, or has not ended
    not_run: dict[str, str] = field(default_factory=dict)  # by part: why it was left out

    @property
    def is_whole(self) -> bool:
        """Whether all parts have ended, and well."""
        return not (self.failures or self.not_run)

    def as_markdown(self) -> str:
        """Return it as a page to paste into an issue."""

        def cell(value: str | float | None) -> str:
            if isinstance(value, float):
                # A time in milliseconds or copies, or the error of a kernel.
                return f"{value:,.2f}" if value > 0.01 else f"{value:.1e}"
            return f"{value:,}" if isinstance(value, int) else value or ""

        lines = [f"- {name}: {value}" for name, value in self.setting.items()]
        if self.copied_bytes_per_second is not None:
            lines.append(f"- a copy: {self.copied_bytes_per_second / 1e9:,.0f} GB/s")
        for rows in filter(None, (self.kernels, self.steps)):
            heads = [name.replace("_", " ") for name in rows[0]]
            cells = [list(map(cell, row.values())) for row in rows]
            marks = ["---", *["--:"] * (len(heads) - 1)]
            lines += ["", *(f"| {' | '.join(line)} |" for line in [heads, marks, *cells])]
        gaps = [f"- **failed**: {name}: {why}" for name, why in self.failures.items()]
        gaps += [f"- **not run**: {name}: {why}" for name, why in self.not_run.items()]
        return "\n".join([*lines, "", *gaps] if gaps else lines)


def new_page(device: str) -> DevicePage:
    """Return a page on which all is to come; a device is not asked for anything yet."""
    setting = {
        "thinwire": __version__,
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or torch.version.hip or "none"),
        "triton": installed() or "none",
        "device": device,
        "processes": os.environ.get("WORLD_SIZE", "1"),
        "threads": str(torch.get_num_threads()),
    }
    return DevicePage(setting, not_run=dict.fromkeys([*ARITHMETIC, COPY, *ALGORITHMS], NOT_BEGUN))


@contextmanager
def printed_once(
    page: DevicePage, rendered: Callable[[], str], *, within_seconds: float
) -> Iterator[Callable[[], None]]:
    """Print a page once: by what is yielded, at the end, or after so long, whatever raises or hangs.

    A process that is killed prints nothing.
    """
    lock, is_printed = threading.Lock(), False

    def print_page(ended_by: str = "") -> None:
        nonlocal is_printed
        with lock:
            if not is_printed:
                is_printed = True
                page.setting |= {"ended by": ended_by} if ended_by else {}
                print(rendered(), flush=True)

    # A thread, because it goes on while the main one waits for a device or a message.
    timer = threading.Timer(within_seconds, print_page, [f"its time, {within_seconds:.0f} s, was over"])
    timer.daemon = True
    timer.start()
    try:
        yield print_page
        print_page()
    except BaseException as error:
        print_page(str(error).partition("\n")[0] or type(error).__name__)
        raise
    finally:
        timer.cancel()


def measure(
    page: DevicePage,
    device: torch.device,
    transport: Transport,
    shapes: Mapping[str, tuple[int, ...]] = GPT2_SMALL,
    *,
    within_seconds: float = 240.0,
    tell: Callable[[str], None] = lambda doing: None,
) -> None:
    """Measure a device, and note what fails. Collective; takes six times the memory of the gradients."""
    # While the device works: after some errors a process can ask it nothing any more.
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "a CPU"
    page.setting |= {"device": f"{device.type}, {name}", "processes": str(transport.size)}
    parts = _Parts(page, device, transport, time.monotonic() + within_seconds, tell)
    for name, matrix_rank in ARITHMETIC.items():
        if error := parts.run(name, partial(_kernel_error, device, matrix_rank)):
            page.kernels.append(error)
    copied = parts.run(COPY, lambda: _Copied(parts, buckets_of(shapes)))
    if copied is not None:
        page.copied_bytes_per_second = 2 * sum(flat.nbytes for flat in copied.flats) / copied.seconds
    else:
        # There is no memory for the gradients, or no such device.
        parts.why_not = f"as there are no gradients to step with: {COPY} is missing"
    for code, algorithm in ALGORITHMS.items():
        if cost := parts.run(code, partial(_step_cost, code, algorithm, copied, parts)):
            page.steps.append(cost)
    page.setting["slower kernels"] = "; ".join(shortfalls(device)) or "none"


@dataclass
class _Parts:
    """Runs one part of a page after the other: what a part raises is noted, and the next one follows."""

    page: DevicePage
    device: torch.device
    transport: Transport
    end: float
    tell: Callable[[str], None]
    why_not: str = ""  # all that is still to come is left out

    def run(self, name: str, part: Callable[[], Result]) -> Result | None:
        """Return what a part returns; None if it raises, or is left out."""
        not_run, failures = self.page.not_run, self.page.failures
        if not self.why_not:
            # As long as it runs, the page says so: it may be printed in the middle.
            del not_run[name]
            failures[name] = NOT_ENDED
            try:
                if self.transport.rank == 0:
                    self.tell(f"measuring {name}")
                if self._has_time(name):
                    found = part()
                    del failures[name]
                    return found
            # Any error: a page with a gap says more than none.
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.tell(f"{name}: {failures[name]}")
                if isinstance(error, CommunicationError):  # each further collective would wait in vain
                    self.why_not = "as the processes have lost each other"
                return None
            del failures[name]
        not_run[name] = f"left out, {self.why_not or 'as the time is used up'}"
        self.tell(f"{name}: {not_run[name]}")
        return None

    def seconds_of(self, run: Callable[[], object]) -> tuple[float, int]:
        """Return the median of some steps, and of how many. Collective."""
        found: list[float] = []
        while len(found) < UNTIMED_STEPS + TIMED_STEPS and self._has_time("a step"):
            wait_for(self.device)
            start = time.perf_counter()
            run()
            wait_for(self.device)
            found.append(time.perf_counter() - start)
        timed = found[UNTIMED_STEPS:]
        if not timed:
            raise TimeoutError(f"ended after {len(found)} steps, none of them timed: the time is used up")
        return median(timed), len(timed)

    def _has_time(self, what: str) -> bool:
        # On all processes: in what only some leave out, the others would wait for them.
        left = gather_numbers([self.end - time.monotonic()], self.transport, f"the time for {what}")
        return min(left)[0] > 0


class _Copied:
    """Gradients, and copies of them to step with: steps work in place."""

    def __init__(self, parts: _Parts, buckets: Sequence[tuple[ParameterSpec, ...]]) -> None:
        self.buckets = buckets
        numels = [sum(spec.numel for spec in bucket) for bucket in buckets]
        self.flats = [torch.randn(numel, dtype=torch.float32, device=parts.device) for numel in numels]
        self.copies = [torch.empty_like(flat) for flat in self.flats]
        # The unit of steps, and part of what a step is seen to take.
        self.seconds, _ = parts.seconds_of(self.copy)

    def copy(self) -> None:
        torch._foreach_copy_(self.copies, self.flats)


def buckets_of(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[tuple[ParameterSpec, ...]]:
    """Return the buckets that DDP would make."""
    buckets: list[list[ParameterSpec]] = [[]]
    # The backward pass makes the last layer's gradients first, so DDP fills its buckets from there.
    for name, shape in reversed(list(shapes.items())):
        if sum(spec.gradient_bytes for spec in buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(ParameterSpec.of(name, torch.empty(shape, dtype=dtype, device="meta")))
    return [tuple(bucket) for bucket in buckets]


def _kernel_error(device: torch.device, matrix_rank: int) -> Row:
    """Return how far products and their like are from float64, and P̂ᵀ P̂ from the identity."""
    # Drawn on the CPU in float64, so that every device is judged by the same matrices.
    generator = torch.Generator().manual_seed(matrix_rank)
    exact, residual = (torch.randn(1, 384, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    start = torch.linalg.qr(torch.randn(256, matrix_rank, generator=generator, dtype=torch.float64)).Q.T
    matrix, error, right = (each.float().to(device) for each in (exact, residual, start.unsqueeze(0)))
    group = MatrixGroup(["matrix"], list(matrix), list(error), matrix_rank)
    # In step with the device: its first product adds the residual to the gradient in place, and all that
    # follows is of the sum.
    exact += residual
    with full_precision(device):  # as steps are made: TF32, if it is on, would be judged here
        (left,) = products([Asked(group, right, None, add_error=True)])
        found_products = gap(left.cpu(), start @ exact.mT)
        (basis,) = orthonormal_rows([left])
        wide = basis.cpu().double()
        (own,) = projections([Asked(group, basis, None, add_error=False)])
        found_projections = gap(own.cpu(), wide @ exact)
        reconstruct([Reconstruction(group, list(error), [Factors(basis, own, own)], None)])
    unlike = wide @ wide.mT - torch.eye(matrix_rank, dtype=torch.float64)
    rest = exact - wide.mT @ (wide @ exact)
    return {
        "matrix_rank": matrix_rank,
        "products": found_products,
        "orthonormal_rows": float(unlike.norm() / matrix_rank**0.5),  # per row, so that matrix ranks compare
        "projections": found_projections,
        "reconstruct": gap(error.cpu(), rest),
    }


def _step_cost(code: str, algorithm: Algorithm, copied: _Copied | None, parts: _Parts) -> Row:
    """Return what steps take, also in copies of the gradients; memory is above what gradients take."""
    assert copied is not None  # or all algorithms are left out
    settings = Settings(host_check="auto", gradients_stay=True)  # as of DDP's steps
    engine, device = Engine(algorithm, parts.transport, settings=settings), parts.device

    def step() -> None:
        copied.copy()
        engine.average(zip(copied.buckets, copied.copies, strict=True))

    before = 0
    if device.type == "cuda":
        # What an algorithm before this one has left in cycles would be freed on the way, and not be counted.
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        # Gradients and their copies lie there already, and count in no step.
        before = torch.cuda.memory_allocated(device)
    with_copy, timed_steps = parts.seconds_of(step)
    seconds = with_copy - copied.seconds
    peak_bytes = launches = waits = None
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device) - before
        try:
            launches, waits = _looked_at(step, device)
        except RuntimeError as error:  # the milliseconds stand all the same
            parts.page.failures[f"launches of {code}"] = str(error).partition("\n")[0]
    return {
        "algorithm": code,
        "milliseconds": 1e3 * seconds,
        "copies": seconds / copied.seconds,
        "timed_steps": timed_steps,
        "launches": launches,
        "host_waits": waits,
        "peak_bytes": peak_bytes,
    }


def _looked_at(step: Callable[[], None], device: torch.device) -> tuple[int | None, int]:
    """Return the kernels and the host's waits of a step on CUDA; the copy of the gradients is among them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize(device)
    # But for ranges, ours and NCCL's, which are shown on the device as well.
    launches = sum(
        str(event.device_type).endswith("CUDA") and not event.is_user_annotation
        for event in profile.events() or []
    )
    with warnings.catch_warnings(record=True) as caught:
        # The host's waits are reported as warnings, one each; Python would drop those that repeat.
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            # The mode is the whole process's.
            torch.cuda.set_sync_debug_mode("default")
    # Other warnings may come as well, and are not for this page. A user who may not count here (the
    # driver decides) sees no kernels at all.
    return launches or None, sum("called a synchronizing" in str(warning.message) for warning in caught)
