"""The list of algorithms under test: adding an algorithm to the project is adding a line here."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import pytest
import torch

from in_turn import InTurn
from thinwire import AllReduce, Cast, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.algorithms.lowrank import powersgd_plan
from thinwire.algorithms.lowrank.config import LowRankRoute
from thinwire.kernels import dispatch
from thinwire.kernels.backend import Kernels
from thinwire.kernels.matrices import Rows
from thinwire.plan import ParameterSpec, Plan
from thinwire.simulation import Simulation
from thinwire.tensors.blocks import Blocks
from toy import AroundTrend


@dataclass(frozen=True)
class Entry:
    """An algorithm and what it promises."""

    algorithm: Algorithm
    lossless: bool = False
    feedback: bool = False  # sum of results + final mean error = sum of true means
    compresses: bool = True
    same_in_any_buckets: bool = True  # which parameters share a bucket changes no result
    tolerance: float = 1e-5  # of that identity, relative to the sum of true means

    def __str__(self) -> str:
        """Name and settings that are not the default."""
        settings = fields(self.algorithm)  # type: ignore[arg-type]
        shown = [
            f"{setting.name}={value}"
            for setting in settings
            if (value := getattr(self.algorithm, setting.name)) != setting.default
        ]
        return f"{type(self.algorithm).__name__}({', '.join(shown)})"


ENTRIES = [
    Entry(AllReduce(), lossless=True, compresses=False),
    Entry(Cast("fp16")),
    Entry(Cast("bf16")),
    Entry(PowerSGD(matrix_rank=1), feedback=True),
    Entry(PowerSGD(matrix_rank=4), feedback=True),
    Entry(PowerSGD(matrix_rank=2, power_iterations=2, min_compression_ratio=1), feedback=True),
    Entry(PowerSGD(matrix_rank=2, warm_start=False), feedback=True),
    Entry(PowerSGD(matrix_rank=2, error_feedback=False)),
    Entry(PowerSGD(matrix_rank=2, warmup_steps=3), feedback=True),
    Entry(PowerSGD(matrix_rank=2, warmup_steps=1_000), lossless=True, compresses=False),
    Entry(PowerSGD(matrix_rank=2, wire_dtype="fp16"), feedback=True, tolerance=2e-3),
    Entry(PowerSGD(matrix_rank=2, wire_dtype="bf16"), feedback=True, tolerance=2e-2),
    Entry(PowerSGD(matrix_rank=2, alternating=True), feedback=True),
    Entry(PowerSGD(matrix_rank=2, alternating=True, power_iterations=3), feedback=True),
    Entry(PowerSGD(matrix_rank=2, alternating=True, wire_dtype="bf16"), feedback=True, tolerance=2e-2),
    Entry(BatchedPowerSGD(), feedback=True, same_in_any_buckets=False),
    Entry(BatchedPowerSGD(matrix_rank=3, error_feedback=False), same_in_any_buckets=False),
    Entry(TopK(density=1 / 100, bits=4, chunk=1000, error_decay=1, merge="members"), feedback=True),
    Entry(Quantize(bits=8, block=32)),
    Entry(Quantize(bits=6, block=16)),
    Entry(Quantize(bits=5, error_feedback=True), feedback=True, same_in_any_buckets=False),
    Entry(Quantize(bits=4)),
    Entry(Quantize(bits=4, eigenbasis="*")),
    Entry(Quantize(bits=3, block=128)),
    Entry(Quantize(bits=1, block=16)),
    Entry(Quantize(bits=8, block=32, error_feedback=True), feedback=True, same_in_any_buckets=False),
    Entry(Quantize(bits=2, error_feedback=True), feedback=True, same_in_any_buckets=False),
    # Not Thinwire's: nothing of Thinwire knows them. The last one is that of docs/own-algorithm.md.
    Entry(AroundTrend(), feedback=True, same_in_any_buckets=False),
    Entry(InTurn(), feedback=True),
]


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec.of(name, torch.empty(shape, dtype=dtype))


def specs_of(layout: Iterable[Iterable[ParameterSpec]]) -> list[ParameterSpec]:
    """Return the parameters of all buckets."""
    return [*chain.from_iterable(layout)]


def buckets(dtype: torch.dtype = torch.float32) -> list[tuple[ParameterSpec, ...]]:
    """A model in two buckets: matrices, two of one shape, a convolution, vectors, a scalar, nothing."""
    conv = torch.empty(40, 6, 3, 3, dtype=dtype)
    return [
        (
            spec("head.weight", 64, 32, dtype=dtype),
            spec("head.bias", 64, dtype=dtype),
            spec("body.weight", 64, 32, dtype=dtype),
            spec("scale", dtype=dtype),
        ),
        (
            ParameterSpec.of("conv.weight", conv.to(memory_format=torch.channels_last)),
            spec("tiny.weight", 2, 3, dtype=dtype),
            spec("empty", 0, 5, dtype=dtype),
        ),
    ]


class Bits:
    """Tensors, equal to those of the same bits."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.clone() for tensor in tensors]
        self._bits = tuple((t.dtype, t.shape, t.numpy().tobytes()) for t in self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bits) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)


@lru_cache(maxsize=512)
def bases_of(batches: Bits, drawn: Bits, kernels: Kernels) -> list[torch.Tensor]:
    """Orthonormal rows, once for the same tensors and kernels; nothing drawn where it is empty."""
    pairs = zip(batches.tensors, drawn.tensors, strict=True)
    return kernels.orthonormal_rows(
        [Rows(rows.clone(), instead if len(instead) else None) for rows, instead in pairs]
    )


def remember_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let low rank take `bases_of` for its own arithmetic."""

    @cache
    def remembering(kernels: Kernels) -> Kernels:
        def remembered(items: Sequence[Rows]) -> list[torch.Tensor]:
            rows = Bits([item.rows for item in items])
            drawn = Bits([torch.zeros(0) if item.drawn is None else item.drawn for item in items])
            return [basis.clone() for basis in bases_of(rows, drawn, kernels)]

        return replace(kernels, orthonormal_rows=remembered)

    monkeypatch.setattr(
        powersgd_plan, "kernels_for", lambda like, rank: remembering(dispatch.kernels_for(like, rank))
    )


def low_rank_routes(plan: Plan) -> list[LowRankRoute]:
    """The routes of a low-rank algorithm's plan, all of them."""
    routes = [route for route in plan.routes if isinstance(route, LowRankRoute)]
    assert len(routes) == len(plan.routes)
    return routes


def numbers(blocks: Blocks, seed: int = 0) -> torch.Tensor:
    """Of many sizes, with zeros."""
    drawn = torch.randn(2, sum(blocks.numels), generator=torch.Generator().manual_seed(seed))
    flat = drawn[0] * (4 * drawn[1]).exp()
    flat[70:140] = 0
    return flat


Gradients = list[list[torch.Tensor]]


def random_gradients(
    layout: Sequence[tuple[ParameterSpec, ...]], *, num_workers: int, seed: int
) -> Gradients:
    """By worker and bucket: a part that all workers share, and one of their own."""
    drawn = _drawn(tuple(layout), num_workers, seed)
    return [[flat.clone() for flat in of_worker] for of_worker in drawn]


@lru_cache(maxsize=128)
def _drawn(layout: tuple[tuple[ParameterSpec, ...], ...], num_workers: int, seed: int) -> Gradients:
    generator = torch.Generator().manual_seed(seed)

    def draw(bucket: tuple[ParameterSpec, ...]) -> torch.Tensor:
        return torch.randn(sum(parameter.numel for parameter in bucket), generator=generator)

    shared = [draw(bucket) for bucket in layout]
    return [
        [(common + draw(bucket)).to(bucket[0].dtype) for common, bucket in zip(shared, layout, strict=True)]
        for _ in range(num_workers)
    ]


def true_means(gradients: Gradients) -> list[torch.Tensor]:
    """The mean of each bucket over the workers, in float64."""
    return [torch.stack([g.double() for g in group]).mean(0) for group in zip(*gradients, strict=True)]


def flat_error(state: dict[str, Any], bucket: tuple[ParameterSpec, ...]) -> torch.Tensor:
    """The error memory of a saved state, as one bucket, in float64; zeros where there is none."""
    parts = []
    for parameter in bucket:
        strided = torch.empty_strided(parameter.shape, parameter.stride, dtype=torch.float64)
        strided.copy_(dict(state["error"]).get(parameter.name, torch.zeros(parameter.shape)))
        parts.append(strided.as_strided((parameter.numel,), (1,)))
    return torch.cat(parts)


def whole_residual(state: dict[str, Any], layout: Sequence[tuple[ParameterSpec, ...]]) -> torch.Tensor:
    """The error memory of a saved state, bucket after bucket."""
    return torch.cat([flat_error(state, bucket) for bucket in layout])


class Sums:
    """Of a run: its results and its true means. The mean residual is all that the results lack."""

    def __init__(self) -> None:
        self.results = self.true_means = torch.zeros((), dtype=torch.float64)

    def lost(self, simulation: Simulation) -> torch.Tensor:
        """What is neither in the results nor in the residual, relative to the true means."""
        owed = whole_residual(simulation.state_dicts()[0], simulation.buckets)
        lost: torch.Tensor = (self.true_means - self.results - owed) / self.true_means.norm()
        return lost


def averaged(simulation: Simulation, seed: int, sums: Sums | None = None) -> list[torch.Tensor]:
    """Make a step of random gradients; return the results, by bucket, which are the same on all workers."""
    gradients = random_gradients(simulation.buckets, num_workers=len(simulation.syncs), seed=seed)
    if sums is not None:
        sums.true_means = sums.true_means + torch.cat(true_means(gradients))
    assert simulation.step(gradients)
    for others in gradients[1:]:
        assert all(map(torch.equal, gradients[0], others))
    if sums is not None:
        sums.results = sums.results + torch.cat(gradients[0]).double()
    return gradients[0]


def resumed(simulation: Simulation, state: dict[str, Any]) -> Simulation:
    """Load a copy of a state on all workers."""
    for sync in simulation.syncs:
        sync.load_state_dict(copy.deepcopy(state))
    return simulation
