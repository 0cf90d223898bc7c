"""PowerSGD, layer by layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import is_

import torch

from thinwire.algorithms.base import Bucket, BucketPlan, Granularity, Memory
from thinwire.algorithms.error_feedback import ERROR, keep_remainder, with_residual
from thinwire.algorithms.lowrank.config import LowRank, LowRankRoute
from thinwire.algorithms.lowrank.factors import BucketMatrices, FactorMessages, Round
from thinwire.algorithms.lowrank.plan import LowRankPlan
from thinwire.algorithms.lowrank.slots import SENT
from thinwire.algorithms.requests import AllFinite, Commit, Jointly, Requests
from thinwire.checks import true_or_false, whole_number
from thinwire.errors import ConfigError
from thinwire.kernels.dispatch import choice, kernels_for
from thinwire.kernels.matrices import (
    Factors,
    MatmulBatch,
    MatrixGroup,
    Reconstruction,
    Rows,
    Subtraction,
    Terms,
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
    _kept: dict[str, BoundMatrices] = field(default_factory=dict, compare=False, repr=False)

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

    @cached_property
    def _uncompressed_names(self) -> list[str]:
        return [self.specs[index].name for index in self.uncompressed]

    @cached_property
    def _compressed_names(self) -> list[str]:
        return [self.specs[index].name for indices in self.shape_groups.values() for index in indices]

    def _turn(self, memory: Memory) -> int:
        """Return how many projections were committed."""
        # The count of committed steps decides, which all members have and a saved state keeps: the factor in
        # memory is of the side whose turn it is.
        return (memory.step - self.config.warmup_steps) * self.config.power_iterations

    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        """Average the bucket as two factors of each matrix: algorithm 1 of the paper, with error feedback.

        1. M ← gradient + residual. The first product adds them, in place.
        2. P ← M Q, with the Q that the step before has left, orthonormalised.
        3. P ← mean of P. Uncompressed gradients travel with it.
        4. P̂ ← orthonormal basis of P.
        5. Q ← Mᵀ P̂, this process's own.
        6. Q̄ ← mean of Q.
        7. Behind the commit: gradient ← P̂ Q̄ᵀ, residual ← M − P̂ Qᵀ, and memory keeps Q̄.

        Further `power_iterations` repeat 2 to 6 with Q ← basis of Q̄. If `alternating`, a step has one round
        in place of two: Q ← Mᵀ P̂ with the P̂ that memory has, and in the next step P ← M Q̂.
        """
        names, scale = self._uncompressed_names, bucket.loss_scale
        gradients = bucket.flat.split_with_sizes(self.sizes)
        whole = [gradients[index] for index in self.uncompressed]
        M = self._bind(bucket.flat, gradients, memory)
        try:
            has_residual = not memory[ERROR].keys().isdisjoint(names)
            sent = with_residual(bucket, memory, names, whole, self.message_dtype) if has_residual else None
            messages = FactorMessages(self.message_dtype, self.rooms, whole if sent is None else sent.parts)

            turn = self._turn(memory)
            starts = self.bases.of(memory, M, left=self.alternating and turn % 2 == 0)
            if self.alternating:
                terms = yield from self._alternating_rounds(M, starts, turn, messages, scale)
            else:
                terms = yield from self._two_rounds(M, starts, messages, scale)
            kept = yield from self.to_remember(memory, M, terms, scale)

            # Only the host can take back what is dropped: then the engine copies memory, and puts it back.
            drops = has_residual or not memory[SENT].keys().isdisjoint(names)
            is_healthy = yield Commit(AllFinite(tuple(messages.received)), commits_on_device=not drops)

            yield from self._reconstruct(bucket, gradients, memory, M, terms, is_healthy)
        finally:
            for group in M.groups:
                group.matrices = ()  # they would keep a bucket that is not used any more
        means = messages.uncompressed  # then, if some residual may not fit, whether any remains
        # Behind the reconstruction, which reads the basis that the step has started from.
        yield from self.remember(memory, kept, M, starts, is_healthy, whole, means[: len(whole)])
        if sent is not None:
            keep_remainder(memory, names, sent, means)
        # All of it was sent: what a step before has sent no longer says how much was not.
        sent_before = memory[SENT]
        for name in names if drops else ():
            sent_before.pop(name, None)

    def _two_rounds(
        self,
        M: BucketMatrices,
        Q: list[torch.Tensor],
        messages: FactorMessages,
        scale: torch.Tensor | None,
    ) -> Round[list[list[Factors]]]:
        """Find the factors of the mean. Cost: in each iteration, two reads of M.

        Factors are held row by row: P and Q are Pᵀ and Qᵀ here.
        """
        kernels = M.kernels
        for iteration in range(1, self.config.power_iterations + 1):
            is_last = iteration == self.config.power_iterations
            # P ← M Q. The residual only once: later iterations find it in the matrices already.
            items = self._products(M, Q, scale, "P", add_error=iteration == 1)
            P = yield Jointly(kernels.products, items, M.device)
            _, P = yield from messages.average(P, as_sent=False)  # P ← mean of P
            P = yield Jointly(kernels.orthonormal_rows, self._rows(M, P, "basis of P"), M.device)
            # Q ← Mᵀ P̂
            items = self._products(M, P, scale, "Q", add_error=False)
            Q = yield Jointly(kernels.projections, items, M.device)
            Q, mean = yield from messages.average(Q, as_sent=is_last)  # mean of Q
            if not is_last:
                Q = yield Jointly(kernels.orthonormal_rows, self._rows(M, mean, "basis of Q"), M.device)
        # The last iteration alone: each approximates all of M again, and better than those before it.
        terms = list[list[Factors]]()
        for basis, own, of_all in zip(P, Q, mean, strict=True):
            terms.append([Factors((basis, own), (basis, of_all))])
        return terms

    def _alternating_rounds(
        self,
        M: BucketMatrices,
        bases: list[torch.Tensor],
        turn: int,
        messages: FactorMessages,
        scale: torch.Tensor | None,
    ) -> Round[list[list[Factors]]]:
        """Find factors of the mean, of one side in each iteration; what it has sent is taken from M."""
        kernels = M.kernels
        terms: list[list[Factors]] = [[] for _ in M.groups]
        for iteration in range(self.config.power_iterations):
            is_left = (turn + iteration) % 2 == 0
            # Q ← Mᵀ P̂, or P ← M Q̂.
            role = f"{'Q' if is_left else 'P'} {iteration}"
            multiply = kernels.projections if is_left else kernels.products
            items = self._products(M, bases, scale, role, add_error=iteration == 0)
            own = yield Jointly(multiply, items, M.device)
            own, means = yield from messages.average(own, as_sent=True)
            for of_group, basis, projection, mean in zip(terms, bases, own, means, strict=True):
                if is_left:
                    of_group.append(Factors((basis, projection), (basis, mean)))
                else:
                    of_group.append(Factors((projection, basis), (mean, basis), projection=0))
            # `reconstruct` writes to the residual what the last iteration has not sent, in one pass.
            if iteration + 1 < self.config.power_iterations:
                latest = [of_group[-1] for of_group in terms]
                kernels.subtract_own(list(map(Subtraction, M.groups, latest)))
                rows = self._rows(M, means, f"basis of {role}")
                bases = yield Jointly(kernels.orthonormal_rows, rows, M.device)
        return terms

    def _products(
        self,
        M: BucketMatrices,
        factors: Sequence[torch.Tensor],
        scale: torch.Tensor | None,
        role: str,
        *,
        add_error: bool,
    ) -> list[MatmulBatch]:
        side = 0 if role[0] == "P" else 1
        items = []
        for group, factor in zip(M.groups, factors, strict=True):
            shape = *factor.shape[:2], group.matrices[0].shape[side]
            room = self.rooms.room((role, group.labels[0]), shape, factor)
            items.append(MatmulBatch(group, factor, scale, add_error, room))
        return items

    def _rows(self, M: BucketMatrices, factors: Sequence[torch.Tensor], role: str) -> list[Rows]:
        items = []
        for group, factor in zip(M.groups, factors, strict=True):
            room = self.rooms.room((role, group.labels[0]), factor.shape, factor)
            items.append(Rows(factor, None, room))
        return items

    def _bind(self, flat: torch.Tensor, gradients: Sequence[torch.Tensor], memory: Memory) -> BoundMatrices:
        """Return gradients and residuals as matrices, bound anew only if something has moved."""
        errors = list(map(memory[ERROR].get, self._compressed_names))
        key = flat.data_ptr(), flat.dtype, choice()
        M = self._kept.get("bound")
        if M is None or M.key != key or not all(map(is_, errors, M.errors)):
            M = self._kept["bound"] = self._new_binding(flat, key, errors)
        for group, (shape, _), indices in zip(
            M.groups, self.shape_groups, self.shape_groups.values(), strict=True
        ):
            matrices = list(map(gradients.__getitem__, indices))
            if M.wide is not None:
                matrices = widened(matrices, M.wide)
            group.matrices = [matrix.view(shape) for matrix in matrices]
        if M.wide is not None:
            del self._kept["bound"]  # copies lie elsewhere in each step
        return M

    def _new_binding(
        self, flat: torch.Tensor, key: Hashable, errors: Sequence[torch.Tensor | None]
    ) -> BoundMatrices:
        kernels = kernels_for(flat, max(matrix_rank for _, matrix_rank in self.shape_groups))
        # Between iterations what was sent is taken from the matrices, which 16 bits would round.
        subtracts = self.alternating and self.config.power_iterations > 1
        widens = subtracts or flat.dtype not in kernels.gradient_types
        is_accelerator = accelerators.is_accelerator(flat.device)
        groups, written = list[MatrixGroup](), list[Sequence[torch.Tensor] | None]()
        remaining = iter(errors)
        for (shape, matrix_rank), indices in self.shape_groups.items():
            of_group = islice(remaining, len(indices))
            shaped = [None if error is None else error.view(shape) for error in of_group]
            known = [error for error in shaped if error is not None]
            # Written where they lie, on accelerators as a batch; else `reconstruct` gets new ones.
            is_whole = len(known) == len(shaped) and not (is_accelerator and stack_view(known) is None)
            written.append(known if is_whole else None)
            names = [self.specs[index].name for index in indices]
            groups.append(MatrixGroup(names, (), known if is_whole else shaped, matrix_rank))
        wide = self.memory_dtype if widens and flat.dtype != self.memory_dtype else None
        return BoundMatrices(groups, kernels, flat.device, key, errors, written, wide)

    def _reconstruct(
        self,
        bucket: Bucket,
        gradients: Sequence[torch.Tensor],
        memory: Memory,
        M: BoundMatrices,
        terms: Sequence[Terms],
        is_healthy: torch.Tensor | None,
    ) -> Round[None]:
        """Make compressed gradients their mean; remember what this process has not sent."""
        items, remains = list[Reconstruction](), memory[ERROR]
        for group, of_group, written in zip(M.groups, terms, M.written, strict=True):
            errors = written
            if written is None and self.config.error_feedback:
                errors = _copied_residuals(group, self.memory_dtype)
            items.append(Reconstruction(group, errors, of_group, bucket.loss_scale, is_healthy))
        yield Jointly(M.kernels.reconstruct, items, M.device)
        for group, errors, *_ in items:
            if errors is not None and errors is not group.errors:
                remains.update(zip(group.labels, [error.view(-1) for error in errors], strict=True))
        if M.wide is None:
            return
        # Rounding errors of wide copies go to the residual too.
        copied = [
            (gradients[index], matrix.view(-1), None if errors is None else remains[name])
            for (group, errors, *_), indices in zip(items, self.shape_groups.values(), strict=True)
            for index, name, matrix in zip(indices, group.labels, group.matrices, strict=True)
        ]
        round_all_into(copied, bucket.loss_scale, is_healthy)


@dataclass(eq=False)
class BoundMatrices(BucketMatrices):
    """They are bound as long as all lies where it lay."""

    key: Hashable  # where the bucket lies, and what chooses the kernels
    errors: Sequence[torch.Tensor | None]  # residuals, flat
    written: Sequence[Sequence[torch.Tensor] | None]  # of each group, if all can be written where they lie
    wide: torch.dtype | None  # the type to which matrices are copied, if the kernels don't take theirs


def _copied_residuals(group: MatrixGroup, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Return new residuals of a group to write to, with the same contents."""
    first, count = group.matrices[0], len(group.matrices)
    buffers = first.new_zeros(count, *first.shape, dtype=dtype).unbind()
    for buffer, error in zip(buffers, group.errors, strict=True):
        if error is not None:
            buffer.copy_(error)
    return buffers
