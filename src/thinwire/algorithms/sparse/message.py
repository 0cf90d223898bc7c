"""A bucket's message: the largest entries of all its chunks, where they stand and what they are.

Where they stand: of each chunk in ascending order, the low bits of each position as they are, and the high
ones as marks: a bit that is set for each entry, and one that is not for each time that the high bits grow by
one. 64 positions of 4,096 take 8 bits each, where the number of a position takes 12; and always as many.
(Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", JACM 1974.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from thinwire.algorithms.sparse.levels import SCALE_DTYPE, codes_of, end_levels, on_the_wire, values_of
from thinwire.kernels.dispatch import entry_kernels_for
from thinwire.tensors.chunks import Chunks
from thinwire.tensors.packing import pack, packed_bytes, unpack

MAX_WORD_BITS = 16


class Entries(NamedTuple):
    """What all members have sent of a bucket.

    Attributes:
        places: In the bucket, int64, (members, entries); of each member no place twice.
        values: (members, entries).
        scales: What values were made of: not finite where something of a member was not.
    """

    places: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Message:
    """How the entries of a bucket are packed.

    Attributes:
        parts: The chunks, by length.
        density: Share of their entries that is sent.
        bits: Of an entry's value; 16 for bf16.

    Examples:
        >>> from thinwire.tensors.chunks import Run
        >>> message = Message((Chunks(4096, 64, (Run(0, 0, 1),)),), density=1 / 64, bits=2)
        >>> gradient = torch.zeros(4096).index_fill_(0, torch.arange(0, 128, 2), 3.0)
        >>> packed = message.packed(gradient)
        >>> entries = message.unpacked(packed.view(1, -1), torch.float32)
        >>> len(packed), entries.places[0, -3:], entries.values[0, -3:]
        (84, tensor([122, 124, 126]), tensor([3., 3., 3.]))
    """

    parts: tuple[Chunks, ...]
    density: float
    bits: int
    # By device, and kept: what is copied there from the host in each step has the host wait each time.
    _sent: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def low_bits(self) -> int:
        """Of each position, those that are sent as they are: so many that about half of the marks are set."""
        most = MAX_WORD_BITS if self.bits == 16 else MAX_WORD_BITS - self.bits
        return int(min(most, -math.log2(self.density)))

    @property
    def word_bits(self) -> int:
        """Of each entry, what is packed as one number: the low bits of its position, and its value's code."""
        return self.low_bits if self.bits == 16 else self.low_bits + self.bits

    def marks_of(self, chunks: Chunks) -> int:
        """Return the bits that stand for the high bits of a chunk's positions."""
        return chunks.kept + (chunks.length - 1 >> self.low_bits)

    def bits_of(self, chunks: Chunks) -> int:
        """Return the bits that the entries of a chunk take."""
        return chunks.kept * (self.low_bits + self.bits) + self.marks_of(chunks) + self._scale_bits

    @property
    def _scale_bits(self) -> int:
        return 0 if self.bits == 16 else 2 * 8 * SCALE_DTYPE.itemsize

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return sum(chunks.count for chunks in self.parts)

    @property
    def num_entries(self) -> int:
        """Entries that are sent."""
        return sum(chunks.count * chunks.kept for chunks in self.parts)

    @property
    def num_marks(self) -> int:
        """Bits for the high bits of all positions."""
        return sum(chunks.count * self.marks_of(chunks) for chunks in self.parts)

    @cached_property
    def stream_bytes(self) -> tuple[int, int, int]:
        """Bytes of marks, of words, and of scales (or of values in bf16), in the order of the message."""
        scale_bits = self.num_entries * 16 if self.bits == 16 else self.num_chunks * self._scale_bits
        return (
            packed_bytes(self.num_marks, 1),
            packed_bytes(self.num_entries, self.word_bits),
            scale_bits // 8,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that a member sends: even, so that half of it, times the members, is a whole number."""
        total = sum(self.stream_bytes)
        return total + total % 2

    def _chunks(self, device: torch.device) -> torch.Tensor:
        """Return of each chunk: where it begins in the bucket, marks less entries before, entries.

        int64, (3, chunks).
        """
        if device in self._sent:
            return self._sent[device]
        # In Python, once for a plan, which serves all steps.
        columns, marks, entries = [], 0, 0
        for chunks in self.parts:
            for run in chunks.runs:
                for index in range(run.num_chunks):
                    start = run.first + index * chunks.length
                    columns.append((start, marks - entries, chunks.kept))
                    marks += self.marks_of(chunks)
                    entries += chunks.kept
        self._sent[device] = torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device)
        return self._sent[device]

    def kept(self, device: torch.device) -> torch.Tensor:
        """Return the entries of each chunk, int64, (chunks,)."""
        return self._chunks(device)[2]

    def _of_entries(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return of each entry its chunk, where that begins, and its mark if the high bits were zero."""
        starts, shifts, kept = self._chunks(device)
        chunk = torch.arange(self.num_chunks, device=device)
        # With its size given: else the host would wait for a device to count.
        chunk = chunk.repeat_interleave(kept, output_size=self.num_entries)
        return chunk, starts[chunk], shifts[chunk] + torch.arange(self.num_entries, device=device)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Of the runs of chunks, in the order of the entries: the parameter's index, and entries."""
        return tuple(
            (run.parameter, run.num_chunks * chunks.kept) for chunks in self.parts for run in chunks.runs
        )

    def packed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the largest entries of a bucket as bytes.

        Returns:
            uint8, (`num_bytes`,).
        """
        found, picked, ends = [], [], []
        kernels = entry_kernels_for(flat)
        # Chunks of one length at a time.
        for chunks in self.parts:
            positions, values = kernels.largest(flat, chunks)
            found.append(positions.view(-1))
            picked.append(values.view(-1))
            if self.bits != 16:
                ends.append(end_levels(values, self.bits))
        chunk, _, first_marks = self._of_entries(flat.device)
        positions, values = torch.cat(found), torch.cat(picked)
        # Of all chunks at once.
        scales = on_the_wire(torch.cat(ends) if ends else values)
        marks = torch.zeros(self.num_marks, dtype=torch.uint8, device=flat.device)
        streams = [pack(marks.index_fill_(0, first_marks + (positions >> self.low_bits), 1), 1)]
        words = positions & (1 << self.low_bits) - 1
        if self.bits != 16:
            words = (words << self.bits) + codes_of(values, chunk, scales, self.bits)
        if self.word_bits:
            streams.append(pack(words, self.word_bits))
        # Words and marks first: what ends within a byte is filled up there, and scales are whole bytes.
        packed = torch.cat([*streams, scales.view(-1).view(torch.uint8)])
        return torch.nn.functional.pad(packed, (0, self.num_bytes - len(packed)))

    def unpacked(self, gathered: torch.Tensor, dtype: torch.dtype) -> Entries:
        """Return what all members have packed, without waiting for an accelerator."""
        streams = gathered[:, : sum(self.stream_bytes)]
        marks, words, scale_bytes = streams.split_with_sizes(self.stream_bytes, dim=1)
        chunk, starts, first_marks = self._of_entries(gathered.device)
        set_marks = unpack(marks, 1, self.num_marks)
        # The n-th mark that is set is the n-th entry's. All that are not go behind the last, and are cut off.
        number = set_marks.cumsum(-1).sub_(1).masked_fill_(set_marks == 0, self.num_entries)
        places = torch.arange(self.num_marks, device=gathered.device).expand_as(number)
        behind = places.new_empty(len(gathered), self.num_entries + 1)
        high = behind.scatter_(1, number, places)[:, :-1] - first_marks
        places = starts + (high << self.low_bits)
        # Copied: bytes that begin anywhere can't be viewed as a type of several bytes.
        scales = scale_bytes.clone(memory_format=torch.contiguous_format).view(SCALE_DTYPE)
        if self.bits == 16:
            if self.word_bits:
                places += unpack(words, self.word_bits, self.num_entries)
            return Entries(places, scales.to(dtype), scales)
        codes = unpack(words, self.word_bits, self.num_entries)
        places += codes >> self.bits
        scales = scales.view(len(gathered), self.num_chunks, 2)
        codes = codes & (1 << self.bits) - 1
        return Entries(places, values_of(codes, chunk, scales, self.bits, dtype), scales)
