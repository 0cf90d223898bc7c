"""A page about a device: arithmetic against float64, speed against a copy, and steps of GPT-2 small."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from thinwire.algorithms import Algorithm, AllReduce, Cast, PowerSGD, Quantize
from thinwire.algorithms.kernels.dispatch import orthonormal_rows, products, projections, reconstruct
from thinwire.algorithms.kernels.matrices import Factors, MatrixGroup
from thinwire.channel import Transport
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine
from thinwire.version import __version__

__all__ = ["ALGORITHMS", "GPT2_SMALL", "DevicePage", "KernelError", "StepCost", "measured"]

# Up to 4 the CPU has compiled kernels of its own; above, torch's operations serve.
MATRIX_RANKS = (1, 4, 32)
# The first steps compile kernels, agree upon plans and lay memory out.
UNTIMED_STEPS, TIMED_STEPS = 3, 5
# As of DDP.
BUCKET_BYTES = 25 << 20

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
        copied_bytes_per_second: Of a copy of the gradients, bytes read and written.
        kernels: Errors by matrix rank.
        steps: Costs by algorithm.
    """

    setting: dict[str, str]
    copied_bytes_per_second: float
    kernels: list[KernelError]
    steps: list[StepCost]

    def as_plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    def as_markdown(self) -> str:
        """Return it as a page to paste into an issue."""
        lines = [f"- {name}: {value}" for name, value in self.setting.items()]
        lines += [f"- a copy: {self.copied_bytes_per_second / 1e9:,.0f} GB/s", ""]
        lines += _table([asdict(each) for each in self.kernels], "{:.1e}")
        return "\n".join([*lines, "", *_table([asdict(each) for each in self.steps], "{:,.2f}")])


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


def measured(
    device: torch.device, transport: Transport, shapes: Mapping[str, tuple[int, ...]] = GPT2_SMALL
) -> DevicePage:
    """Measure a device. Collective.

    Args:
        device: Which.
        transport: Over which group steps average.
        shapes: Of the model's parameters.

    Cost: on an H100 less than a minute is expected; six times the memory of the gradients.

    Raises:
        CommunicationError: A collective failed.
    """
    buckets = _buckets(shapes)
    # Steps work in place, so each gets its gradients by a copy; its time is the unit, and is taken off
    # again.
    flats = [torch.randn(sum(spec.numel for spec in bucket), device=device) for bucket in buckets]
    copies = [torch.empty_like(flat) for flat in flats]
    copy_seconds = _seconds(device, lambda: torch._foreach_copy_(copies, flats))
    num_bytes = sum(flat.nbytes for flat in flats)
    return DevicePage(
        _setting(device, transport),
        2 * num_bytes / copy_seconds,
        [_kernel_error(device, matrix_rank) for matrix_rank in MATRIX_RANKS],
        [
            _step_cost(code, algorithm, device, transport, buckets, flats, copies, copy_seconds)
            for code, algorithm in ALGORITHMS.items()
        ],
    )


def _setting(device: torch.device, transport: Transport) -> dict[str, str]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "a CPU"
    return {
        "thinwire": __version__,
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "none"),
        "triton": triton,
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
    (left,) = products([group], [right], None, add_error=True)
    found_products = _gap(left, start @ exact.mT)
    (basis,) = orthonormal_rows([left])
    wide = basis.double().cpu()
    unlike = wide @ wide.mT - torch.eye(matrix_rank, dtype=torch.float64)
    (own,) = projections([group], [basis], None, add_error=False)
    found_projections = _gap(own, wide @ exact)
    reconstruct([group], [list(error)], [[Factors(basis, own, own)]], None)
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
    code: str,
    algorithm: Algorithm,
    device: torch.device,
    transport: Transport,
    buckets: Sequence[tuple[ParameterSpec, ...]],
    flats: Sequence[torch.Tensor],
    copies: list[torch.Tensor],
    copy_seconds: float,
) -> StepCost:
    engine = Engine(algorithm, transport)

    def step() -> None:
        torch._foreach_copy_(copies, list(flats))
        engine.average(zip(buckets, copies, strict=True))

    # Gradients and their copies lie there already, and count in no step.
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = _seconds(device, step) - copy_seconds
    peak_bytes = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    launches, waits = _looked_at(step) if device.type == "cuda" else (None, None)
    return StepCost(code, 1e3 * seconds, seconds / copy_seconds, launches, waits, peak_bytes)


def _looked_at(step: Callable[[], None]) -> tuple[int, int]:
    """Return the kernels and the host's waits of a step on CUDA; the copy of the gradients is among them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    # But for our own ranges, which later versions show on the device as well.
    launches = sum(
        str(event.device_type).endswith("CUDA") and not event.name.startswith("thinwire:")
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
    # Other warnings may come as well, and are not for this page.
    return launches, sum("called a synchronizing" in str(warning.message) for warning in caught)


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
