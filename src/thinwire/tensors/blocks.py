"""How a bucket is cut into blocks that have their own scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from thinwire.tensors.accelerators import DeviceCopies


@dataclass(frozen=True)
class Blocks:
    """How flat tensors, one after the other, are divided into blocks of `block` elements.

    Each begins a new one, and its last block may be shorter. So what becomes of it does not depend on its
    neighbours. Each member of the group averages as many blocks as the others.
    """

    numels: tuple[int, ...]
    block: int
    num_members: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each tensor."""
        return tuple(-(-numel // self.block) for numel in self.numels)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first block of each tensor, and their number at the end."""
        return tuple(accumulate(self.counts, initial=0))

    @cached_property
    def total(self) -> int:
        """All blocks."""
        return self.starts[-1]

    @cached_property
    def share(self) -> int:
        """Blocks that each member averages, those included that only fill up."""
        # All have as many: the rows of an all-to-all have one length. It is not filled up to a multiple of 16
        # bytes, without which NCCL copies single bytes, of which each thread then has 32 in flight: that is
        # faster than the networks that few bits are for. Small buckets would send more, and who averages a
        # block, on which residuals depend, would change.
        return -(-self.total // self.num_members)

    @cached_property
    def are_whole(self) -> bool:
        """Whether no block is shorter than others."""
        return self.are_divided_by(self.block)

    def are_divided_by(self, number: int) -> bool:
        """Return whether `number` divides the size of every tensor, and so the start of every block."""
        return self._divisor % number == 0

    @cached_property
    def _divisor(self) -> int:
        return math.gcd(*self.numels)

    @cached_property
    def shares(self) -> tuple[slice, ...]:
        """The blocks that each member averages, without those that only fill up."""
        ends = [min(rank * self.share, self.total) for rank in range(self.num_members + 1)]
        return tuple(map(slice, ends[:-1], ends[1:]))

    @cached_property
    def lengths(self) -> DeviceCopies:
        """The elements of each block, int64."""
        lengths = torch.full((self.total,), self.block)
        for numel, end in zip(self.numels, self.starts[1:], strict=True):
            if numel % self.block:
                lengths[end - 1] = numel % self.block
        return DeviceCopies(lengths)

    @cached_property
    def firsts(self) -> DeviceCopies:
        """Where each block begins in the flat tensors, int64."""
        # After a tensor whose last block is short, blocks begin earlier by what it lacks.
        offsets = accumulate(self.numels, initial=0)
        lags = [offset - self.block * first for offset, first in zip(offsets, self.starts[:-1], strict=False)]
        return DeviceCopies(self.block * torch.arange(self.total) + self.spread(lags))

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a row for each block, short ones filled up with zeros: a view if none is short."""
        if self.are_whole:
            return flat.view(self.total, self.block)
        # Zeros behind a short block change neither its largest element nor a sum; a mean goes by `lengths`.
        rows = flat.new_zeros(self.total, self.block)
        torch._foreach_copy_(self.parts(rows), flat.split_with_sizes(list(self.numels)))
        return rows

    def parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return one flat view for each tensor into rows of all blocks."""
        flat = rows.view(-1)
        return [
            flat[first * self.block : first * self.block + numel]
            for first, numel in zip(self.starts[:-1], self.numels, strict=True)
        ]

    def pieces(self, some: slice) -> Iterator[tuple[slice, slice]]:
        """Yield the place of blocks in the flat tensors, and in separate rows; both in elements."""
        offsets = accumulate(self.numels, initial=0)
        for numel, first, stop, offset in zip(
            self.numels, self.starts[:-1], self.starts[1:], offsets, strict=False
        ):
            start, end = max(first, some.start), min(stop, some.stop)
            if start < end:
                here = slice((start - first) * self.block, min((end - first) * self.block, numel))
                there = (start - some.start) * self.block
                yield (
                    slice(offset + here.start, offset + here.stop),
                    slice(there, there + here.stop - here.start),
                )

    def spread(self, values: Sequence[int]) -> torch.Tensor:
        """Return a number for each tensor as one for each of its blocks."""
        return torch.tensor(values, dtype=torch.int64).repeat_interleave(torch.tensor(self.counts))
