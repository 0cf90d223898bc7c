"""A step of PowerSGD: the mean of a bucket as two low-rank factors of each matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import is_
from typing import TypeAlias

import torch

from thinwire.algorithms.base import Bucket, Memory, Slot
from thinwire.algorithms.error_feedback import ERROR, keep_excess, with_residual
from thinwire.algorithms.lowrank.factors import (
    BucketMatrices,
    FactorMessages,
    Workspace,
    bases_ahead,
    starting_bases,
)
from thinwire.algorithms.lowrank.low_rank_plan import LowRankPlan
from thinwire.algorithms.lowrank.slots import BASIS, FACTOR, SENT
from thinwire.algorithms.requests import AllFinite, Commit, Jointly, Requests, RunPart
from thinwire.kernels.dispatch import choice, kernels_for
from thinwire.kernels.matrices import (
    Factors,
    MatrixGroup,
    Reconstruction,
    Terms,
    Write,
    round_into,
)
from thinwire.kernels.torch_kernels import subtract_own
from thinwire.tensors import accelerators
from thinwire.tensors.layout import stack_view

NewState: TypeAlias = dict[Slot, Sequence[torch.Tensor]]
"""Tensors that a step leaves for the next one: by slot, a batch for each group of matrices."""


@dataclass(frozen=True)
class PowerSGDPlan(LowRankPlan):
    """Every matrix of a bucket as two factors; `alternating` projects on one side only, in one round."""

    @cached_property
    def workspace(self) -> Workspace:
        """The tensors that steps share."""
        return Workspace(self.config.seed, warm_start=self.config.warm_start)

    @cached_property
    def message_dtype(self) -> torch.dtype:
        """The dtype of messages."""
        return self.config.message_dtype(self.specs[0].dtype)

    @cached_property
    def shape_groups(self) -> dict[tuple[tuple[int, int], int], list[int]]:
        """The indices of compressed parameters by matrix shape and matrix rank."""
        groups: dict[tuple[tuple[int, int], int], list[int]] = {}
        for index, route in enumerate(self.routes):
            if route.matrix_shape is not None and route.matrix_rank is not None:
                groups.setdefault((route.matrix_shape, route.matrix_rank), []).append(index)
        return groups

    @cached_property
    def uncompressed(self) -> dict[str, int]:
        """The indices of uncompressed parameters by name."""
        return {self.names[i]: i for i, route in enumerate(self.routes) if not route.is_compressed}

    @cached_property
    def _compressed_names(self) -> list[str]:
        return [self.names[index] for indices in self.shape_groups.values() for index in indices]

    def compress(self, bucket: Bucket, memory: Memory) -> Requests:
        """Average the bucket as two factors of each matrix: algorithm 1 of the paper, with error feedback.

        1. M ← gradient + residual. The first product adds them, in place.
        2. P ← M Q, with the last step's Q, orthonormalised.
        3. P ← mean of P. Uncompressed gradients are sent with it.
        4. P̂ ← orthonormal basis of P.
        5. Q ← Mᵀ P̂, this process's own.
        6. Q̄ ← mean of Q.
        7. After the commit: gradient ← P̂ Q̄ᵀ, residual ← M − P̂ Qᵀ, and memory keeps Q̄.

        More `power_iterations` repeat 2 to 6 with Q ← basis of Q̄. If `alternating`, a step has one round
        instead of two: Q ← Mᵀ P̂ with the P̂ in memory, and in the next step P ← M Q̂.
        """
        gradients, names = bucket.flat.split_with_sizes(self.sizes), self.uncompressed.keys()
        whole = [gradients[index] for index in self.uncompressed.values()]
        M = self._bind(bucket, gradients, memory)  # 1
        try:
            has_residual = not memory[ERROR].keys().isdisjoint(names)
            if has_residual:
                sums = with_residual(bucket, memory, [*names], whole)
                messages = FactorMessages(self.memory_dtype, self.workspace, sums)
            else:
                messages = FactorMessages(self.message_dtype, self.workspace, whole)

            # The number of committed projections, the same on all members and kept in a saved state. If
            # `alternating`, its parity gives the side that the factor in memory belongs to.
            turn = (memory.step - self.config.warmup_steps) * self.config.power_iterations
            side = 0 if self.config.alternating and turn % 2 == 0 else 1
            start = starting_bases(memory, M, side)
            if self.config.alternating:
                terms = yield from self._alternating_rounds(M, start, turn, messages)
            else:
                terms = yield from self._two_rounds(M, start, messages)  # 2 to 6
            new = yield from self._new_state(memory, M, terms)

            # Only the host can undo dropping a residual: the engine then copies memory and restores it.
            drops = has_residual or not memory[SENT].keys().isdisjoint(names)
            is_healthy = yield Commit(AllFinite(tuple(messages.received)), commits_on_device=not drops)

            yield from self._reconstruct(bucket, gradients, memory, M, terms, is_healthy)  # 7
        finally:
            for group in M.groups:
                group.matrices = ()  # they would keep an unused bucket alive
        means = messages.whole_means
        if has_residual:
            means = keep_excess(bucket, memory, [*names], means)
        writes = [Write(part, mean, False, is_healthy) for part, mean in zip(whole, means, strict=True)]
        # After the reconstruction, which reads the basis that the step started from.
        writes += self._writes(memory, M, new, start, is_healthy)
        if accelerators.is_accelerator(M.device):
            # For all buckets together: one launch writes the new state of all.
            yield Jointly(M.kernels.write, writes, M.device)
        elif writes:
            torch._foreach_copy_([write.target for write in writes], [write.healthy for write in writes])
        # All of it was sent: what an earlier step has sent no longer shows how much was not.
        for name in names if drops else ():
            memory[SENT].pop(name, None)

    def _two_rounds(
        self, M: BucketMatrices, Q: list[torch.Tensor], messages: FactorMessages
    ) -> RunPart[list[Terms]]:
        """Find the factors of the mean. Cost: in each iteration, two reads of M."""
        for iteration in range(1, self.config.power_iterations + 1):
            is_last = iteration == self.config.power_iterations
            # Add the residual only once: in later iterations the matrices already contain it.
            P = yield from M.products(Q, "P", add_error=iteration == 1)  # P ← M Q
            _, P = yield from messages.average(P, as_sent=False)  # P ← mean of P
            P = yield from M.orthonormal(P, "basis of P")  # P̂
            Q = yield from M.projections(P, "Q")  # Q ← Mᵀ P̂
            Q, mean_Q = yield from messages.average(Q, as_sent=is_last)  # Q̄
            if not is_last:
                Q = yield from M.orthonormal(mean_Q, "basis of Q")
        # Only the last iteration: each approximates all of M again, better than the ones before.
        return [[Factors((p, q), (p, mean))] for p, q, mean in zip(P, Q, mean_Q, strict=True)]

    def _alternating_rounds(
        self, M: BucketMatrices, bases: list[torch.Tensor], turn: int, messages: FactorMessages
    ) -> RunPart[list[Terms]]:
        """Find factors of the mean, one side in each iteration, and subtract what was sent from M."""
        terms: list[list[Factors]] = [[] for _ in M.groups]
        for iteration in range(self.config.power_iterations):
            is_first, is_last = iteration == 0, iteration + 1 == self.config.power_iterations
            if (turn + iteration) % 2 == 0:
                Q = yield from M.projections(bases, f"Q {iteration}", add_error=is_first)  # Mᵀ P̂
                Q, means = yield from messages.average(Q, as_sent=True)
                found = [Factors((p, q), (p, q_mean)) for p, q, q_mean in zip(bases, Q, means, strict=True)]
            else:
                P = yield from M.products(bases, f"P {iteration}", add_error=is_first)  # M Q̂
                P, means = yield from messages.average(P, as_sent=True)
                found = [
                    Factors((p, q), (p_mean, q), projection=0)
                    for p, q, p_mean in zip(P, bases, means, strict=True)
                ]
            for group, of_group, latest in zip(M.groups, terms, found, strict=True):
                of_group.append(latest)
                # After the last iteration, `reconstruct` subtracts and writes the residual in one pass.
                if not is_last:
                    subtract_own(group, latest)
            if not is_last:
                bases = yield from M.orthonormal(means, f"basis {iteration}")
        return list[Terms](terms)

    def _bind(self, bucket: Bucket, gradients: Sequence[torch.Tensor], memory: Memory) -> BucketMatrices:
        """Return gradients and residuals as matrices, bound again only if something has moved."""
        errors = list(map(memory[ERROR].get, self._compressed_names))
        flat = bucket.flat
        key = flat.data_ptr(), flat.dtype, choice()
        M = self.workspace.M
        if M is None or M.key != key or not all(map(is_, errors, M.errors)):
            M = self._new_binding(flat, key, errors)
        M.loss_scale = bucket.loss_scale
        self.workspace.M = M if M.wide is None else None  # copies have new addresses in each step
        if M.wide is not None:
            gradients = flat.to(M.wide).split_with_sizes(self.sizes)
        for group, ((shape, _), indices) in zip(M.groups, self.shape_groups.items(), strict=True):
            group.matrices = [gradients[index].view(shape) for index in indices]
        return M

    def _new_binding(
        self, flat: torch.Tensor, key: object, errors: Sequence[torch.Tensor | None]
    ) -> BucketMatrices:
        kernels = kernels_for(flat, max(matrix_rank for _, matrix_rank in self.shape_groups))
        # Iterations subtract what was sent from the matrices; in 16 bits that would be rounded.
        subtracts = self.config.alternating and self.config.power_iterations > 1
        widens = subtracts or flat.dtype not in kernels.gradient_types
        is_accelerator = accelerators.is_accelerator(flat.device)
        groups, written = list[MatrixGroup](), list[Sequence[torch.Tensor] | None]()
        remaining = iter(errors)
        for (shape, matrix_rank), indices in self.shape_groups.items():
            of_group = islice(remaining, len(indices))
            shaped = [None if error is None else error.view(shape) for error in of_group]
            known = [error for error in shaped if error is not None]
            # Written in place, on accelerators as a batch; otherwise `reconstruct` gets new tensors.
            is_whole = len(known) == len(shaped) and not (is_accelerator and stack_view(known) is None)
            written.append(known if is_whole else None)
            names = [self.names[index] for index in indices]
            groups.append(MatrixGroup(names, (), known if is_whole else shaped, matrix_rank))
        wide = self.memory_dtype if widens and flat.dtype != self.memory_dtype else None
        return BucketMatrices(groups, kernels, flat.device, self.workspace, key, errors, written, wide)

    def _reconstruct(
        self,
        bucket: Bucket,
        gradients: Sequence[torch.Tensor],
        memory: Memory,
        M: BucketMatrices,
        terms: Sequence[Terms],
        is_healthy: torch.Tensor | None,
    ) -> RunPart[None]:
        """Write the mean to compressed gradients, and what this process has not sent to the residual."""
        items, remains = list[Reconstruction](), memory[ERROR]
        for group, of_group, written in zip(M.groups, terms, M.written, strict=True):
            errors = written
            if written is None and self.config.error_feedback:
                errors = _copied_residuals(group, self.memory_dtype)
            items.append(Reconstruction(group, errors, of_group, bucket.loss_scale, is_healthy))
        yield Jointly(M.kernels.reconstruct, items, M.device)
        for item in items:
            if item.errors is not None and item.errors is not item.group.errors:
                flat = [error.view(-1) for error in item.errors]
                remains.update(zip(item.group.labels, flat, strict=True))
        if M.wide is None:
            return
        # The rounding errors of wide copies are added to the residual too.
        for item, indices in zip(items, self.shape_groups.values(), strict=True):
            for index, name, matrix in zip(indices, item.group.labels, item.group.matrices, strict=True):
                error = None if item.errors is None else remains[name]
                round_into(gradients[index], matrix.view(-1), error, bucket.loss_scale, is_healthy)

    def _new_state(self, memory: Memory, M: BucketMatrices, terms: Sequence[Terms]) -> RunPart[NewState]:
        """Return the state to keep after the commit, in units of the unscaled loss."""
        # Factors of the last iteration only: the next step starts from them. What was sent of all iterations:
        # the diagnosis compares all that was sent with what was not.
        factors, sent = list[torch.Tensor](), list[torch.Tensor]()
        for of_group in terms:
            factors.append(of_group[-1].mean[of_group[-1].projection])
            parts = [term.sent[term.projection].flatten(1) for term in of_group]
            sent.append(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])
        if (scale := M.loss_scale) is not None:
            divided = yield Jointly(all_divided, [(tensor, scale) for tensor in factors + sent], id(scale))
            factors, sent = divided[: len(factors)], divided[len(factors) :]
        new: NewState = {}
        if self.config.warm_start:
            new[FACTOR] = factors
            # On the CPU each bucket makes its own when it starts, while messages of others are in flight.
            if accelerators.is_accelerator(M.device):
                new[BASIS] = yield from bases_ahead(memory, M, factors)
        if self.config.error_feedback:
            new[SENT] = sent
        return new

    def _writes(
        self,
        memory: Memory,
        M: BucketMatrices,
        new: NewState,
        start: Sequence[torch.Tensor],
        is_healthy: torch.Tensor | None,
    ) -> list[Write]:
        """Return the writes of the new state to memory.

        In a step that is not healthy, memory also keeps the bases that the step started from.
        """
        writes = []
        for slot, batches in new.items():
            for group, batch, basis in zip(M.groups, batches, start, strict=True):
                place = self.workspace.find_batch(memory, slot, group.labels, batch.shape)
                if place is None:
                    before: Sequence[torch.Tensor | None] = ()
                    if is_healthy is not None:  # if None, the host has already found the step healthy
                        before = basis.unbind() if slot is BASIS else [*map(memory[slot].get, group.labels)]
                    place = self.workspace.place_batch(memory, slot, group.labels, batch, before)
                writes.append(Write(place, batch, True, is_healthy))
        return writes


def all_divided(items: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Return tensors divided by their loss scale, for all buckets: a step has one scale per device."""
    return torch._foreach_div([tensor for tensor, _ in items], items[0][1])


def _copied_residuals(group: MatrixGroup, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Return copies of a group's residuals, to be written to."""
    first, count = group.matrices[0], len(group.matrices)
    buffers = first.new_zeros(count, *first.shape, dtype=dtype).unbind()
    for buffer, error in zip(buffers, group.errors, strict=True):
        if error is not None:
            buffer.copy_(error)
    return buffers
