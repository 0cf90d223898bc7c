"""Blocks as they are sent: packed codes for the levels of a codebook, and a scale for each block.

If an element of a block is not finite, its scale is not either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch

GROUP = 8  # codes: the fewest that fill whole bytes for any number of bits
MAX_TOGETHER = 7  # codes of up to this many bits are packed eight at a time, longer ones bit by bit


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes of packed codes."""
    return -(-count * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of up to 16 bits, lowest first: uint8, shape (…, `packed_bytes(count, bits)`)."""
    count = codes.shape[-1]
    if bits == 8 or not codes.numel():
        shape = (*codes.shape[:-1], packed_bytes(count, bits))
        return codes.to(torch.uint8) if bits == 8 else codes.new_empty(shape, dtype=torch.uint8)
    if bits > MAX_TOGETHER:
        single = codes.int().unsqueeze(-1) >> torch.arange(bits, dtype=torch.int32, device=codes.device)
        return pack(single.bitwise_and_(1).flatten(-2), 1)
    groups = -(-count // GROUP)
    wide = codes.to(torch.uint8)
    if count % GROUP:
        wide = torch.nn.functional.pad(wide, (0, groups * GROUP - count))
    # The eight bytes of a group are one integer, in which its codes are shifted together. Codes below 128 do
    # not use the sign bit, so that right shifts bring in zeros.
    words = wide.contiguous().view(torch.int64)
    for shift, lower, upper in merges(bits):
        words = (words & lower).bitwise_or_((words >> shift).bitwise_and_(upper))
    together = words.view(torch.uint8).view(*codes.shape[:-1], groups, GROUP)[..., :bits]
    return together.flatten(-2)[..., : packed_bytes(count, bits)]


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack codes: shape (…, count), uint8 up to 8 bits and int32 above."""
    dtype = torch.uint8 if bits <= 8 else torch.int32
    if bits == 8 or not packed.numel():
        return packed if bits == 8 else packed.new_empty((*packed.shape[:-1], count), dtype=dtype)
    if bits > MAX_TOGETHER:
        single = unpack(packed, 1, count * bits).reshape(*packed.shape[:-1], count, bits)
        positions = torch.arange(bits, dtype=torch.int32, device=packed.device)
        return (single << positions).sum(-1, dtype=dtype)
    groups = -(-count // GROUP)
    if packed.shape[-1] != groups * bits:
        packed = torch.nn.functional.pad(packed, (0, groups * bits - packed.shape[-1]))
    words = packed.new_zeros(*packed.shape[:-1], groups, GROUP)
    words[..., :bits] = packed.reshape(*packed.shape[:-1], groups, bits)
    apart = words.flatten(-2).view(torch.int64)
    for shift, lower, upper in reversed(merges(bits)):
        apart = (apart & lower).bitwise_or_((apart & upper) << shift)
    return apart.view(torch.uint8)[..., :count]


@cache
def merges(bits: int) -> list[tuple[int, int, int]]:
    """Return how eight codes, a byte each, are shifted together: in pairs, then in fours, then all.

    For each step: by how many bits the upper of two neighbours moves down, the mask of all lower ones, and
    the mask of the upper ones at their new place.
    """
    steps = []
    for width in (8, 16, 32):
        used = bits * width // 8
        lower = sum(((1 << used) - 1) << start for start in range(0, 64, 2 * width))
        steps.append((width - used, lower, lower << used))
    return steps


Statistic: TypeAlias = Literal["largest", "least squares"]


@dataclass(frozen=True)
class Codebook:
    """The levels of codes with some number of bits."""

    bits: int
    levels: tuple[float, ...]  # ascending and symmetric; a code is the index of one
    # The scale of a block. "largest": the largest element over the last level, so nothing is cut off. "least
    # squares": fits the levels of codes that were chosen with the root mean square as scale.
    statistic: Statistic
    is_linear: bool = False  # whether levels are consecutive integers
    # If not 0, the level at k from the middle is k · (`cubic` + k²), computed exactly without a table.
    cubic: int = 0
    # When codes are chosen, the largest element is clamped to this range, in root mean squares.
    reach: tuple[float, float] = (1.0, 1.0)


def _symmetric(*magnitudes: float) -> tuple[float, ...]:
    """Return levels of both signs; zero only once."""
    return (*[-magnitude for magnitude in reversed(magnitudes) if magnitude], *magnitudes)


def _linear(bits: int) -> Codebook:
    """Return consecutive integers, equally many of both signs."""
    last = 2 ** (bits - 1) - 1
    return Codebook(bits, tuple(map(float, range(-last, last + 1))), "largest", is_linear=True)


# Relative squared error of one member's gradients in blocks of 64 (byte GPT with AdamW, mean of early, mid
# and late training; for 8, 6 and 5 bits, with a Gaussian, 0.00004, 0.0006 and 0.0025):
#   4 bits   these 0.0086; the best fifteen 0.0083; sixteen, without zero, 0.0073; NF4 0.0083; evenly
#            spaced 0.0103; FP4 (E2M1) 0.0114; E3M0 0.0367. Zeros must stay zeros: Adam moves a parameter
#            however small its gradient is.
#   3 bits   these 0.0330, with zero 0.0416; times the largest 0.0357 and 0.0497; evenly spaced 0.0562.
#   2 bits   these 0.105; three levels, with zero, 0.168.
# These are with the root mean square as scale. The scale that fits the same codes best loses 1 to 5 % less in
# 3 bits, 5 to 11 % less in 2. It loses nothing if all magnitudes are equal, which both rounds would otherwise
# make 2.3 times as large. The result is then a projection: for any block, the error is smaller than the
# value, and no residual grows. This holds after the second round too: due to `reach`, the largest element has
# the last level, and then no level is raised by twice as much as another. In 1 bit the scale that fits is the
# mean magnitude, whatever the scale was when codes were chosen.
CODEBOOKS: Mapping[int, Codebook] = MappingProxyType(
    {
        **{bits: _linear(bits) for bits in (8, 6, 5)},
        4: Codebook(4, _symmetric(*(float(k * (112 + k * k)) for k in range(8))), "largest", cubic=112),
        3: Codebook(3, _symmetric(0.245094, 0.756005, 1.343909, 2.151946), "least squares", reach=(1.8, 4.0)),
        2: Codebook(2, _symmetric(0.452780, 1.510418), "least squares", reach=(1.8, 3.2)),
        1: Codebook(1, (-1.0, 1.0), "least squares", reach=(2.0, 4.0)),
    }
)
"""Codebooks by bits."""


# bf16, which has fp32's range: half of fp32's bytes allow blocks of half the length at the same cost.
SCALE_BYTES = 2


@dataclass(frozen=True)
class Coded:
    """Blocks as they are sent: rows of equally many blocks, each with the scales first, then the codes.

    Kernels write codes directly to the message, and read them from the received one, without copies.
    """

    message: torch.Tensor  # uint8, shape (rows, bytes); the bytes of a row are contiguous
    share: int  # blocks per row

    @property
    def scales(self) -> torch.Tensor:
        """bf16, shape (rows, blocks); a view."""
        return self.message[:, : SCALE_BYTES * self.share].view(torch.bfloat16)

    @property
    def codes(self) -> torch.Tensor:
        """Packed, uint8, shape (rows, blocks, bytes); a view."""
        codes = self.message[:, SCALE_BYTES * self.share :]
        return codes.view(len(codes), self.share, codes.shape[1] // self.share)

    @classmethod
    def empty(cls, num_blocks: int, rows: int, share: int, size: int) -> Coded:
        """Allocate blocks on the CPU. Padding blocks in the last rows are zero."""
        coded = cls(torch.empty(rows, share * (SCALE_BYTES + size), dtype=torch.uint8, device="cpu"), share)
        # Padding is sent too, and a scale that is not finite would roll the step back.
        for row in range(num_blocks // share, rows):
            used = max(0, num_blocks - row * share)
            coded.scales[row, used:] = 0
            coded.codes[row, used:] = 0
        return coded

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor, rows: int, share: int) -> Coded:
        """Return a message of blocks, padded with zeros."""
        missing = rows * share - len(scales)
        if missing:
            codes = torch.cat([codes, codes.new_zeros(missing, codes.shape[1])])
            scales = torch.cat([scales, scales.new_zeros(missing)])
        # One message of bytes: two would cost another latency.
        parts = [scales.view(torch.uint8).view(rows, -1), codes.view(rows, -1)]
        return cls(torch.cat(parts, dim=1), share)

    @classmethod
    def arrived(cls, message: torch.Tensor, share: int) -> Coded:
        """Return the received message: a copy only if it is not aligned for bf16."""
        is_even = message.storage_offset() % SCALE_BYTES == 0 and message.stride(0) % SCALE_BYTES == 0
        return cls(message if is_even else message.contiguous(), share)


def block_bytes(block: int, bits: int) -> int:
    """Return the bytes of a block, including its scale."""
    return packed_bytes(block, bits) + SCALE_BYTES
