"""How a bucket is cut into blocks, each with its own scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from thinwire.tensors.accelerators import DeviceCopies


@dataclass(frozen=True)
class Blocks:
    """How consecutive flat tensors are divided into blocks of `block` elements.

    Each tensor begins a new block, and its last block may be shorter. So its result does not depend on its
    neighbours. All members of the group average the same number of blocks.
    """

    numels: tuple[int, ...]
    block: int
    num_members: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks of each tensor."""
        return tuple(-(-numel // self.block) for numel in self.numels)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of each tensor's first block, followed by the total."""
        return tuple(accumulate(self.counts, initial=0))

    @cached_property
    def total(self) -> int:
        """The number of all blocks."""
        return self.starts[-1]

    @cached_property
    def share(self) -> int:
        """The number of blocks that each member averages, including padding blocks."""
        # The same for all members: the rows of an all-to-all have one length. Rows are not padded to 16
        # bytes: NCCL then copies single bytes, 32 in flight per thread, but is still faster than the networks
        # that few bits are for. Padding would make small buckets send more, and change which member averages
        # a block, on which residuals depend.
        return -(-self.total // self.num_members)

    @cached_property
    def are_whole(self) -> bool:
        """Whether all blocks have the same length."""
        return self.divisor % self.block == 0

    @cached_property
    def divisor(self) -> int:
        """The largest number that divides the size of every tensor."""
        return math.gcd(*self.numels)

    @cached_property
    def shares(self) -> tuple[slice, ...]:
        """The blocks that each member averages, without padding blocks."""
        ends = [min(rank * self.share, self.total) for rank in range(self.num_members + 1)]
        return tuple(map(slice, ends[:-1], ends[1:]))

    @cached_property
    def lengths(self) -> DeviceCopies:
        """The number of elements of each block, int64."""
        lengths = torch.full((self.total,), self.block, device="cpu")
        for numel, end in zip(self.numels, self.starts[1:], strict=True):
            if numel % self.block:
                lengths[end - 1] = numel % self.block
        return DeviceCopies(lengths)

    @cached_property
    def offsets(self) -> DeviceCopies:
        """The start of each block in the flat tensors, int64."""
        # After a tensor with a short last block, blocks start earlier by the missing elements.
        offsets = accumulate(self.numels, initial=0)
        lags = [offset - self.block * first for offset, first in zip(offsets, self.starts[:-1], strict=False)]
        lag_of_blocks = torch.tensor(lags, dtype=torch.int64, device="cpu").repeat_interleave(
            torch.tensor(self.counts, device="cpu")
        )
        return DeviceCopies(self.block * torch.arange(self.total, device="cpu") + lag_of_blocks)

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a row for each block, short ones padded with zeros: a view if none is short."""
        if self.are_whole:
            return flat.view(self.total, self.block)
        # Zero padding changes neither a block's largest element nor its sum; a mean uses `lengths`.
        rows = flat.new_zeros(self.total, self.block)
        torch._foreach_copy_(self.parts(rows), flat.split_with_sizes(list(self.numels)))
        return rows

    def parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return a flat view for each tensor into the rows of all blocks."""
        flat = rows.view(-1)
        return [
            flat[first * self.block : first * self.block + numel]
            for first, numel in zip(self.starts[:-1], self.numels, strict=True)
        ]

    def pieces(self, some: slice) -> Iterator[tuple[slice, slice]]:
        """Yield slices of blocks in the flat tensors, and in separate rows; both in elements."""
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
