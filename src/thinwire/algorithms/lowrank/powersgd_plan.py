"""What PowerSGD does with a bucket: its matrices in groups of one shape, as two factors each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from thinwire.algorithms.base import Bucket, Memory
from thinwire.algorithms.error_feedback import ERROR, compensated, keep_remainder
from thinwire.algorithms.lowrank.bases import StartingBases
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.factor_messages import average_factors
from thinwire.algorithms.lowrank.plan import LowRankPlan
from thinwire.algorithms.lowrank.residual_layout import Wanted, all_laid
from thinwire.algorithms.lowrank.slots import SENT
from thinwire.algorithms.requests import AllFinite, Commit, Jointly, Message, Request, Requests
from thinwire.kernels.dispatch import (
    kernels_for,
    orthonormal_rows,
    products,
    projections,
    reconstruct,
    subtract_own,
)
from thinwire.kernels.matrices import (
    Asked,
    Factors,
    MatrixGroup,
    Reconstruction,
    Terms,
    Write,
    round_all_into,
    widened,
)
from thinwire.kernels.residuals import Rooms
from thinwire.tensors import accelerators


@dataclass(frozen=True)
class Approximation:
    """What the rounds of a step make known.

    Attributes:
        terms: The factors of each group.
        uncompressed: The means of the flat gradients that travelled with them.
        received: What must be finite: all means, flat.
        starts: The bases that the step started from, of each group.
    """

    terms: Sequence[Terms]
    uncompressed: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor]
    starts: Sequence[torch.Tensor]


def approximate(
    config: LowRank,
    bases: StartingBases,
    groups: Sequence[MatrixGroup],
    uncompressed: Sequence[torch.Tensor],
    memory: Memory,
    bucket: Bucket,
) -> Generator[Request | tuple[Message, ...], Any, Approximation]:
    """Add its residual to every matrix, in place, and find the factors of the mean.

    Cost: two rounds for each power iteration; in each iteration, every matrix is read twice (and once
    written).
    """
    starts = rights = bases.of(memory, groups, left=False)
    dtype, scale = config.message_dtype(bucket.flat.dtype), bucket.loss_scale
    received: list[torch.Tensor] = []
    uncompressed_mean: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        is_first, is_last = iteration == 0, iteration + 1 == config.power_iterations
        # The residual only once: later iterations find it in the matrices already.
        asked = [Asked(*each, scale, is_first) for each in zip(groups, rights, strict=True)]
        lefts = yield Jointly(products, asked)
        beside = uncompressed if is_first else ()
        arrived = yield from average_factors(lefts, dtype, beside, as_sent=False)
        received.append(arrived.received)
        if is_first:
            uncompressed_mean = arrived.uncompressed
        lefts = yield Jointly(orthonormal_rows, arrived.means)

        asked = [Asked(*each, scale, add_error=False) for each in zip(groups, lefts, strict=True)]
        own = yield Jointly(projections, asked)
        arrived = yield from average_factors(own, dtype, as_sent=is_last)
        received.append(arrived.received)
        own, means = arrived.own, arrived.means
        if not is_last:
            rights = yield Jointly(orthonormal_rows, means)
    # The last iteration alone: each approximates all of M again, and better than those before it.
    terms = [[Factors(*each)] for each in zip(lefts, own, means, strict=True)]
    return Approximation(terms, uncompressed_mean, received, starts)


def alternate(
    config: LowRank,
    bases: StartingBases,
    groups: Sequence[MatrixGroup],
    uncompressed: Sequence[torch.Tensor],
    memory: Memory,
    bucket: Bucket,
) -> Generator[Request | tuple[Message, ...], Any, Approximation]:
    """As `two_rounds.approximate`, with one round for each iteration.

    Cost: one round for each iteration, which reads every matrix once and, but for the last, updates it.
    """
    # By the count of committed steps, which all members have and a saved state keeps: the factor in memory is
    # of the side whose turn it is.
    turn = (memory.step - config.warmup_steps) * config.power_iterations
    starts = fixed = bases.of(memory, groups, left=turn % 2 == 0)
    dtype, scale = config.message_dtype(bucket.flat.dtype), bucket.loss_scale
    terms: list[list[Factors]] = [[] for _ in groups]
    received: list[torch.Tensor] = []
    uncompressed_mean: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        is_first, is_left = iteration == 0, (turn + iteration) % 2 == 0
        project = projections if is_left else products
        asked = [Asked(*each, scale, is_first) for each in zip(groups, fixed, strict=True)]
        own = yield Jointly(project, asked)
        beside = uncompressed if is_first else ()
        arrived = yield from average_factors(own, dtype, beside, as_sent=True)
        received.append(arrived.received)
        if is_first:
            uncompressed_mean = arrived.uncompressed
        own, means = arrived.own, arrived.means
        for of_group, basis, projection, group_mean in zip(terms, fixed, own, means, strict=True):
            of_group.append(Factors(basis, projection, group_mean, basis_is_left=is_left))
        # What the last one has not sent, `reconstruct` writes to the residual, in the pass it makes anyway.
        if iteration + 1 < config.power_iterations:
            subtract_own(groups, [of_group[-1] for of_group in terms])
            fixed = yield Jointly(orthonormal_rows, means)
    return Approximation(terms, uncompressed_mean, received, starts)


class _ShapeGroup(NamedTuple):
    """Parameters of a bucket with the same matrix shape and matrix rank, by index."""

    shape: tuple[int, int]
    matrix_rank: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class PowerSGDPlan(LowRankPlan):
    """Every matrix of a bucket as two factors.

    Attributes:
        alternating: Whether an iteration projects on one side only, in one round.
    """

    alternating: bool = False

    @cached_property
    def shape_groups(self) -> tuple[_ShapeGroup, ...]:
        """What is compressed together."""
        groups: dict[tuple[tuple[int, int], int], list[int]] = defaultdict(list)
        for index, route in enumerate(self.routes):
            if route.matrix_shape is not None and route.matrix_rank is not None:
                groups[route.matrix_shape, route.matrix_rank].append(index)
        return tuple(
            _ShapeGroup(shape, matrix_rank, tuple(indices))
            for (shape, matrix_rank), indices in groups.items()
        )

    @cached_property
    def uncompressed(self) -> tuple[int, ...]:
        """The parameters that travel uncompressed, by index."""
        return tuple(index for index, route in enumerate(self.routes) if not route.is_compressed)

    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        """As `LowRankPlan.compress`: one or two rounds for each iteration."""
        groups = self._matrices(bucket, memory)
        labels = [group.labels for group in groups]
        sent = compensated(bucket, memory, self.uncompressed, self.config.message_dtype(bucket.flat.dtype))
        rounds = alternate if self.alternating else approximate
        found = yield from rounds(self.config, self.bases, groups, sent.parts, memory, bucket)
        remembered = yield from self.to_remember(memory, labels, found.terms, bucket)
        rooms = yield from self._rooms(bucket, memory, groups)

        names = [bucket.specs[index].name for index in self.uncompressed]
        # What is dropped only the host can take back: then the engine copies memory, and puts it back.
        drops = any(name in memory[slot] for name in names for slot in (ERROR, SENT))
        is_healthy = yield Commit(AllFinite(tuple(found.received)), writes_where=not drops)

        means, remaining = found.uncompressed[: len(names)], found.uncompressed[len(names) :]
        targets = [bucket.gradients[index] for index in self.uncompressed]
        writes = [Write(target, mean, None) for target, mean in zip(targets, means, strict=True)]
        remembered = yield from self.written(memory, labels, found.starts, remembered, is_healthy, writes)
        remembered[ERROR] = yield from self._reconstruct(bucket, groups, found.terms, rooms, is_healthy)
        for slot, tensors in remembered.items():
            memory[slot].update(tensors)
        # With nothing of the bucket in front, since of nothing at all there is no `cat`.
        keep_remainder(memory, names, sent, torch.cat([bucket.flat[:0], *remaining]))
        # All of it was sent: what a step before has sent no longer says how much was not.
        for name in names:
            memory[SENT].pop(name, None)

    def _reconstruct(
        self,
        bucket: Bucket,
        groups: Sequence[MatrixGroup],
        terms: Sequence[Terms],
        rooms: Sequence[Rooms | None],
        is_healthy: torch.Tensor | None,
    ) -> Generator[Request | tuple[Message, ...], Any, dict[str, torch.Tensor]]:
        """Make compressed gradients their mean; return by name what this process has not sent of its own."""
        reconstructions, copied = [], []
        errors: dict[str, torch.Tensor] = {}
        for shape_group, group, found, room in zip(self.shape_groups, groups, terms, rooms, strict=True):
            residuals, spare = None, None
            if room is not None:
                residuals, spare = [each.view(shape_group.shape) for each in room.tensors], room.spare
                errors.update(zip(group.labels, room.tensors, strict=True))
            reconstructions.append(
                Reconstruction(group, residuals, found, bucket.loss_scale, is_healthy, spare)
            )
            copied += [
                (index, matrix.view(-1))
                for index, matrix in zip(shape_group.indices, group.matrices, strict=True)
                if matrix.dtype != bucket.flat.dtype
            ]
        yield Jointly(reconstruct, reconstructions)
        # What rounding loses of wide copies goes to the residual too.
        round_all_into(
            [bucket.gradients[index] for index, _ in copied],
            [wide for _, wide in copied],
            [errors.get(bucket.specs[index].name) for index, _ in copied],
            bucket.loss_scale,
            is_healthy,
        )
        return errors

    def _matrices(self, bucket: Bucket, memory: Memory) -> list[MatrixGroup]:
        """Return gradients and residuals as matrices: views, or copies in fp32 where kernels need them."""
        gradients = bucket.gradients
        # Between iterations what was sent is taken from the matrices, which 16 bits would round.
        subtracts = self.alternating and self.config.power_iterations > 1
        copied = [
            index
            for shape_group in self.shape_groups
            for index in shape_group.indices
            if subtracts
            or gradients[index].dtype
            not in kernels_for(gradients[index], shape_group.matrix_rank).gradient_types
        ]
        copies = widened([gradients[index] for index in copied], bucket.specs[0].memory_dtype)
        wide = {**dict(enumerate(gradients)), **dict(zip(copied, copies, strict=True))}
        groups = []
        for shape_group in self.shape_groups:
            names = [bucket.specs[index].name for index in shape_group.indices]
            errors = [memory[ERROR].get(name) for name in names]
            groups.append(
                MatrixGroup(
                    names,
                    matrices=[wide[index].view(shape_group.shape) for index in shape_group.indices],
                    errors=[None if error is None else error.view(shape_group.shape) for error in errors],
                    matrix_rank=shape_group.matrix_rank,
                )
            )
        return groups

    def _rooms(
        self, bucket: Bucket, memory: Memory, groups: Sequence[MatrixGroup]
    ) -> Generator[Request | tuple[Message, ...], Any, Sequence[Rooms | None]]:
        """Return where to write the residuals of each group: the tensors of memory, or new ones."""
        if not self.config.error_feedback or not groups:
            return [None] * len(groups)
        dtype = bucket.specs[0].memory_dtype
        if accelerators.pays_per_launch(bucket.flat.device):
            # For all buckets together, whose residuals of one shape are to lie side by side.
            laid: list[list[Rooms]] = yield Jointly(all_laid, [Wanted(groups, memory[ERROR], dtype)])
            return laid[0]
        rooms: list[Rooms] = []
        for group in groups:
            # In place where all have one: it was added to the matrices already.
            kept = [memory[ERROR][label] for label in group.labels if label in memory[ERROR]]
            like = group.matrices[0]
            if len(kept) < len(group.labels):
                kept = list(like.new_zeros(len(group.labels), like.numel(), dtype=dtype))
            rooms.append(Rooms(kept))
        return rooms
