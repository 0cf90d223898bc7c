"""PowerSGD, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from thinwire.algorithms.base import Bucket, BucketPlan, Granularity, Memory
from thinwire.algorithms.error_feedback import ERROR, keep_remainder, with_residual
from thinwire.algorithms.lowrank.config import LowRank, LowRankRoute
from thinwire.algorithms.lowrank.factors import FactorMessages, Round
from thinwire.algorithms.lowrank.plan import LowRankPlan, by_label
from thinwire.algorithms.lowrank.slots import SENT
from thinwire.algorithms.requests import AllFinite, Commit, Jointly, Requests
from thinwire.checks import true_or_false, whole_number
from thinwire.errors import ConfigError
from thinwire.kernels.dispatch import (
    kernels_for,
    orthonormal_bases,
    products,
    projections,
    reconstruct,
    subtract_own,
)
from thinwire.kernels.matrices import (
    Factors,
    MatmulBatch,
    MatrixGroup,
    Reconstruction,
    Rows,
    Subtraction,
    Terms,
    Write,
    round_all_into,
    widened,
)
from thinwire.plan import ParameterSpec
from thinwire.tensors import accelerators
from thinwire.tensors.layout import stack_view


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Send two low-rank factors of every gradient matrix instead of the matrix.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2,
    with one change: a process's error is what remains of its gradient, M − P̂ P̂ᵀ M, not of the mean.

    Gradients of any floating type: factors are computed, and the error kept, in fp32 (of fp64 gradients
    in fp64, by PyTorch's products). Vectors, scalars and matrices that would shrink too little travel
    uncompressed in the first message.

    Args:
        matrix_rank: Rank r of the factors; more is more exact and costs proportionally more bytes.
        min_compression_ratio: A matrix is compressed only if that shrinks it more than this, in bytes:
            (rows + columns) · r · power_iterations · ratio < rows · columns, with half of the right side
            where gradients of 16 bits have factors of 32. With 0 every matrix is. A bucket that would not
            shrink at all (with a ratio of 1 or more) travels uncompressed, in its own type.
        warmup_steps: Steps at the start that average uncompressed gradients.
        error_feedback: Add to each gradient what earlier steps did not transmit of it. Without it
            the result is biased and training usually stalls.
        warm_start: Start each step's power iteration from the last step's right factor.
        seed: Of the random factors, the same on every process.
        wire_dtype: "fp16" or "bf16" to send every message in 16 bits; None for fp32 (fp64 of
            fp64 gradients). "bf16" has fp32's range. "fp16" is for gradients that a loss
            scale keeps in its range: of factors, what is above 65 504 is cut off and what is below
            6e-8 vanishes (both stay in the residual, as does what a process rounds off its own factors);
            uncompressed gradients overflow as with `Cast`. Lost for good are the rounding of the factors' sum
            and all rounding of uncompressed gradients.
        power_iterations: How often the two rounds are repeated in a step. With `alternating`, how
            many single rounds a step takes; their results add up.
        matrix_ranks: Of single parameters, by name, if it differs from `matrix_rank`.
        alternating: One round instead of two: project on the left factor in one step, on the right in
            the next. Half the bytes and messages at the same matrix rank, and a rougher approximation.

    Cost per step: two rounds, the second of all buckets together, of r · (rows + columns) elements for
    each matrix; an fp32 error of the size of the gradients (fp64 of fp64) and, of gradients in 16 bits, an
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

    matrix_rank: int = 4
    alternating: bool = False
    matrix_ranks: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    @property
    def factor_pairs(self) -> float:
        """Left and right factors of a matrix that a step sends, on average."""
        return self.power_iterations / 2 if self.alternating else self.power_iterations

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alternating", true_or_false("alternating", self.alternating))
        try:
            ranks = dict(self.matrix_ranks)
        except (TypeError, ValueError) as error:
            got = f"got {self.matrix_ranks!r}"
            raise ConfigError(f"matrix_ranks must map names to matrix ranks, {got}") from error
        # Sorted: settings are compared as text, and may have been given in any order.
        checked = [(str(n), whole_number(f"the matrix rank of {n}", r, minimum=1)) for n, r in ranks.items()]
        object.__setattr__(self, "matrix_ranks", tuple(sorted(checked)))

    @property
    def split_granularity(self) -> Granularity:
        """Name the parameter, which is one matrix."""
        return "parameter"

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        """Every matrix that shrinks enough is compressed.

        Nothing is, if the bucket as a whole does not shrink.
        """
        uncompressed = tuple(
            self.uncompressed_route(spec, self.uncompressed_dtype(spec.dtype)) for spec in specs
        )
        routes = tuple(map(self._route, specs))
        compresses = any(route.is_compressed for route in routes)
        # Beside factors all of a bucket travels in their type: gradients of 16 bits grow to 32 by that.
        before = sum(route.message_bytes for route in uncompressed)
        shrinks = sum(route.message_bytes for route in routes) * min(1.0, self.min_compression_ratio) < before
        chosen = routes if compresses and shrinks else uncompressed
        return PowerSGDPlan(tuple(specs), chosen, self, self.alternating)

    def _route(self, spec: ParameterSpec) -> LowRankRoute:
        shape = spec.matrix_shape
        wanted = dict(self.matrix_ranks).get(spec.name)
        matrix_rank = self.matrix_rank_of(shape, spec.dtype, wanted) if shape else None
        if shape is None or matrix_rank is None:
            return self.uncompressed_route(spec, self.message_dtype(spec.dtype))
        return self.compressed_route([spec], shape, matrix_rank)

    def check_model(self, specs: Sequence[ParameterSpec]) -> None:
        """As `Algorithm.check_model`; refuse matrix ranks of unknown parameters."""
        super().check_model(specs)
        unknown = sorted(dict(self.matrix_ranks).keys() - {spec.name for spec in specs})
        if specs and unknown:
            raise ConfigError(f"matrix_ranks has {unknown[0]!r}, which is no parameter of the model")


@dataclass(frozen=True)
class PowerSGDPlan(LowRankPlan):
    """Every matrix of a bucket as two factors; `alternating` projects on one side only, in one round."""

    alternating: bool = False

    @cached_property
    def shape_groups(self) -> dict[tuple[tuple[int, int], int], list[int]]:
        """The parameters that are compressed, by index, under their matrix shape and matrix rank."""
        groups: dict[tuple[tuple[int, int], int], list[int]] = {}
        for index, route in enumerate(self.routes):
            if route.matrix_shape is not None and route.matrix_rank is not None:
                groups.setdefault((route.matrix_shape, route.matrix_rank), []).append(index)
        return groups

    @cached_property
    def uncompressed(self) -> tuple[int, ...]:
        """The parameters that travel uncompressed, by index."""
        return tuple(index for index, route in enumerate(self.routes) if not route.is_compressed)

    def _turn(self, memory: Memory) -> int:
        """Return how many projections were committed."""
        # The count of committed steps decides, which all members have and a saved state keeps: the factor in
        # memory is of the side whose turn it is.
        return (memory.step - self.config.warmup_steps) * self.config.power_iterations

    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        """One or two rounds for each iteration."""
        dtype = self.config.message_dtype(bucket.flat.dtype)
        names = [bucket.specs[index].name for index in self.uncompressed]
        sent = with_residual(bucket, memory, self.uncompressed, dtype)
        messages = FactorMessages(dtype, sent.parts)
        groups = self._matrices(bucket, memory)  # M: gradient, and residual until a kernel adds it
        labels = [group.labels for group in groups]

        turn = self._turn(memory)
        starts = self.bases.of(memory, groups, left=self.alternating and turn % 2 == 0)
        if self.alternating:
            terms = yield from self._alternating_rounds(groups, starts, turn, messages, bucket.loss_scale)
        else:
            terms = yield from self._two_rounds(groups, starts, messages, bucket.loss_scale)
        kept = yield from self.to_remember(memory, labels, terms, bucket)

        # Only the host can take back what is dropped: then the engine copies memory, and puts it back.
        drops = any(name in memory[slot] for name in names for slot in (ERROR, SENT))
        is_healthy = yield Commit(AllFinite(tuple(messages.received)), commits_on_device=not drops)

        targets = [bucket.gradients[index] for index in self.uncompressed]
        means = messages.uncompressed  # then, if some residual may not fit, whether any remains
        writes = [Write(*pair, None, is_healthy) for pair in zip(targets, means, strict=False)]
        yield from self.remember(memory, kept, by_label(labels, starts), is_healthy, writes)
        yield from self._reconstruct(bucket, memory, groups, terms, is_healthy)
        keep_remainder(memory, names, sent, means)
        # All of it was sent: what a step before has sent no longer says how much was not.
        for name in names:
            memory[SENT].pop(name, None)

    def _two_rounds(
        self,
        groups: Sequence[MatrixGroup],
        rights: list[torch.Tensor],
        messages: FactorMessages,
        scale: torch.Tensor | None,
    ) -> Round[list[list[Factors]]]:
        """Find the factors of the mean: P = M Q, then Q = Mᵀ P̂. Cost: in each iteration, two reads of M."""
        for iteration in range(1, self.config.power_iterations + 1):
            # The residual only once: later iterations find it in the matrices already.
            lefts = yield Jointly(products, _asked(groups, rights, scale, add_error=iteration == 1))
            _, means = yield from messages.average(lefts, as_sent=False)
            lefts = yield Jointly(orthonormal_bases, [Rows(mean) for mean in means])
            own = yield Jointly(projections, _asked(groups, lefts, scale, add_error=False))
            is_last = iteration == self.config.power_iterations
            own, means = yield from messages.average(own, as_sent=is_last)
            if not is_last:
                rights = yield Jointly(orthonormal_bases, [Rows(mean) for mean in means])
        # The last iteration alone: each approximates all of M again, and better than those before it.
        return [[Factors(*of_group)] for of_group in zip(lefts, own, means, strict=True)]

    def _alternating_rounds(
        self,
        groups: Sequence[MatrixGroup],
        bases: list[torch.Tensor],
        turn: int,
        messages: FactorMessages,
        scale: torch.Tensor | None,
    ) -> Round[list[list[Factors]]]:
        """Find factors of the mean, of one side in each iteration; what it has sent is taken from M."""
        terms: list[list[Factors]] = [[] for _ in groups]
        for iteration in range(self.config.power_iterations):
            is_left = (turn + iteration) % 2 == 0
            asked = _asked(groups, bases, scale, add_error=iteration == 0)
            own = yield Jointly(projections if is_left else products, asked)
            own, means = yield from messages.average(own, as_sent=True)
            for of_group, basis, projection, mean in zip(terms, bases, own, means, strict=True):
                of_group.append(Factors(basis, projection, mean, is_left))
            # `reconstruct` writes to the residual what the last iteration has not sent, in one pass.
            if iteration + 1 < self.config.power_iterations:
                subtract_own([Subtraction(g, found[-1]) for g, found in zip(groups, terms, strict=True)])
                bases = yield Jointly(orthonormal_bases, [Rows(mean) for mean in means])
        return terms

    def _matrices(self, bucket: Bucket, memory: Memory) -> list[MatrixGroup]:
        """Return gradients and residuals as matrices: views, or copies in fp32 if kernels need them."""
        # Between iterations what was sent is taken from the matrices, which 16 bits would round.
        subtracts = self.alternating and self.config.power_iterations > 1
        groups = []
        for (shape, matrix_rank), indices in self.shape_groups.items():
            names = [bucket.specs[index].name for index in indices]
            matrices = [bucket.gradients[index] for index in indices]
            if subtracts or bucket.flat.dtype not in kernels_for(matrices[0], matrix_rank).gradient_types:
                matrices = widened(matrices, bucket.specs[0].memory_dtype)
            errors = [memory[ERROR].get(name) for name in names]
            shaped = [None if error is None else error.view(shape) for error in errors]
            groups.append(
                MatrixGroup(names, [matrix.view(shape) for matrix in matrices], shaped, matrix_rank)
            )
        return groups

    def _reconstruct(
        self,
        bucket: Bucket,
        memory: Memory,
        groups: Sequence[MatrixGroup],
        terms: Sequence[Terms],
        is_healthy: torch.Tensor | None,
    ) -> Round[None]:
        """Make compressed gradients their mean; remember what this process has not sent."""
        items, errors = [], dict[str, torch.Tensor]()
        for group, found in zip(groups, terms, strict=True):
            rooms = (
                _residual_buffers(group, bucket.specs[0].memory_dtype) if self.config.error_feedback else None
            )
            items.append(Reconstruction(group, rooms, found, bucket.loss_scale, is_healthy))
            errors.update(zip(group.labels, (room.view(-1) for room in rooms or ()), strict=False))
        yield Jointly(reconstruct, items)
        # Rounding errors of wide copies go to the residual too.
        gradients = {spec.name: flat for spec, flat in zip(bucket.specs, bucket.gradients, strict=True)}
        copied = [
            (gradients[name], matrix.view(-1), errors.get(name))
            for group in groups
            for name, matrix in zip(group.labels, group.matrices, strict=True)
            if matrix.dtype != bucket.flat.dtype
        ]
        round_all_into(copied, bucket.loss_scale, is_healthy)
        memory[ERROR].update(errors)


def _residual_buffers(group: MatrixGroup, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Return a group's residuals to write to: the tensors it has, or new ones with the same contents."""
    known = [error for error in group.errors if error is not None]
    is_whole = len(known) == len(group.errors)
    # On accelerators, as a batch.
    if is_whole and (not accelerators.is_accelerator(known[0].device) or stack_view(known) is not None):
        return known
    first, count = group.matrices[0], len(group.matrices)
    rooms = first.new_zeros(count, *first.shape, dtype=dtype).unbind()
    for room, error in zip(rooms, group.errors, strict=True):
        if error is not None:
            room.copy_(error)
    return rooms


def _asked(
    groups: Sequence[MatrixGroup],
    factors: Sequence[torch.Tensor],
    loss_scale: torch.Tensor | None,
    *,
    add_error: bool,
) -> list[MatmulBatch]:
    return [MatmulBatch(*pair, loss_scale, add_error) for pair in zip(groups, factors, strict=True)]
