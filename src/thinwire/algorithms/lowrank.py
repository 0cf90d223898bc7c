"""What every low-rank algorithm shares: its settings, and what they imply for sizes and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import TypeVar

import torch

from thinwire.algorithms.base import Algorithm, Bucket, Memory, Rounds
from thinwire.algorithms.cast import WireDtype, short_name_of, wire_dtype_of
from thinwire.algorithms.exact import exchange_whole
from thinwire.checks import number, true_or_false, whole_count, whole_number
from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec, Plan, Route

__all__ = ["LowRank"]

Config = TypeVar("Config", bound="LowRank")

# What torch, the reference implementation and earlier versions call our settings.
ELSEWHERE = {
    "relative_error": "max_relative_error",
    "rank": "matrix_rank",
    "matrix_approximation_rank": "matrix_rank",
    "min_compression_rate": "min_compression_ratio",
    "start_powerSGD_iter": "warmup_steps",
    "start_compressing_after_num_steps": "warmup_steps",
    "use_error_feedback": "error_feedback",
    "random_seed": "seed",
    "num_iters_per_step": "power_iterations",
}


@dataclass(frozen=True, kw_only=True)
class LowRank(Algorithm):
    """The settings; `PowerSGD` says what each means."""

    always_told = ("matrix_rank",)

    matrix_rank: int
    min_compression_ratio: float = 2
    warmup_steps: int = 0
    error_feedback: bool = True
    warm_start: bool = True
    seed: int = 0
    wire_dtype: WireDtype | None = None
    power_iterations: int = 1

    def __new__(cls: type[Config], *args: object, **settings: object) -> Config:
        """Refuse settings without a name, or with one that there is not.

        Raises:
            ConfigError: There are such.
        """
        try:
            signature(cls.__init__).bind_partial(None, *args, **settings)
        except TypeError as error:
            raise ConfigError(_respelt(cls, args, settings)) from error
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, least in (("matrix_rank", 1), ("seed", 0), ("power_iterations", 1)):
            self._keep(name, whole_number(name, getattr(self, name), least=least))
        self._keep("warmup_steps", whole_count("warmup_steps", self.warmup_steps, least=0))
        for name in ("error_feedback", "warm_start"):
            self._keep(name, true_or_false(name, getattr(self, name)))
        ratio = number("min_compression_ratio", self.min_compression_ratio, least=0)
        self._keep("min_compression_ratio", ratio)
        if self.wire_dtype is not None:
            self._keep("wire_dtype", short_name_of(self.wire_dtype))

    def _keep(self, name: str, value: object) -> None:
        """A setting as it is told to other processes: of Python's own types, whatever it was given as."""
        object.__setattr__(self, name, value)

    def exchange_uncompressed(self, bucket: Bucket, memory: Memory) -> Rounds:
        """One round of whole gradients, for the warm-up and for buckets with nothing to compress."""
        wire_dtype = None if self.wire_dtype is None else wire_dtype_of(self.wire_dtype)
        yield from exchange_whole(bucket, memory, wire_dtype, gated=True)

    def travels_whole(self, bucket: Bucket, memory: Memory) -> bool:
        """Whether a step compresses nothing: in the warm-up, and to pay back error without feedback."""
        owed = any(spec.name in memory.error for spec in bucket.specs)
        return memory.step < self.warmup_steps or (owed and not self.error_feedback)

    @property
    def factor_pairs(self) -> float:
        """How many left and right factors of a matrix a step sends, on average."""
        return self.power_iterations

    def matrix_rank_of(
        self, shape: tuple[int, int], dtype: torch.dtype, wanted: int | None = None
    ) -> int | None:
        """The matrix rank at which a matrix is compressed; None if that saves too few bytes.

        Args:
            shape: (rows, columns).
            dtype: Of the gradient.
            wanted: The matrix rank; None for `matrix_rank`.
        """
        rows, columns = shape
        matrix_rank = min(wanted or self.matrix_rank, rows, columns)
        factor_bytes = (rows + columns) * matrix_rank * self.factor_pairs * self.message_dtype(dtype).itemsize
        whole_bytes = rows * columns * self.whole_dtype(dtype).itemsize
        return matrix_rank if factor_bytes * self.min_compression_ratio < whole_bytes else None

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which the messages of a bucket of `dtype` travel."""
        return (
            torch.promote_types(dtype, torch.float32) if self.wire_dtype is None else self.whole_dtype(dtype)
        )

    def whole_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a bucket of `dtype` travels where nothing of it is compressed."""
        return dtype if self.wire_dtype is None else wire_dtype_of(self.wire_dtype)

    def whole_plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """The plan of a bucket of which nothing is compressed."""
        return Plan(tuple(_whole(spec, self.whole_dtype(spec.dtype)) for spec in specs))

    def rider(self, spec: ParameterSpec) -> Route:
        """The route of a parameter that travels whole, beside factors."""
        return _whole(spec, self.message_dtype(spec.dtype))

    def factor_bytes(self, shape: tuple[int, int], matrix_rank: int, dtype: torch.dtype) -> int:
        """Bytes of a step's left and right factors of one (rows, columns) matrix."""
        return matrix_rank * sum(shape) * self.message_dtype(dtype).itemsize * self.power_iterations


def _respelt(kind: type[LowRank], args: Sequence[object], settings: Mapping[str, object]) -> str:
    """What is wrong with these settings of an algorithm, and how they are written."""
    if args:
        matrix_rank = args[0] if isinstance(args[0], int) else 4
        return (
            f"{kind.__name__} takes settings by name, got {args[0]!r} without one; "
            f"write {kind.__name__}(matrix_rank={matrix_rank})"
        )
    names = [name for name in signature(kind.__init__).parameters if name != "self"]
    unknown = next(name for name in settings if name not in names)
    meant = [ELSEWHERE[unknown]] if unknown in ELSEWHERE else get_close_matches(unknown, names, n=1)
    if not meant:
        return f"{kind.__name__} has no setting {unknown!r}; it has {', '.join(names)}"
    return (
        f"{kind.__name__} has no setting {unknown!r}; write {kind.__name__}({meant[0]}={settings[unknown]!r})"
    )


def _whole(spec: ParameterSpec, dtype: torch.dtype) -> Route:
    return Route((spec.name,), spec.gradient_bytes, spec.numel * dtype.itemsize)
