"""A page about a device: arithmetic against float64, speed against a copy, and steps of GPT-2 small."""

from __future__ import annotations

import gc
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from thinwire.algorithms import Algorithm, AllReduce, Cast, PowerSGD, Quantize
from thinwire.algorithms.accelerators import shortfalls
from thinwire.algorithms.kernels.dispatch import orthonormal_rows, products, projections, reconstruct
from thinwire.algorithms.kernels.matrices import Factors, MatrixGroup
from thinwire.algorithms.kernels.triton.limits import installed
from thinwire.channel import Transport, gather_numbers
from thinwire.errors import CommunicationError
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine
from thinwire.sync.precision import full_precision
from thinwire.version import __version__

__all__ = ["ALGORITHMS", "GPT2_SMALL", "DevicePage", "KernelError", "StepCost", "measured"]

# Up to 4 the CPU has compiled kernels of its own; above, torch's operations serve.
MATRIX_RANKS = (1, 4, 32)
# The first steps compile kernels, agree upon plans and lay memory out.
UNTIMED_STEPS, TIMED_STEPS = 3, 5
# As of DDP.
BUCKET_BYTES = 25 << 20

Result = TypeVar("Result")

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


@dataclass(frozen=True)
class KernelError:
    """How far the arithmetic of a matrix rank is from that in float64, relative to it.

    Attributes:
        matrix_rank: r.
        products: Of M Q.
        orthonormal_rows: Of P̂ᵀ P̂ from the identity, per row.
        projections: Of P̂ᵀ M.
        reconstruct: Of the residual.
    """

    matrix_rank: int
    products: float
    orthonormal_rows: float
    projections: float
    reconstruct: float


@dataclass(frozen=True)
class StepCost:
    """What a step of an algorithm takes, from the first bucket to the last mean.

    Attributes:
        algorithm: As it is written in code.
        milliseconds: Median.
        copies: The same in copies of the gradients.
        launches: Kernels; None where that is not known.
        host_waits: Times that the host waits for the device; None where that is not known.
        peak_bytes: Of memory, above what gradients take; None where that is not known.
    """

    algorithm: str
    milliseconds: float
    copies: float
    launches: int | None
    host_waits: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class DevicePage:
    """All that was found.

    Attributes:
        setting: Versions, device and group.
        copied_bytes_per_second: Of a copy of the gradients, bytes read and written; None if that has failed.
        kernels: Errors by matrix rank.
        steps: Costs by algorithm.
        failures: What raised an error on this process or was left out, by part, and why.
    """

    setting: dict[str, str]
    copied_bytes_per_second: float | None
    kernels: list[KernelError]
    steps: list[StepCost]
    failures: dict[str, str]

    def as_plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    def as_markdown(self) -> str:
        """Return it as a page to paste into an issue."""
        lines = [f"- {name}: {value}" for name, value in self.setting.items()]
        if self.copied_bytes_per_second is not None:
            lines.append(f"- a copy: {self.copied_bytes_per_second / 1e9:,.0f} GB/s")
        for rows, number in ((self.kernels, "{:.1e}"), (self.steps, "{:,.2f}")):
            lines += ["", *_table([asdict(each) for each in rows], number)] if rows else []
        if self.failures:
            lines += ["", *(f"- **failed**: {name}: {why}" for name, why in self.failures.items())]
        return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, object]], number: str) -> list[str]:
    def cell(value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, float):
            return number.format(value)
        return f"{value:,}" if isinstance(value, int) else str(value)

    heads = [name.replace("_", " ") for name in rows[0]]
    marks = ["---", *["--:"] * (len(heads) - 1)]
    cells = [[cell(value) for value in row.values()] for row in rows]
    return [f"| {' | '.join(line)} |" for line in [heads, marks, *cells]]


class _Parts:
    """Runs one part of a page after the other: what a part raises is noted, and the next one follows."""

    def __init__(self, transport: Transport, end: float, tell: Callable[[str], None]) -> None:
        self.failures: dict[str, str] = {}
        self._transport, self._end, self._tell = transport, end, tell
        self._is_alone = False

    def run(self, name: str, part: Callable[[], Result]) -> Result | None:
        """Return what a part returns; None if it raises, or if the time is used up on any process.

        Args:
            name: Of the part.
            part: Collective.
        """
        if self._is_alone:
            self.failures[name] = "left out, as the processes have lost each other"
            return None
        if self._transport.rank == 0:
            self._tell(f"measuring {name}")
        try:
            # Of all processes: in what only some leave out the others would wait for them.
            seconds = gather_numbers([self._end - time.monotonic()], self._transport, f"the time for {name}")
            if min(left for (left,) in seconds) > 0:
                return part()
            why = "left out, as the time is used up"
        # Of any kind: a page with a gap says more than none.
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            # Each further collective would wait for its timeout.
            self._is_alone = isinstance(error, CommunicationError)
        self.failures[name] = why
        self._tell(f"{name}: {why}")
        return None


def measured(
    device: torch.device,
    transport: Transport,
    shapes: Mapping[str, tuple[int, ...]] = GPT2_SMALL,
    *,
    within_seconds: float = 240.0,
    tell: Callable[[str], None] = lambda doing: None,
) -> DevicePage:
    """Measure a device, and note what fails. Collective.

    Args:
        device: Which.
        transport: Over which group steps average.
        shapes: Of the model's parameters.
        within_seconds: Parts that would begin later are left out.
        tell: Gets what is being measured, on the first process, and what has failed, in words.

    Cost: on an H100 less than a minute is expected, and minutes more for what Triton compiles for the first
    time; six times the memory of the gradients.
    """
    # While the device works: after some errors a process can ask it nothing any more.
    setting = _setting(device, transport)
    parts = _Parts(transport, time.monotonic() + within_seconds, tell)
    found = [
        parts.run(f"arithmetic at matrix rank {matrix_rank}", partial(_kernel_error, device, matrix_rank))
        for matrix_rank in MATRIX_RANKS
    ]
    buckets = _buckets(shapes)
    copied = parts.run("a copy", lambda: _Copied(device, buckets))
    steps: list[StepCost | None] = []
    # Without them no step can be made: there is no memory for the gradients, or no such device.
    if copied is not None:
        steps = [
            parts.run(code, partial(_step_cost, code, algorithm, transport, copied, parts))
            for code, algorithm in ALGORITHMS.items()
        ]
    return DevicePage(
        {**setting, "slower kernels": "; ".join(shortfalls(device)) or "none"},
        None if copied is None else 2 * sum(flat.nbytes for flat in copied.flats) / copied.seconds,
        [each for each in found if each is not None],
        [each for each in steps if each is not None],
        parts.failures,
    )


class _Copied:
    """Gradients, and copies of them to step with: steps work in place.

    Attributes:
        seconds: What copying all of them takes, the unit of steps; it is part of what a step is seen to take.
    """

    def __init__(self, device: torch.device, buckets: Sequence[tuple[ParameterSpec, ...]]) -> None:
        self.device, self.buckets = device, buckets
        self.flats = [
            torch.randn(sum(spec.numel for spec in bucket), dtype=torch.float32, device=device)
            for bucket in buckets
        ]
        self.copies = [torch.empty_like(flat) for flat in self.flats]
        self.seconds = _seconds(device, self.copy)

    def copy(self) -> None:
        torch._foreach_copy_(self.copies, self.flats)


def _setting(device: torch.device, transport: Transport) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "a CPU"
    return {
        "thinwire": __version__,
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or torch.version.hip or "none"),
        "triton": installed() or "none",
        "device": f"{device.type}, {name}",
        "processes": str(transport.size),
        "threads": str(torch.get_num_threads()),
    }


def _buckets(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[ParameterSpec, ...]]:
    """Return the buckets that DDP would make."""
    buckets: list[list[ParameterSpec]] = [[]]
    held_bytes = 0
    # The backward pass makes the last layer's gradients first, so DDP fills its buckets from there.
    for name, shape in reversed(list(shapes.items())):
        if held_bytes >= BUCKET_BYTES:
            buckets.append([])
            held_bytes = 0
        buckets[-1].append(ParameterSpec.of(name, torch.empty(shape, device="meta")))
        held_bytes += buckets[-1][-1].gradient_bytes
    return [tuple(bucket) for bucket in buckets]


def _kernel_error(device: torch.device, matrix_rank: int) -> KernelError:
    # Drawn on the CPU in float64, so that every device is judged by the same matrices.
    generator = torch.Generator().manual_seed(matrix_rank)
    exact, residual = (torch.randn(1, 384, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    start = torch.linalg.qr(torch.randn(256, matrix_rank, generator=generator, dtype=torch.float64)).Q.T
    matrix, error, right = (each.float().to(device) for each in (exact, residual, start.unsqueeze(0)))
    group = MatrixGroup(["matrix"], list(matrix), list(error), matrix_rank)
    # In step with the device: its first product adds the residual to the gradient in place, and all that
    # follows is of the sum.
    exact += residual
    with full_precision(device):  # as steps are made: TF32, where it is on, would be judged here
        (left,) = products([group], [right], None, add_error=True)
        found_products = _gap(left, start @ exact.mT)
        (basis,) = orthonormal_rows([left])
        wide = basis.double().cpu()
        (own,) = projections([group], [basis], None, add_error=False)
        found_projections = _gap(own, wide @ exact)
        reconstruct([group], [list(error)], [[Factors(basis, own, own)]], None)
    unlike = wide @ wide.mT - torch.eye(matrix_rank, dtype=torch.float64)
    rest = exact - wide.mT @ (wide @ exact)
    return KernelError(
        matrix_rank,
        found_products,
        # Per row, so that matrix ranks compare.
        float(unlike.norm() / matrix_rank**0.5),
        found_projections,
        _gap(error, rest),
    )


def _gap(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double().cpu() - exact).norm() / exact.norm())


def _step_cost(
    code: str, algorithm: Algorithm, transport: Transport, copied: _Copied, parts: _Parts
) -> StepCost:
    engine, device = Engine(algorithm, transport), copied.device

    def step() -> None:
        copied.copy()
        engine.average(zip(copied.buckets, copied.copies, strict=True))

    is_cuda = device.type == "cuda"
    if is_cuda:
        # What an algorithm before this one has left in cycles would be freed on the way, and not be counted.
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    # Gradients and their copies lie there already, and count in no step.
    before = torch.cuda.memory_allocated(device) if is_cuda else 0
    seconds = _seconds(device, step) - copied.seconds
    peak_bytes = torch.cuda.max_memory_allocated(device) - before if is_cuda else None
    seen = parts.run(f"launches of {code}", partial(_looked_at, step, device)) if is_cuda else None
    launches, waits = seen or (None, None)
    return StepCost(code, 1e3 * seconds, seconds / copied.seconds, launches, waits, peak_bytes)


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
    # Other warnings may come as well, and are not for this page. Who may not count on this machine (the
    # driver decides) sees no kernels at all.
    return launches or None, sum("called a synchronizing" in str(warning.message) for warning in caught)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    found = []
    for _ in range(UNTIMED_STEPS + TIMED_STEPS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found[UNTIMED_STEPS:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        # A GPU's calls return when work has been handed to it, not when that is done.
        torch.accelerator.synchronize(device)
