"""PowerSGD, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from thinwire.algorithms.alternating import alternate
from thinwire.algorithms.base import Bucket, Memory, Rounds
from thinwire.algorithms.exact import forget, with_owed
from thinwire.algorithms.lowrank import LowRank
from thinwire.algorithms.matrices import MatrixGroup, Terms, remember, round_into, settle
from thinwire.algorithms.rounds import approximate
from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec, Plan, Route

__all__ = ["PowerSGD"]


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Send two low-rank factors of every gradient matrix instead of the matrix.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2,
    with one change: a process's error is what remains of its own gradient, M − P̂ P̂ᵀ M, not of the mean.

    Gradients of any floating type: factors are computed, and the error kept, in fp32. Vectors,
    scalars and matrices that would shrink too little ride along whole in the first message.

    Args:
        matrix_rank: Rank r of the factors; more is more exact and costs proportionally more bytes.
        min_compression_ratio: A matrix is compressed only if that shrinks it more than this:
            (rows + columns) · r · power_iterations · ratio < rows · columns.
        warmup_steps: Steps at the start that average whole gradients.
        error_feedback: Add to each gradient what earlier steps did not transmit of it. Without it
            the result is biased and training usually stalls.
        warm_start: Start each step's power iteration from the last step's right factor.
        seed: Of the random factors, the same on every process.
        wire_dtype: "fp16" or "bf16" to send every message in 16 bits; None for fp32 (fp64 for what
            rides along of fp64 gradients).
        power_iterations: How often the two rounds are repeated in a step. With `alternating`, how
            many single rounds a step takes; their results add up.
        alternating: One round instead of two: project on the left factor in one step, on the right in
            the next. Half the bytes and messages at the same matrix rank, and a rougher approximation.

    Cost a step: two rounds, the second of all buckets together, of r · (rows + columns) elements a
    matrix; an fp32 error of the size of the gradients; one host synchronisation, for the finite check.

    Raises:
        ConfigError: A setting is of the wrong type or out of range.

    >>> print(PowerSGD(matrix_rank=2).plan([ParameterSpec("weight", (64, 32), (32, 1), torch.float32)]))
    parameter  matrix shape  matrix rank  bytes before  bytes after
    weight            64×32            2         8,192          768
    total                                        8,192          768
    compression ratio 10.7
    """

    matrix_rank: int = 4
    alternating: bool = False

    @property
    def factor_pairs(self) -> float:
        """How many left and right factors of a matrix a step sends, on average."""
        return self.power_iterations / 2 if self.alternating else self.power_iterations

    def factor_bytes(self, shape: tuple[int, int], matrix_rank: int, dtype: torch.dtype) -> int:
        """Bytes of a step's factors of one (rows, columns) matrix; alternating, the mean of two steps."""
        if not self.alternating:
            return super().factor_bytes(shape, matrix_rank, dtype)
        return matrix_rank * sum(shape) * self.message_dtype(dtype).itemsize * self.power_iterations // 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.alternating, bool):
            raise ConfigError(f"alternating must be True or False, got {self.alternating!r}")

    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """How each parameter travels once past the warm-up."""
        return Plan(tuple(self._route(spec) for spec in specs))

    def _route(self, spec: ParameterSpec) -> Route:
        shape = spec.matrix_shape
        matrix_rank = self.rank_of(*shape) if shape and spec.dtype.is_floating_point else None
        if shape is None or matrix_rank is None:
            return self.whole_route(spec)
        sent = self.factor_bytes(shape, matrix_rank, spec.dtype)
        return Route((spec.name,), spec.gradient_bytes, sent, shape, matrix_rank)

    def exchange(self, bucket: Bucket, memory: Memory) -> Rounds:
        """One or two rounds an iteration; one in the warm-up, and where there is nothing to compress."""
        layout = _layout(self, bucket.specs)
        if memory.step < self.warmup_steps or not layout.families:
            yield from self.exchange_uncompressed(bucket, memory)
            return
        gradients = bucket.gradients()
        groups = [self._group(bucket, gradients, memory, family) for family in layout.families]
        whole = with_owed(bucket, memory, layout.whole)
        rounds = alternate if self.alternating else approximate
        terms, whole_means = yield from rounds(self, groups, whole, memory, bucket)
        yield None
        for family, group, found in zip(layout.families, groups, terms, strict=True):
            by_matrix = zip(*[factors.each() for factors in found], strict=True)
            for index, matrix, of_one in zip(family.indices, group.matrices, by_matrix, strict=True):
                name = bucket.specs[index].name
                self._commit(name, gradients[index], matrix, of_one, memory, bucket.loss_scale)
        forget(memory, [bucket.specs[index].name for index in layout.whole])
        for index, mean in zip(layout.whole, whole_means, strict=True):
            gradients[index].copy_(mean)

    def _group(
        self, bucket: Bucket, gradients: Sequence[torch.Tensor], memory: Memory, family: _Family
    ) -> MatrixGroup:
        """Gradients and errors as matrices: views where the gradient is fp32."""
        names = [bucket.specs[index].name for index in family.indices]
        errors = [memory.error.get(name) for name in names]
        return MatrixGroup(
            names,
            matrices=[gradients[index].float().view(family.shape) for index in family.indices],
            errors=[None if error is None else error.view(family.shape) for error in errors],
            matrix_rank=family.matrix_rank,
        )

    def _commit(
        self,
        name: str,
        gradient: torch.Tensor,
        matrix: torch.Tensor,
        terms: Terms,
        memory: Memory,
        loss_scale: torch.Tensor | None,
    ) -> None:
        """Write one mean gradient, and what is remembered of it."""
        error = None
        if self.error_feedback:
            if name not in memory.error:
                memory.error[name] = torch.empty_like(gradient, dtype=torch.float32)
            error = memory.error[name]
        else:
            forget(memory, [name])
        settle(matrix, None if error is None else error.view_as(matrix), terms, loss_scale)
        if gradient.dtype != torch.float32:
            round_into(gradient, matrix.view(-1), error, loss_scale)
        remember(self, memory, name, terms, loss_scale)


class _Family(NamedTuple):
    """Parameters of a bucket with the same matrix shape and rank, by index."""

    shape: tuple[int, int]
    matrix_rank: int
    indices: tuple[int, ...]


class _Layout(NamedTuple):
    """Which parameters of a bucket are compressed together, and which travel whole."""

    families: tuple[_Family, ...]
    whole: tuple[int, ...]


@lru_cache(maxsize=1024)
def _layout(algorithm: PowerSGD, specs: tuple[ParameterSpec, ...]) -> _Layout:
    """Group a bucket's parameters; made once a bucket layout."""
    families: dict[tuple[tuple[int, int], int], list[int]] = defaultdict(list)
    whole = []
    for index, route in enumerate(algorithm.plan(specs).routes):
        if route.matrix_shape is None or route.matrix_rank is None:
            whole.append(index)
        else:
            families[route.matrix_shape, route.matrix_rank].append(index)
    return _Layout(tuple(_Family(*key, tuple(indices)) for key, indices in families.items()), tuple(whole))
