"""How few entries of a bucket travel: where its chunks lie, and what a message has of each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from thinwire.plan import ParameterSpec
from thinwire.tensors.accelerators import DeviceCopies
from thinwire.tensors.coded import packed_bytes

SCALE_DTYPE = torch.bfloat16  # fp32's range; what its rounding loses stays in the residual
MAX_WORD_BITS = 16


class ChunkRun(NamedTuple):
    """Chunks of one parameter that lie one behind the other."""

    parameter: int  # by index in the bucket
    first: int  # where the first one begins in the bucket, in elements
    num_chunks: int


@dataclass(frozen=True)
class Chunks:
    """The chunks of a bucket that have one length."""

    length: int  # elements of each
    kept: int  # entries of each that are sent
    runs: tuple[ChunkRun, ...]  # where they lie

    @property
    def count(self) -> int:
        """Number of chunks."""
        return sum(run.num_chunks for run in self.runs)

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the chunks as rows, (count, length): a view if they lie together, else a copy."""
        parts = [flat[run.first : run.first + run.num_chunks * self.length] for run in self.runs]
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        return together.view(self.count, self.length)


def chunks_of(specs: Sequence[ParameterSpec], length: int, density: float) -> tuple[Chunks, ...]:
    """Cut each parameter into chunks, of which the last may be shorter; return them by length, in order."""
    runs: dict[int, list[ChunkRun]] = defaultdict(list)
    first = 0
    for parameter, spec in enumerate(specs):
        count, shorter = divmod(spec.numel, length)
        if count:
            runs[length].append(ChunkRun(parameter, first, count))
        if shorter:
            runs[shorter].append(ChunkRun(parameter, first + count * length, 1))
        first += spec.numel
    return tuple(Chunks(size, max(1, round(density * size)), tuple(some)) for size, some in runs.items())


@dataclass(frozen=True)
class EntryLayout:
    """The part of a message that stands for a bucket's chunks.

    It is three streams of bits: marks, a bit set for each entry, which stand for the high bits of positions;
    words, of each entry the low bits of its position and its code; and scales.

    Attributes:
        parts: The chunks, by length.
        density: Share of their entries that is sent.
        bits: Of an entry's value. Those of fewer than 16 are codes, of which each chunk has two scales; those
            of 16 are sent in the place of scales.
    """

    parts: tuple[Chunks, ...]
    density: float
    bits: int

    @property
    def code_bits(self) -> int:
        """The bits of each entry's code."""
        return 0 if self.bits == 16 else self.bits

    @cached_property
    def low_bits(self) -> int:
        """The bits of each position that are sent as they are: with them about half of the marks are set."""
        return int(min(MAX_WORD_BITS - self.code_bits, -math.log2(self.density)))

    @cached_property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return sum(chunks.count for chunks in self.parts)

    @cached_property
    def num_entries(self) -> int:
        """Entries that are sent."""
        return sum(chunks.count * chunks.kept for chunks in self.parts)

    @cached_property
    def num_marks(self) -> int:
        """Bits for the high bits of all positions."""
        return sum(chunks.count * self._marks_of(chunks) for chunks in self.parts)

    def _marks_of(self, chunks: Chunks) -> int:
        return chunks.kept + (chunks.length - 1 >> self.low_bits)

    @cached_property
    def most(self) -> tuple[int, int, int]:
        """Elements, entries and marks that a chunk has at most."""
        sizes = [(chunks.length, chunks.kept, self._marks_of(chunks)) for chunks in self.parts]
        lengths, entries, marks = zip(*sizes, strict=True)
        return max(lengths), max(entries), max(marks)

    @cached_property
    def stream_bytes(self) -> tuple[int, int, int]:
        """Bytes of marks, of words, and of scales, in the order of the message."""
        num_scales = 2 * self.num_chunks if self.code_bits else self.num_entries
        words = packed_bytes(self.num_entries, self.low_bits + self.code_bits)
        return packed_bytes(self.num_marks, 1), words, SCALE_DTYPE.itemsize * num_scales

    @property
    def num_bytes(self) -> int:
        """Bytes that a member sends: even, so that half of it, times the members, is a whole number."""
        total = sum(self.stream_bytes)
        return total + total % 2

    def shares(self, num_parameters: int, num_members: int) -> list[tuple[int, int]]:
        """Return for each parameter its entries, and its bytes, counted as of an all-reduce."""
        entries, bits = [0] * num_parameters, [0] * num_parameters
        for chunks in self.parts:
            word_bits = chunks.kept * (self.low_bits + self.bits)
            chunk_bits = word_bits + self._marks_of(chunks) + 32 * bool(self.code_bits)
            for run in chunks.runs:
                entries[run.parameter] += run.num_chunks * chunks.kept
                bits[run.parameter] += run.num_chunks * chunk_bits
        # Streams are of the whole bucket, so shares are rounded: by where they end, so that they add up.
        ends = [end * num_members // 16 for end in accumulate(bits, initial=0)]
        ends[-1] = self.num_bytes * num_members // 2
        return [(count, ends[i + 1] - ends[i]) for i, count in enumerate(entries)]

    @cached_property
    def table(self) -> DeviceCopies:
        """The table of chunks, int64, (6, chunks).

        Of each: where it begins in the bucket, marks less entries before, entries, elements, entries before,
        and its number in the order of the bucket.
        """
        columns, marks, entries = [], 0, 0
        for chunks in self.parts:
            for run in chunks.runs:
                for start in range(run.first, run.first + run.num_chunks * chunks.length, chunks.length):
                    columns.append((start, marks - entries, chunks.kept, chunks.length, entries))
                    marks += self._marks_of(chunks)
                    entries += chunks.kept
        table = torch.tensor(columns, dtype=torch.int64).T
        return DeviceCopies(torch.cat([table, table[0].argsort().argsort().unsqueeze(0)]))

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all chunks begin and end at a multiple of 8 elements."""
        parts_end = [chunks.length for chunks in self.parts]
        parts_end += [run.first for chunks in self.parts for run in chunks.runs]
        return all(number % 8 == 0 for number in parts_end)
