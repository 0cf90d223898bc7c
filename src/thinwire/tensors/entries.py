"""How a bucket's few entries are sent: the positions of its chunks, and the layout of a message."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from thinwire.tensors.accelerators import DeviceCopies
from thinwire.tensors.coded import packed_bytes

SCALE_DTYPE = torch.bfloat16  # fp32's range; the residual keeps its rounding error
MAX_WORD_BITS = 16


@dataclass(frozen=True)
class Chunks:
    """A bucket's chunks of one length."""

    length: int  # elements per chunk
    kept: int  # entries sent per chunk
    runs: tuple[tuple[int, int], ...]  # of consecutive ones: the first one's start, and how many

    @property
    def count(self) -> int:
        """Number of chunks."""
        return sum(count for _, count in self.runs)

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the chunks as rows, (count, length): a view if they are contiguous, else a copy."""
        parts = [flat[first : first + count * self.length] for first, count in self.runs]
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        return together.view(self.count, self.length)


@dataclass(frozen=True)
class EntryLayout:
    """The layout of a bucket's chunks in a message.

    It has three streams of bits: marks, with one set bit per entry, which encode the high bits of positions;
    words, with the low bits of each entry's position and its code; and scales.
    """

    numels: tuple[int, ...]  # the elements of each parameter
    length: int  # elements of a chunk; the last one of a parameter may be shorter
    density: float  # share of a chunk's entries that is sent
    # Bits of an entry's value. With fewer than 16 they are codes, and each chunk has two scales; with 16 the
    # values themselves are sent in place of scales.
    bits: int

    @cached_property
    def parts(self) -> tuple[Chunks, ...]:
        """The chunks by length, in order."""
        runs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        first = 0
        for numel in self.numels:
            count, shorter = divmod(numel, self.length)
            if count:
                runs[self.length].append((first, count))
            if shorter:
                runs[shorter].append((first + count * self.length, 1))
            first += numel
        kept = {size: max(1, round(self.density * size)) for size in runs}
        return tuple(Chunks(size, kept[size], tuple(some)) for size, some in runs.items())

    @property
    def code_bits(self) -> int:
        """The bits of each entry's code."""
        return 0 if self.bits == 16 else self.bits

    @cached_property
    def low_bits(self) -> int:
        """The number of low position bits that are sent as they are: so about half of the marks are set."""
        return int(min(MAX_WORD_BITS - self.code_bits, -math.log2(self.density)))

    @cached_property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return sum(chunks.count for chunks in self.parts)

    @cached_property
    def num_entries(self) -> int:
        """Number of entries that are sent."""
        return sum(chunks.count * chunks.kept for chunks in self.parts)

    @cached_property
    def num_marks(self) -> int:
        """Number of bits for the high bits of all positions."""
        return sum(chunks.count * self._marks_of(chunks) for chunks in self.parts)

    def _marks_of(self, chunks: Chunks) -> int:
        return chunks.kept + (chunks.length - 1 >> self.low_bits)

    @cached_property
    def most(self) -> tuple[int, int, int]:
        """The largest numbers of elements, entries and marks of a chunk."""
        sizes = [(chunks.length, chunks.kept, self._marks_of(chunks)) for chunks in self.parts]
        lengths, entries, marks = zip(*sizes, strict=True)
        return max(lengths), max(entries), max(marks)

    @cached_property
    def stream_bytes(self) -> tuple[int, int, int]:
        """Bytes of marks, words and scales, in message order."""
        num_scales = 2 * self.num_chunks if self.code_bits else self.num_entries
        words = packed_bytes(self.num_entries, self.low_bits + self.code_bits)
        return packed_bytes(self.num_marks, 1), words, SCALE_DTYPE.itemsize * num_scales

    @property
    def num_bytes(self) -> int:
        """Bytes that a member sends: even, so that half of it, times the members, is an integer."""
        total = sum(self.stream_bytes)
        return total + total % 2

    def shares(self, num_members: int) -> list[tuple[int, int]]:
        """Return for each parameter its entries, and its bytes, counted as for an all-reduce."""
        alone = [replace(self, numels=(numel,)) for numel in self.numels]
        word_bits, scale_bits = self.low_bits + self.bits, 32 * bool(self.code_bits)
        bits = [one.num_entries * word_bits + one.num_marks + one.num_chunks * scale_bits for one in alone]
        # Streams cover the whole bucket, so shares are rounded: at their ends, so that they add up.
        ends = [end * num_members // 16 for end in accumulate(bits, initial=0)]
        ends[-1] = self.num_bytes * num_members // 2
        return [(one.num_entries, ends[i + 1] - ends[i]) for i, one in enumerate(alone)]

    @cached_property
    def table(self) -> DeviceCopies:
        """The table of chunks, int64, (6, chunks).

        For each chunk: its start in the bucket, marks minus entries before it, its entries, its elements,
        entries before it, and its number in bucket order.
        """
        columns, marks, entries = [], 0, 0
        for chunks in self.parts:
            for first, count in chunks.runs:
                for start in range(first, first + count * chunks.length, chunks.length):
                    columns.append((start, marks - entries, chunks.kept, chunks.length, entries))
                    marks += self._marks_of(chunks)
                    entries += chunks.kept
        table = torch.tensor(columns, dtype=torch.int64, device="cpu").T
        return DeviceCopies(torch.cat([table, table[0].argsort().argsort().unsqueeze(0)]))

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all chunks start and end at a multiple of 8 elements."""
        parts_end = [chunks.length for chunks in self.parts]
        parts_end += [first for chunks in self.parts for first, _ in chunks.runs]
        return all(number % 8 == 0 for number in parts_end)
