"""The low-rank part of gradients, which travels in 8 bits beside the fewer bits of what is left."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch

from thinwire.algorithms.base import Memory
from thinwire.algorithms.code_rounds import CodedPart, average_codes
from thinwire.algorithms.lowrank.factors import BucketMatrices, Workspace, starting_bases
from thinwire.algorithms.lowrank.slots import FACTOR
from thinwire.algorithms.requests import CollectiveRequest
from thinwire.kernels.base import CodeKernels
from thinwire.kernels.dispatch import kernels_for, name_of_kernels_for
from thinwire.kernels.matrices import Factors, MatmulBatch, MatrixGroup, Rows, Subtraction
from thinwire.plan import ParameterSpec
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS, Coded, block_bytes

FACTOR_BITS = 8
CODEBOOK = CODEBOOKS[FACTOR_BITS]


def gains_by_low_rank(spec: ParameterSpec, matrix_rank: int, bits: int) -> bool:
    """Return whether a gradient is a matrix whose factors take at most as many bytes as its codes."""
    shape = spec.matrix_shape
    if shape is None or matrix_rank >= min(shape):
        return False
    return FACTOR_BITS * matrix_rank * sum(shape) <= bits * spec.numel


class TakenOut(NamedTuple):
    """A step's factors: P̂, the same on all members, and what this member has coded of R = Mᵀ P̂."""

    M: BucketMatrices
    P: list[torch.Tensor]
    received: Coded  # the mean of P: it must be finite
    R: CodedPart


@dataclass(frozen=True)
class LowRankPart:
    """The factors of a bucket's matrices that gain: one power iteration a step, from the last one's R."""

    specs: tuple[ParameterSpec, ...]
    matrix_rank: int  # r, of all matrices
    bits: int  # of the codes of what is left
    block: int  # elements that share a scale
    num_members: int
    seed: int  # of the first basis

    @cached_property
    def groups(self) -> dict[tuple[int, int], list[int]]:
        """The parameters that gain, by index, under the shape of their matrix."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, spec in enumerate(self.specs):
            if spec.matrix_shape is not None and gains_by_low_rank(spec, self.matrix_rank, self.bits):
                groups.setdefault(spec.matrix_shape, []).append(index)
        return groups

    @cached_property
    def blocks(self) -> tuple[Blocks, Blocks]:
        """How P and R of all matrices are coded, (r, rows) and (r, columns)."""
        shapes = [shape for shape, indices in self.groups.items() for _ in indices]
        P, R = (tuple(self.matrix_rank * size for size in sizes) for sizes in zip(*shapes, strict=True))
        return Blocks(P, self.block, self.num_members), Blocks(R, self.block, self.num_members)

    @cached_property
    def factor_bytes(self) -> dict[int, int]:
        """The bytes of each matrix's factors, by index; those of the first bear what fills up the shares."""
        size, indices = block_bytes(self.block, FACTOR_BITS), list(chain.from_iterable(self.groups.values()))
        counts = zip(*(blocks.counts for blocks in self.blocks), strict=True)
        by_index = {index: size * sum(of_both) for index, of_both in zip(indices, counts, strict=True)}
        filling = sum(blocks.share * self.num_members - blocks.total for blocks in self.blocks)
        by_index[indices[0]] += size * filling
        return by_index

    @cached_property
    def _workspace(self) -> Workspace:
        return Workspace(self.seed)

    def kernel_names(self, device: torch.device) -> set[str]:
        """Return the kernels that members must have in common, since bases differ in the last bits."""
        dtypes = {spec.memory_dtype for spec in self.specs}
        likes = [torch.empty(1, dtype=dtype, device=device) for dtype in dtypes]
        return {name_of_kernels_for(like, self.matrix_rank) for like in likes}

    def take_out(
        self, values: torch.Tensor, memory: Memory, codes: CodeKernels, rank: int
    ) -> Generator[tuple[CollectiveRequest, ...], Any, TakenOut]:
        """Leave of the matrices M in flat values what their low-rank part, as it is sent, leaves.

        1. P ← M Q, with Q an orthonormal basis of the R that the step before has left.
        2. P ← mean of P, in 8 bits: two rounds. P̂ ← orthonormal basis of P.
        3. R ← Mᵀ P̂, this member's own, in 8 bits; M ← M − P̂ Rᵀ. R travels beside the codes of that.
        """
        M, (left, right) = self._matrices(values), self.blocks
        P = M.kernels.products(_batches(M, starting_bases(memory, M, side=1)))
        sent = codes.encoded(_flat(P), left, CODEBOOK, None)
        (received,) = yield from average_codes(codes, [CodedPart(sent, left, CODEBOOK)], rank, values.dtype)
        P = self._decoded(received, 0, codes, values)
        P = M.kernels.orthonormal_rows([Rows(rows) for rows in P])
        R = M.kernels.projections(_batches(M, P))
        sent = codes.encoded(_flat(R), right, CODEBOOK, None)
        _subtract(M, P, self._decoded(sent, 1, codes, values))
        return TakenOut(M, P, received, CodedPart(sent, right, CODEBOOK))

    def put_back(
        self, part: TakenOut, mean: Coded, memory: Memory, codes: CodeKernels, scale: torch.Tensor | None
    ) -> None:
        """Behind the commit: M ← M + P̂ R̄ᵀ, and memory keeps R̄, in units of the unscaled loss."""
        R = self._decoded(mean, 1, codes, part.P[0])
        _subtract(part.M, part.P, [-rows for rows in R])
        for group, rows in zip(part.M.groups, R, strict=True):
            kept = rows.clone() if scale is None else rows / scale
            memory[FACTOR].update(zip(group.labels, kept.unbind(), strict=True))

    def _matrices(self, values: torch.Tensor) -> BucketMatrices:
        parts = values.split_with_sizes([spec.numel for spec in self.specs])
        groups = []
        for shape, indices in self.groups.items():
            names, matrices = [self.specs[i].name for i in indices], [parts[i].view(shape) for i in indices]
            groups.append(MatrixGroup(names, matrices, [None] * len(indices), self.matrix_rank))
        return BucketMatrices(groups, kernels_for(values, self.matrix_rank), values.device, self._workspace)

    def _decoded(self, coded: Coded, side: int, codes: CodeKernels, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the factors of each group, (matrices, r, rows or columns)."""
        flat = like.new_empty(sum(self.blocks[side].numels))
        codes.decode(coded, self.blocks[side], CODEBOOK, flat)
        shapes = [(len(indices), self.matrix_rank, shape[side]) for shape, indices in self.groups.items()]
        parts = flat.split_with_sizes([torch.Size(shape).numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _flat(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([factor.flatten() for factor in factors])


def _batches(M: BucketMatrices, factors: Sequence[torch.Tensor]) -> list[MatmulBatch]:
    pairs = zip(M.groups, factors, strict=True)
    return [MatmulBatch(group, factor, None, add_error=False) for group, factor in pairs]


def _subtract(M: BucketMatrices, P: Sequence[torch.Tensor], R: Sequence[torch.Tensor]) -> None:
    pairs = zip(P, R, strict=True)
    M.kernels.subtract_own(
        [Subtraction(g, Factors(pair, pair)) for g, pair in zip(M.groups, pairs, strict=True)]
    )
