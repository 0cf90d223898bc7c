"""PowerSGD, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.algorithms.base import BucketPlan
from thinwire.algorithms.lowrank.config import LowRank, LowRankRoute
from thinwire.algorithms.lowrank.powersgd_plan import PowerSGDPlan
from thinwire.checks import true_or_false, whole_number
from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Send two low-rank factors of every gradient matrix instead of the matrix.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2,
    with one change: a process's error is what remains of its own gradient, M − P̂ P̂ᵀ M, not of the mean.

    Gradients of any floating dtype: factors are computed, and the error kept, in fp32 (for fp64 gradients
    in fp64, with PyTorch's products). Vectors, scalars and matrices that would shrink too little are sent
    uncompressed in the first message.

    Args:
        matrix_rank: Rank r of the factors; more is more exact and costs proportionally more bytes.
        min_compression_ratio: A matrix is compressed only if that shrinks it by more than this ratio, in
            bytes: (rows + columns) · r · power_iterations · ratio < rows · columns, with half of the right
            side if 16-bit gradients have 32-bit factors. 0 compresses every matrix. With a ratio of 1 or
            more, a bucket that would not shrink at all is sent uncompressed, in its own dtype.
        warmup_steps: Steps at the start that average uncompressed gradients.
        error_feedback: Add to each gradient what earlier steps did not transmit. Without it
            the result is biased and training usually stalls.
        warm_start: Start each step's power iteration from the last step's right factor.
        seed: The seed of the random factors, the same on every process.
        wire_dtype: "fp16" or "bf16" to send every message in 16 bits; None for fp32 (fp64 for
            fp64 gradients). "bf16" has fp32's range. "fp16" is for gradients that a loss scale keeps in its
            range: factors are clamped to 65 504, and below 6e-8 become zero (the residual keeps both, and
            a process's rounding of its own factors); uncompressed gradients overflow as with `Cast`. Lost
            for good are the rounding of the factors' sum and all rounding of uncompressed gradients.
        power_iterations: How often the two rounds are repeated in a step. With `alternating`, how
            many single rounds a step takes; their results add up.
        matrix_ranks: Matrix ranks by parameter name, for parameters that differ from `matrix_rank`.
        alternating: One round instead of two: project on the left factor in one step, on the right in
            the next. Half the bytes and messages at the same matrix rank, and a rougher approximation.

    Cost per step: two rounds, the second for all buckets together, of r · (rows + columns) elements for
    each matrix; an fp32 residual of the size of the gradients (fp64 for fp64) and, for 16-bit gradients, an
    fp32 copy until the step's end; one host synchronisation, for the finite check (none without
    `host_check`).

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    Examples:
        >>> import torch
        >>> print(PowerSGD(matrix_rank=2).plan([ParameterSpec("weight", (64, 32), (32, 1), torch.float32)]))
        parameter     travels as  bytes before  bytes after
        weight     64×32, rank 2         8,192          768
        total                            8,192          768
        compression ratio 10.7 (of each process), 2 rounds a step
    """

    split_granularity = "parameter"

    matrix_rank: int = 4
    alternating: bool = False
    matrix_ranks: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    @property
    def factor_pairs(self) -> float:
        return self.power_iterations / 2 if self.alternating else self.power_iterations

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alternating", true_or_false("alternating", self.alternating))
        try:
            ranks = dict(self.matrix_ranks)
        except (TypeError, ValueError) as error:
            got = f"got {self.matrix_ranks!r}"
            raise ConfigError(f"matrix_ranks must map names to matrix ranks, {got}") from error
        # Sorted: settings are compared as text, and may be given in any order.
        checked = [(str(n), whole_number(f"the matrix rank of {n}", r, minimum=1)) for n, r in ranks.items()]
        object.__setattr__(self, "matrix_ranks", tuple(sorted(checked)))

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        uncompressed = self.uncompressed_routes(specs)
        routes = tuple(map(self._route, specs))
        compresses = any(route.is_compressed for route in routes)
        # If a bucket has factors, all of it is sent in their dtype: its other 16-bit gradients grow to 32.
        before = sum(route.message_bytes for route in uncompressed)
        shrinks = sum(route.message_bytes for route in routes) * min(1.0, self.min_compression_ratio) < before
        chosen = routes if compresses and shrinks else uncompressed
        return PowerSGDPlan(tuple(specs), chosen, self)

    def _route(self, spec: ParameterSpec) -> LowRankRoute:
        shape = spec.matrix_shape
        wanted = dict(self.matrix_ranks).get(spec.name)
        matrix_rank = self.matrix_rank_of(shape, spec.dtype, wanted) if shape else None
        if shape is None or matrix_rank is None:
            return self.uncompressed_route(spec, self.message_dtype(spec.dtype))
        return self.compressed_route([spec], shape, matrix_rank)

    def check_model(self, specs: Sequence[ParameterSpec]) -> None:
        super().check_model(specs)
        unknown = sorted(dict(self.matrix_ranks).keys() - {spec.name for spec in specs})
        if specs and unknown:
            raise ConfigError(f"matrix_ranks has {unknown[0]!r}, which is not a parameter of the model")
