"""How TopK's entries travel: their places, and levels of few bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from thinwire.kernels.dispatch import entry_kernels_for
from thinwire.tensors import accelerators
from thinwire.tensors.blocks import Chunks
from thinwire.tensors.coded import pack, packed_bytes, unpack

SCALE_DTYPE = torch.bfloat16  # fp32's range; what its rounding loses stays in the residual

# In how many parts of a chunk's largest magnitude the others are counted where sums must not depend on their
# order. The sum of the 65,536 that a chunk has at most is below 2^63.
PARTS = 1 << 46


def on_the_wire(values: torch.Tensor) -> torch.Tensor:
    """Return values in bf16, where finite ones stay so."""
    # Rounded up, the largest numbers of fp32 and all above of fp64 would be infinite, and the step skipped.
    limit = torch.finfo(SCALE_DTYPE).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(SCALE_DTYPE)


def end_levels(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the lowest and the highest level of each row, to be rounded by `on_the_wire`.

    Returns:
        (rows, 2); not finite where something of a row is not.

    Examples:
        >>> end_levels(torch.tensor([[1.0, -1.5, 7.0, -9.0]]), bits=2).tolist()
        [[1.25, 8.0]]
    """
    magnitudes = rows.abs()
    peaks = magnitudes.amax(1, keepdim=True)
    if bits == 2 and rows.shape[1] > 1:
        return _two_means(magnitudes, peaks)
    return torch.cat([magnitudes.amin(1, keepdim=True), peaks], dim=1)


def codes_of(values: torch.Tensor, chunk: torch.Tensor, ends: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the number of each value's nearest level, and its sign in the bit above.

    Returns:
        uint8, (entries,).
    """
    lowest, step, highest_code = _steps(ends, bits, values.dtype)
    # Where all that is sent of a chunk has one magnitude there is no step, and any code stands for it.
    divisor = step.where(step > 0, 1).index_select(0, chunk)
    codes = values.abs().sub_(lowest.index_select(0, chunk)).div_(divisor)
    # What is not finite has no code, and needs none: the levels of its chunk show it.
    codes.round_().clamp_(0, highest_code).nan_to_num_(0)
    return codes.to(torch.uint8) | ((values < 0).to(torch.uint8) << bits - 1)


def values_of(
    codes: torch.Tensor, chunk: torch.Tensor, ends: torch.Tensor, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return what codes stand for."""
    lowest, step, highest_code = _steps(ends, bits, dtype)
    magnitudes = step.index_select(1, chunk).mul_(codes & highest_code).add_(lowest.index_select(1, chunk))
    return torch.where(codes > highest_code, -magnitudes, magnitudes)


def _steps(ends: torch.Tensor, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the lowest level, how far levels lie apart, and the number of the highest."""
    lowest, highest = ends.to(dtype).unbind(-1)
    highest_code = (1 << bits - 1) - 1
    return lowest, (highest - lowest) / highest_code, highest_code


def _two_means(magnitudes: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the two levels of each row, (rows, 2), from which its magnitudes lie least far, squared.

    They are the means of those below some border and of those above it, and all borders are tried.
    """
    # So that no square overflows. What is not finite shows by its unit, whatever becomes of it before.
    units = peaks + (peaks == 0)
    ordered = (magnitudes / units).sort(1).values
    if accelerators.pays_per_launch(ordered.device):
        # Whole numbers have the same sum in any order, and CUDA does not promise one.
        sums = ordered.mul_(PARTS).to(torch.int64).cumsum(1).to(ordered.dtype).div_(PARTS)
    else:
        sums = ordered.cumsum(1)
    below, total = sums[:, :-1], sums[:, -1:]
    num_below = torch.arange(1, magnitudes.shape[1], dtype=sums.dtype, device=sums.device).expand_as(below)
    num_above = magnitudes.shape[1] - num_below
    above = total - below
    spread = torch.addcdiv(below.square() / num_below, above.square(), num_above)
    border = spread.argmax(1, keepdim=True)
    means = [(side / number).gather(1, border) for side, number in ((below, num_below), (above, num_above))]
    return torch.cat(means, dim=1) * units


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
        >>> from thinwire.tensors.blocks import Run
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
