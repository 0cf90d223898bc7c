"""The settings that all low-rank algorithms share, and the sizes and dtypes that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from thinwire.algorithms.base import Algorithm
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.exact import WireDtype, short_name_of, wire_dtype_of
from thinwire.algorithms.lowrank.slots import BASIS, FACTOR, SENT
from thinwire.checks import number, true_or_false, whole_count, whole_number
from thinwire.plan import ParameterSpec, Route

# Names of our settings in torch, the reference implementation and earlier versions.
ELSEWHERE = {
    "rank": "matrix_rank",
    "matrix_approximation_rank": "matrix_rank",
    "min_compression_rate": "min_compression_ratio",
    "start_powerSGD_iter": "warmup_steps",
    "start_compressing_after_num_steps": "warmup_steps",
    "use_error_feedback": "error_feedback",
    "random_seed": "seed",
    "num_iters_per_step": "power_iterations",
}

# Each takes the name under which its setting was given, for errors.
CHECKS: dict[str, Callable[[str, object], object]] = {
    "matrix_rank": partial(whole_number, minimum=1),
    "seed": partial(whole_number, minimum=0),
    "power_iterations": partial(whole_number, minimum=1),
    "warmup_steps": partial(whole_count, minimum=0),
    "error_feedback": true_or_false,
    "warm_start": true_or_false,
    "min_compression_ratio": partial(number, minimum=0),
}


@dataclass(frozen=True)
class LowRankRoute(Route):
    """How a gradient is sent: uncompressed, or as two factors of a matrix of (rows, columns)."""

    matrix_shape: tuple[int, int] | None = None
    matrix_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class LowRank(Algorithm):
    """The settings; `PowerSGD` documents them."""

    slots = (ERROR, FACTOR, BASIS, SENT)
    decides_on_device = True
    always_shown = ("matrix_rank",)  # it mostly determines the bytes
    names_elsewhere = ELSEWHERE

    alternating = False  # `PowerSGD` has it as a setting
    matrix_rank: int
    min_compression_ratio: float = 2
    warmup_steps: int = 0
    error_feedback: bool = True
    warm_start: bool = True
    seed: int = 0
    wire_dtype: WireDtype | None = None
    power_iterations: int = 1

    def __post_init__(self) -> None:
        # Stored as Python's own types: members compare settings as text, and NumPy's types print differently.
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.wire_dtype is not None:
            object.__setattr__(self, "wire_dtype", short_name_of(self.wire_dtype))

    @property
    def factor_pairs(self) -> float:
        """Left and right factors of a matrix that a step sends, on average."""
        return self.power_iterations

    def matrix_rank_of(
        self, shape: tuple[int, int], dtype: torch.dtype, wanted: int | None = None
    ) -> int | None:
        """Return the matrix rank at which a matrix is compressed; None if that saves too few bytes."""
        rows, columns = shape
        matrix_rank = min(wanted or self.matrix_rank, rows, columns)
        factor_bytes = self.factor_bytes(shape, matrix_rank, dtype)
        uncompressed_bytes = rows * columns * self.uncompressed_dtype(dtype).itemsize
        return matrix_rank if factor_bytes * self.min_compression_ratio < uncompressed_bytes else None

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the messages of a bucket of `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        return wide if self.wire_dtype is None else self.uncompressed_dtype(dtype)

    def uncompressed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a bucket of `dtype` is sent if none of it is compressed."""
        return dtype if self.wire_dtype is None else wire_dtype_of(self.wire_dtype)

    def uncompressed_route(self, spec: ParameterSpec, dtype: torch.dtype) -> LowRankRoute:
        """Return the route of a parameter that is sent uncompressed in `dtype`."""
        return LowRankRoute((spec.name,), spec.gradient_bytes, spec.numel * dtype.itemsize)

    def uncompressed_routes(self, specs: Sequence[ParameterSpec]) -> tuple[LowRankRoute, ...]:
        """Return the routes of a bucket of which nothing is compressed."""
        return tuple(self.uncompressed_route(spec, self.uncompressed_dtype(spec.dtype)) for spec in specs)

    def compressed_route(
        self, specs: Sequence[ParameterSpec], shape: tuple[int, int], matrix_rank: int
    ) -> LowRankRoute:
        """Return the route of parameters that form one matrix; several only if a whole bucket is one."""
        return LowRankRoute(
            tuple(spec.name for spec in specs),
            sum(spec.gradient_bytes for spec in specs),
            self.factor_bytes(shape, matrix_rank, specs[0].dtype),
            f"{shape[0]}×{shape[1]}, rank {matrix_rank}",
            is_compressed=True,
            rounds=int(2 * self.factor_pairs),
            matrix_shape=shape,
            matrix_rank=matrix_rank,
        )

    def factor_bytes(self, shape: tuple[int, int], matrix_rank: int, dtype: torch.dtype) -> int:
        """Return the bytes that the left and right factors of one matrix take in a step, on average."""
        # With `alternating` a step sends one side only, on average half a pair: each side counts half.
        return int(matrix_rank * sum(shape) * self.message_dtype(dtype).itemsize * self.factor_pairs)


def translated(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return settings given by torch's or the reference implementation's names by our names, checked."""
    ours = {name: ELSEWHERE.get(name, name) for name in settings}
    return {ours[name]: CHECKS[ours[name]](name, value) for name, value in settings.items()}
