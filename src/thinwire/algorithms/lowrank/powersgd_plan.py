"""What PowerSGD does with a bucket: its matrices in groups of one shape, as two factors each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from thinwire.algorithms import accelerators
from thinwire.algorithms.base import Bucket, Memory
from thinwire.algorithms.error_feedback import ERROR, compensated, keep_remainder
from thinwire.algorithms.kernels.dispatch import kernels_for
from thinwire.algorithms.kernels.matrices import (
    Factors,
    MatrixGroup,
    Terms,
    Write,
    round_all_into,
    widened,
)
from thinwire.algorithms.kernels.residuals import Rooms
from thinwire.algorithms.lowrank.across_shards import approximate_whole, norm_of_rows
from thinwire.algorithms.lowrank.alternating import alternate
from thinwire.algorithms.lowrank.joint import Reconstruction, all_reconstructed
from thinwire.algorithms.lowrank.plan import LowRankPlan
from thinwire.algorithms.lowrank.rooms import Wanted, all_laid
from thinwire.algorithms.lowrank.slots import SENT
from thinwire.algorithms.lowrank.two_rounds import approximate
from thinwire.algorithms.lowrank.wire import FactorWire
from thinwire.algorithms.requests import AllFinite, Commit, Jointly, Message, Request, Requests
from thinwire.plan import Cut

__all__ = ["PowerSGDPlan"]


class _ShapeGroup(NamedTuple):
    """Parameters of a bucket with the same matrix shape and matrix rank, by index.

    Of parameters that are cut into shards, `shape` is that of this process's rows.
    """

    shape: tuple[int, int]
    matrix_rank: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class PowerSGDPlan(LowRankPlan):
    """Every matrix of a bucket as two factors.

    Attributes:
        wire: How factors travel.
        alternating: Whether an iteration projects on one side only, in one round.
    """

    wire: FactorWire
    alternating: bool = False

    @cached_property
    def shape_groups(self) -> tuple[_ShapeGroup, ...]:
        """What is compressed together."""
        groups: dict[tuple[tuple[int, int], int], list[int]] = defaultdict(list)
        for index, route in enumerate(self.routes):
            if route.matrix_shape is not None and route.matrix_rank is not None:
                groups[route.matrix_shape, route.matrix_rank].append(index)
        # By the shapes of whole matrices: shards with other numbers of rows must make the same groups.
        return tuple(
            _ShapeGroup((self.specs[indices[0]].numel // columns, columns), matrix_rank, tuple(indices))
            for ((_, columns), matrix_rank), indices in groups.items()
        )

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Of each group, where the matrices are cut into shards; none where they are not."""
        cuts = [self.specs[group.indices[0]].cut for group in self.shape_groups]
        return tuple(cut for cut in cuts if cut is not None)

    def sent_of(self, term: Factors) -> torch.Tensor:
        """As `LowRankPlan.sent_of`; of whole matrices, what was sent of this shard's rows."""
        return norm_of_rows(term) if self.cuts else super().sent_of(term)

    @cached_property
    def uncompressed(self) -> tuple[int, ...]:
        """The parameters that travel uncompressed, by index."""
        return tuple(index for index, route in enumerate(self.routes) if not route.is_compressed)

    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        """As `LowRankPlan.compress`: one or two rounds for each iteration."""
        names, gradients = [spec.name for spec in bucket.specs], bucket.gradients
        groups = self._matrices(bucket, memory)
        sent = compensated(bucket, memory, self.uncompressed, self.config.message_dtype(bucket.flat.dtype))
        if self.cuts:
            found = yield from approximate_whole(
                self.config, self.bases, groups, sent.parts, memory, bucket, self.cuts
            )
        else:
            rounds = alternate if self.alternating else approximate
            found = yield from rounds(self.config, self.wire, self.bases, groups, sent.parts, memory, bucket)
        labels = [group.labels for group in groups]
        remembered = yield from self.to_remember(memory, labels, found.terms, bucket)
        rooms = yield from self._rooms(bucket, memory, groups)
        # What is dropped only the host can take back: then the engine copies memory, and puts it back.
        drops = any(names[index] in memory[slot] for index in self.uncompressed for slot in (ERROR, SENT))
        is_healthy = yield Commit(AllFinite(tuple(found.received)), writes_where=not drops)
        count = len(self.uncompressed)
        targets = [gradients[index] for index in self.uncompressed]
        writes = [
            Write(target, mean, None)
            for target, mean in zip(targets, found.uncompressed[:count], strict=True)
        ]
        remembered = yield from self.written(memory, labels, found.starts, remembered, is_healthy, writes)
        errors = {
            label: tensor
            for group, of_group in zip(groups, rooms, strict=True)
            if of_group is not None
            for label, tensor in zip(group.labels, of_group.tensors, strict=True)
        }
        yield from self._reconstruct(bucket, groups, found.terms, rooms, errors, is_healthy)
        for slot, tensors in {ERROR: errors, **remembered}.items():
            memory[slot].update(tensors)
        # With nothing of the bucket in front, since of nothing at all there is no `cat`.
        remaining = torch.cat([bucket.flat[:0], *found.uncompressed[count:]])
        sent_names = [names[index] for index in self.uncompressed]
        keep_remainder(memory, sent_names, sent, remaining)
        # All of it was sent: what a step before has sent no longer says how much was not.
        for name in sent_names:
            memory[SENT].pop(name, None)

    def _reconstruct(
        self,
        bucket: Bucket,
        groups: Sequence[MatrixGroup],
        terms: Sequence[Terms],
        rooms: Sequence[Rooms | None],
        errors: Mapping[str, torch.Tensor],
        is_healthy: torch.Tensor | None,
    ) -> Requests:
        """Make compressed gradients their mean, and residuals what this process has not sent of its own."""
        reconstructions, copied = [], []
        for shape_group, group, found, room in zip(self.shape_groups, groups, terms, rooms, strict=True):
            residuals, spare = None, None
            if room is not None:
                residuals, spare = [each.view(shape_group.shape) for each in room.tensors], room.spare
            reconstructions.append(
                Reconstruction(group, residuals, found, bucket.loss_scale, is_healthy, spare)
            )
            copied += [
                (index, matrix.view(-1))
                for index, matrix in zip(shape_group.indices, group.matrices, strict=True)
                if matrix.dtype != bucket.flat.dtype
            ]
        yield Jointly(all_reconstructed, reconstructions)
        # What rounding loses of wide copies goes to the residual too.
        round_all_into(
            [bucket.gradients[index] for index, _ in copied],
            [wide for _, wide in copied],
            [errors.get(bucket.specs[index].name) for index, _ in copied],
            bucket.loss_scale,
            is_healthy,
        )

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
