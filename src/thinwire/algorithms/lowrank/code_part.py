"""The low-rank part of gradients, which travels in 8 bits beside the fewer bits of what is left."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from thinwire.algorithms.base import Memory
from thinwire.algorithms.code_rounds import CodedPart, average_codes
from thinwire.algorithms.lowrank.factors import BucketMatrices, Rooms, SlotBatches, StartingBases
from thinwire.algorithms.lowrank.slots import FACTOR
from thinwire.algorithms.requests import CollectiveRequest
from thinwire.kernels.base import CodeKernels
from thinwire.kernels.dispatch import kernels_for, name_of_kernels_for
from thinwire.kernels.matrices import Factors, MatmulBatch, MatrixGroup, Rows, Subtraction
from thinwire.plan import ParameterSpec
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS, Coded, block_bytes

FACTOR_BITS = 8


def gains_by_low_rank(spec: ParameterSpec, matrix_rank: int, bits: int) -> bool:
    """Return whether a gradient is a matrix whose factors take at most as many bytes as its codes."""
    if spec.matrix_shape is None or matrix_rank >= min(spec.matrix_shape):
        return False
    return FACTOR_BITS * matrix_rank * sum(spec.matrix_shape) <= bits * spec.numel


@dataclass(frozen=True)
class TakenOut:
    """A step's factors: P̂, the same on all members, and what this member has sent of R = Mᵀ P̂."""

    M: BucketMatrices
    P: list[torch.Tensor]
    received: Coded  # the mean of P, which must be finite
    R: CodedPart


@dataclass(frozen=True)
class LowRankPart:
    """The factors of a bucket's matrices that gain by it: one power iteration a step, from the last one's R.

    Args:
        specs: The bucket's parameters.
        matrix_rank: r, of all matrices.
        bits: Of the codes of what is left.
        block: Elements that share a scale.
        num_members: Members of the group.
        seed: Of the first basis.
    """

    specs: tuple[ParameterSpec, ...]
    matrix_rank: int
    bits: int
    block: int
    num_members: int
    seed: int
    _batches: SlotBatches = field(default_factory=SlotBatches, compare=False, repr=False)

    @cached_property
    def groups(self) -> dict[tuple[int, int], list[int]]:
        """The parameters that gain, by index, under the shape of their matrix."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, spec in enumerate(self.specs):
            if gains_by_low_rank(spec, self.matrix_rank, self.bits) and spec.matrix_shape is not None:
                groups.setdefault(spec.matrix_shape, []).append(index)
        return groups

    @cached_property
    def indices(self) -> list[int]:
        """Them in the order in which their factors travel."""
        return [index for indices in self.groups.values() for index in indices]

    @cached_property
    def blocks(self) -> tuple[Blocks, Blocks]:
        """How all P and all R are coded, (r, rows) and (r, columns) of each matrix."""
        sides = zip(
            *[shape for shape, indices in self.groups.items() for _ in indices], strict=True
        )  # of each matrix its rows, and its columns
        p, r = (tuple(self.matrix_rank * size for size in side) for side in sides)
        return Blocks(p, self.block, self.num_members), Blocks(r, self.block, self.num_members)

    @cached_property
    def factor_bytes(self) -> dict[int, int]:
        """The bytes of each matrix's factors, by index; those of the first bear what fills up the shares."""
        size = block_bytes(self.block, FACTOR_BITS)
        of_all = {
            index: size * sum(counts)
            for index, *counts in zip(self.indices, *(blocks.counts for blocks in self.blocks), strict=True)
        }
        filling = sum(blocks.share * self.num_members - blocks.total for blocks in self.blocks)
        of_all[self.indices[0]] += size * filling
        return of_all

    @cached_property
    def _bases(self) -> StartingBases:
        return StartingBases(self.seed, self._batches, Rooms(), warm_start=True)

    def kernel_names(self, device: torch.device) -> set[str]:
        """Return the kernels that members must have in common, since bases differ in the last bits."""
        dtypes = {spec.memory_dtype for spec in self.specs}
        return {
            name_of_kernels_for(torch.empty(1, dtype=dtype, device=device), self.matrix_rank)
            for dtype in dtypes
        }

    def take_out(
        self, values: torch.Tensor, memory: Memory, codes: CodeKernels, rank: int
    ) -> Generator[tuple[CollectiveRequest, ...], Any, TakenOut]:
        """Leave of the matrices in flat values what their low-rank part, as it is sent, leaves.

        1. P ← M Q, with Q an orthonormal basis of the R that the step before has left.
        2. P ← mean of P, in 8 bits: two rounds. P̂ ← orthonormal basis of P.
        3. R ← Mᵀ P̂, this member's own, in 8 bits; M ← M − P̂ Rᵀ. R travels beside the codes of that.
        """
        M = self._matrices(values)
        left, right = self.blocks
        Q = self._bases.of(memory, M, left=False)
        P = M.kernels.products(_batches(M, Q))
        sent = CodedPart(self._coded(P, left, codes), left, CODEBOOKS[FACTOR_BITS])
        (received,) = yield from average_codes(codes, [sent], rank, values.dtype)
        P = self._decoded(received, 0, codes, values)
        P = M.kernels.orthonormal_rows([Rows(rows) for rows in P])
        R = M.kernels.projections(_batches(M, P))
        coded = self._coded(R, right, codes)
        _add(M, P, [-rows for rows in self._decoded(coded, 1, codes, values)])
        return TakenOut(M, P, received, CodedPart(coded, right, CODEBOOKS[FACTOR_BITS]))

    def put_back(self, part: TakenOut, mean: Coded, memory: Memory, codes: CodeKernels, scale: Any) -> None:
        """Behind the commit: M ← M + P̂ R̄ᵀ, and memory keeps R̄, in units of the unscaled loss."""
        like = part.M.groups[0].matrices[0]
        R = self._decoded(mean, 1, codes, like)
        _add(part.M, part.P, R)
        for group, rows in zip(part.M.groups, R, strict=True):
            kept = rows.clone() if scale is None else rows / scale
            memory[FACTOR].update(zip(group.labels, kept.unbind(), strict=True))

    def _matrices(self, values: torch.Tensor) -> BucketMatrices:
        parts = values.split_with_sizes([spec.numel for spec in self.specs])
        groups = [
            MatrixGroup(
                [self.specs[index].name for index in indices],
                [parts[index].view(shape) for index in indices],
                [None] * len(indices),
                self.matrix_rank,
            )
            for shape, indices in self.groups.items()
        ]
        return BucketMatrices(groups, kernels_for(values, self.matrix_rank), values.device)

    @staticmethod
    def _coded(factors: Sequence[torch.Tensor], blocks: Blocks, codes: CodeKernels) -> Coded:
        flat = torch.cat([factor.flatten() for factor in factors])
        return codes.encoded(flat, blocks, CODEBOOKS[FACTOR_BITS], None)

    def _decoded(self, coded: Coded, side: int, codes: CodeKernels, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the factors of each group, (matrices, r, rows or columns)."""
        blocks = self.blocks[side]
        flat = like.new_empty(sum(blocks.numels))
        codes.decode(coded, blocks, CODEBOOKS[FACTOR_BITS], flat)
        shapes = [(len(indices), self.matrix_rank, shape[side]) for shape, indices in self.groups.items()]
        ends = [0, *accumulate(torch.Size(shape).numel() for shape in shapes)]
        return [
            flat[start:end].view(shape) for start, end, shape in zip(ends, ends[1:], shapes, strict=False)
        ]


def _batches(M: BucketMatrices, factors: Sequence[torch.Tensor]) -> list[MatmulBatch]:
    return [MatmulBatch(group, factor, None, False) for group, factor in zip(M.groups, factors, strict=True)]


def _add(M: BucketMatrices, P: Sequence[torch.Tensor], R: Sequence[torch.Tensor]) -> None:
    """Subtract −(P Rᵀ): there are kernels for that."""
    pairs = [(left, -right) for left, right in zip(P, R, strict=True)]
    M.kernels.subtract_own(
        [Subtraction(group, Factors(pair, pair)) for group, pair in zip(M.groups, pairs, strict=True)]
    )
