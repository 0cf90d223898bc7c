"""What PowerSGD does with a bucket: its matrices in groups of one shape, as two factors each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

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
    fill_alike,
    fill_memory,
    in_one_piece,
    round_all_into,
    widened,
)
from thinwire.algorithms.lowrank.across_shards import approximate_whole, norm_of_rows
from thinwire.algorithms.lowrank.alternating import alternate
from thinwire.algorithms.lowrank.joint import Reconstruction, all_reconstructed, all_written
from thinwire.algorithms.lowrank.plan import LowRankPlan, by_label
from thinwire.algorithms.lowrank.slots import BASIS, SENT
from thinwire.algorithms.lowrank.two_rounds import approximate
from thinwire.algorithms.lowrank.wire import FactorWire
from thinwire.algorithms.requests import AllFinite, Commit, Jointly, Requests
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
        errors = self._errors(bucket, memory, groups)
        # What is dropped only the host can take back: then the engine copies memory, and puts it back.
        drops = any(names[index] in memory[slot] for index in self.uncompressed for slot in (ERROR, SENT))
        is_healthy = yield Commit(AllFinite(tuple(found.received)), writes_where=not drops)
        count = len(self.uncompressed)
        targets = [gradients[index] for index in self.uncompressed]
        writes = [
            Write(target, mean, None)
            for target, mean in zip(targets, found.uncompressed[:count], strict=True)
        ]
        # Not on the CPU, nor with `host_check`: there the generator is closed where the step is not healthy.
        if is_healthy is not None:
            before = {slot: memory[slot] for slot in remembered}
            before[BASIS] = by_label(labels, found.starts)
            writes += [
                Write(tensor, None, _before(tensor, before[slot].get(label)))
                for slot, tensors in remembered.items()
                for label, tensor in tensors.items()
            ]
        # Not from here, bucket by bucket: on an accelerator one launch writes what all of them leave.
        placed = yield Jointly(all_written, [(each, is_healthy) for each in writes])
        if is_healthy is not None:
            kept = iter(placed[count:])
            # Each slot takes its own from one iterator. Labels first: with them `zip` ends.
            remembered = {
                slot: dict(zip(tensors, kept, strict=False)) for slot, tensors in remembered.items()
            }
        yield from self._reconstruct(bucket, groups, found.terms, errors, is_healthy)
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
        errors: Mapping[str, torch.Tensor],
        is_healthy: torch.Tensor | None,
    ) -> Requests:
        """Make compressed gradients their mean, and residuals what this process has not sent of its own."""
        reconstructions, copied = [], []
        for shape_group, group, of_group in zip(self.shape_groups, groups, terms, strict=True):
            residuals = [errors[name].view(shape_group.shape) for name in group.labels] if errors else None
            reconstructions.append(Reconstruction(group, residuals, of_group, bucket.loss_scale, is_healthy))
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

    def _errors(
        self, bucket: Bucket, memory: Memory, groups: Sequence[MatrixGroup]
    ) -> dict[str, torch.Tensor]:
        """Return where to write residuals, by name: the tensors of memory, or new ones."""
        if not self.config.error_feedback or not groups:
            return {}
        dtype = bucket.specs[0].memory_dtype
        if accelerators.pays_per_launch(bucket.flat.device):
            return _laid_alike(groups, memory[ERROR], dtype)
        errors: dict[str, torch.Tensor] = {}
        for group in groups:
            # In place where all have one: it was added to the matrices already.
            kept = [memory[ERROR][label] for label in group.labels if label in memory[ERROR]]
            like = group.matrices[0]
            if len(kept) < len(group.labels):
                kept = list(like.new_zeros(len(group.labels), like.numel(), dtype=dtype))
            errors.update(zip(group.labels, kept, strict=True))
        return errors


def _laid_alike(
    groups: Sequence[MatrixGroup], kept: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return by name where to write residuals: so that they lie to each other as their matrices do.

    Then those of a bucket are written by one launch, even if only where the step is healthy. They are the
    tensors of memory, if those lie so; else new ones, that hold what was kept.
    """
    backends = {id(kernels_for(group.matrices[0], group.matrix_rank)) for group in groups}
    # What one backend writes as a whole must have no residual between that another one writes.
    parts = [groups] if len(backends) == 1 else [[group] for group in groups]
    errors: dict[str, torch.Tensor] = {}
    for part in parts:
        labels = [label for group in part for label in group.labels]
        matrices = [matrix for group in part for matrix in group.matrices]
        whole = in_one_piece(matrices) if len(backends) == 1 else None
        rooms = [kept[label] for label in labels if label in kept]
        is_laid = len(rooms) == len(labels) and (
            fill_memory(rooms) if whole is None else fill_alike(matrices, rooms) is not None
        )
        if not is_laid:
            starts = [0, *accumulate(matrix.numel() for matrix in matrices)]
            if whole is not None:
                starts = [int(matrix.storage_offset() - whole.storage_offset()) for matrix in matrices]
            length = starts[-1] if whole is None else whole.numel()
            zeros = matrices[0].new_zeros(length, dtype=dtype)
            rooms = [
                zeros[start : start + matrix.numel()] for start, matrix in zip(starts, matrices, strict=False)
            ]
            known = [index for index, label in enumerate(labels) if label in kept]
            if known:
                torch._foreach_copy_([rooms[i] for i in known], [kept[labels[i]] for i in known])
        errors.update(zip(labels, rooms, strict=True))
    return errors


def _before(tensor: torch.Tensor, was: torch.Tensor | None) -> torch.Tensor:
    """Return what was kept where a tensor is to be; zeros if there was nothing like it."""
    kind = (tensor.shape, tensor.dtype, tensor.device)
    is_alike = was is not None and (was.shape, was.dtype, was.device) == kind
    return was if was is not None and is_alike else torch.zeros_like(tensor)
