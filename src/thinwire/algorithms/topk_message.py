"""How TopK's entries travel: high bits of their positions as marks, low bits with codes, and scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from thinwire.kernels.base import EntryLayout
from thinwire.tensors.blocks import Chunks
from thinwire.tensors.coded import pack, packed_bytes, unpack

SCALE_DTYPE = torch.bfloat16  # fp32's range; what its rounding loses stays in the residual
MAX_WORD_BITS = 16


@dataclass(frozen=True)
class TopKMessage:
    """How the entries of a bucket are packed.

    Attributes:
        parts: The chunks, by length.
        density: Share of their entries that is sent.
        bits: Of an entry's value. Those of fewer than 16 are codes, of which each chunk has two scales; those
            of 16 are sent in the place of scales.
    """

    parts: tuple[Chunks, ...]
    density: float
    bits: int
    # Kept by device: else the host would wait each time for a copy.
    _layouts: dict[torch.device, EntryLayout] = field(default_factory=dict, compare=False, repr=False)

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
            chunk_bits = (
                chunks.kept * (self.low_bits + self.bits) + self._marks_of(chunks) + 32 * bool(self.code_bits)
            )
            for run in chunks.runs:
                entries[run.parameter] += run.num_chunks * chunks.kept
                bits[run.parameter] += run.num_chunks * chunk_bits
        # Streams are of the whole bucket, so shares are rounded: by where they end, so that they add up.
        ends = [end * num_members // 16 for end in accumulate(bits, initial=0)]
        ends[-1] = self.num_bytes * num_members // 2
        return [(count, ends[i + 1] - ends[i]) for i, count in enumerate(entries)]

    @cached_property
    def runs(self) -> Sequence[tuple[int, int]]:
        """For the runs of chunks, in the order of the entries: the parameter's index, and entries."""
        return [(run.parameter, run.num_chunks * chunks.kept) for chunks in self.parts for run in chunks.runs]

    def layout_on(self, device: torch.device) -> EntryLayout:
        """Return where chunks lie, and what is sent of them; made once for each device."""
        if device not in self._layouts:
            # In Python, once for a plan, which serves all steps.
            columns, marks, entries = [], 0, 0
            for chunks in self.parts:
                for run in chunks.runs:
                    for start in range(run.first, run.first + run.num_chunks * chunks.length, chunks.length):
                        columns.append((start, marks - entries, chunks.kept, chunks.length, entries))
                        marks += self._marks_of(chunks)
                        entries += chunks.kept
            table = torch.tensor(columns, dtype=torch.int64).T
            # Number them as they lie in the bucket: parameter by parameter.
            numbers = table[0].argsort().argsort()
            sizes = [(chunks.length, chunks.kept, self._marks_of(chunks)) for chunks in self.parts]
            self._layouts[device] = EntryLayout(
                torch.cat([table, numbers.unsqueeze(0)]).to(device),
                self.num_chunks,
                self.num_entries,
                tuple(map(max, zip(*sizes, strict=True))),
                self.low_bits,
                self.code_bits,
                self.stream_bytes,
                self.num_bytes,
                not bool((table[[0, 3]] % 8).any()),
            )
        return self._layouts[device]

    def chunk_of_entries(self, device: torch.device) -> torch.Tensor:
        """Return which chunk each entry is of."""
        chunk = torch.arange(self.num_chunks, device=device)
        # With its size given: else the host would wait for a device to count.
        return chunk.repeat_interleave(self.layout_on(device).table[2], output_size=self.num_entries)

    def _first_marks(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return each entry's mark if the high bits of its position were zero."""
        less_entries = self.layout_on(chunk.device).table[1]
        return less_entries[chunk] + torch.arange(self.num_entries, device=chunk.device)

    def packed(
        self, positions: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, chunk: torch.Tensor
    ) -> torch.Tensor:
        """Return entries as bytes, (`num_bytes`,).

        Args:
            positions: In their chunks, int64, (entries,), ascending in each.
            codes: Of few bits, (entries,).
            scales: Of each chunk two; or, of 16 bits, the values.
            chunk: From `chunk_of_entries`.
        """
        marks = torch.zeros(self.num_marks, dtype=torch.uint8, device=positions.device)
        marks.index_fill_(0, self._first_marks(chunk) + (positions >> self.low_bits), 1)
        streams = [pack(marks, 1)]
        words = positions & (1 << self.low_bits) - 1
        if self.code_bits:
            words = (words << self.code_bits) + codes
        if self.low_bits + self.code_bits:
            streams.append(pack(words, self.low_bits + self.code_bits))
        # Words and marks first: what ends within a byte is filled up there, and scales are whole bytes.
        packed = torch.cat([*streams, scales.view(-1).view(torch.uint8)])
        return torch.nn.functional.pad(packed, (0, self.num_bytes - len(packed)))

    def unpacked(
        self, gathered: torch.Tensor, chunk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all members' indices in the bucket, codes and scales, without waiting for an accelerator."""
        streams = gathered[:, : sum(self.stream_bytes)].split_with_sizes(self.stream_bytes, dim=1)
        marks, packed_words, scale_bytes = streams
        set_marks = unpack(marks, 1, self.num_marks)
        # The n-th mark that is set is the n-th entry's. All that are not go behind the last, and are cut off.
        number = set_marks.cumsum(-1).sub_(1).masked_fill_(set_marks == 0, self.num_entries)
        indices = torch.arange(self.num_marks, device=gathered.device).expand_as(number)
        behind = indices.new_empty(len(gathered), self.num_entries + 1)
        high = behind.scatter_(1, number, indices)[:, :-1] - self._first_marks(chunk)
        indices = self.layout_on(chunk.device).table[0, chunk] + (high << self.low_bits)
        # Copied: bytes that begin anywhere can't be viewed as a type of several bytes.
        scales = scale_bytes.clone(memory_format=torch.contiguous_format).view(SCALE_DTYPE)
        codes = packed_words
        if self.low_bits + self.code_bits:
            words = unpack(packed_words, self.low_bits + self.code_bits, self.num_entries)
            indices += words >> self.code_bits
            codes = words & (1 << self.code_bits) - 1
        return indices, codes, scales
