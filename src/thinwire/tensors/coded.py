"""Blocks as they travel: codes for the levels of a codebook, packed, and a scale for each block.

A block that has anything that is not finite has such a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch

from thinwire.errors import ConfigError

MAX_BITS = 16
GROUP = 8  # codes: the fewest that fill whole bytes, whatever the bits
MAX_TOGETHER = 7  # bits of codes that are packed eight at a time; longer ones bit by bit, which are fewer


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that codes take."""
    return -(-count * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes as one stream of bits, the lowest first: uint8, shape (…, `packed_bytes(count, bits)`)."""
    _check_bits(bits)
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
    # The eight bytes of a group are one whole number, in which its codes are pushed together. Codes below 128
    # leave the sign bit alone, so that shifts to the right bring in zeros.
    words = wide.contiguous().view(torch.int64)
    for shift, lower, upper in merges(bits):
        words = (words & lower).bitwise_or_((words >> shift).bitwise_and_(upper))
    together = words.view(torch.uint8).view(*codes.shape[:-1], groups, GROUP)[..., :bits]
    return together.flatten(-2)[..., : packed_bytes(count, bits)]


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the codes that were packed: shape (…, count), uint8 up to 8 bits and int32 above."""
    _check_bits(bits)
    if packed.shape[-1] != packed_bytes(count, bits):
        raise ConfigError(
            f"got {packed.shape[-1]} bytes, expected the {packed_bytes(count, bits)} that {count} codes of "
            f"{bits} bits take"
        )
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
    """Return how eight codes, a byte each, are pushed together: in pairs, then in fours, then all.

    Of each step: by how many bits the upper one of two neighbours moves down, the mask of all lower ones, and
    that of the upper ones where they come to lie.
    """
    steps = []
    for width in (8, 16, 32):
        used = bits * width // 8
        lower = sum(((1 << used) - 1) << start for start in range(0, 64, 2 * width))
        steps.append((width - used, lower, lower << used))
    return steps


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ConfigError(f"bits must be 1 to {MAX_BITS}, got {bits!r}")


Statistic: TypeAlias = Literal["largest", "least squares", "mean magnitude"]


@dataclass(frozen=True)
class Codebook:
    """The levels that codes of some bits stand for."""

    bits: int
    levels: tuple[float, ...]  # ascending and symmetric; a code is the place of one
    # The scale of a block. "largest" is over the last level, so nothing is cut off. "least squares" fits the
    # levels of codes that were found by the root mean square.
    statistic: Statistic
    is_linear: bool = False  # whether levels are whole numbers, one apart
    # If not 0, the level at k from the middle is k · (`cubic` + k²): it is found exactly without a table.
    cubic: int = 0
    # The largest element is taken for these at least and at most, in root mean squares, when codes are found.
    reach: tuple[float, float] = (1.0, 1.0)


def _symmetric(*magnitudes: float) -> tuple[float, ...]:
    """Return levels of both signs; zero, if given, once."""
    return (*[-magnitude for magnitude in reversed(magnitudes) if magnitude], *magnitudes)


def _linear(bits: int) -> Codebook:
    """Return whole numbers, as many of both signs."""
    last = 2 ** (bits - 1) - 1
    return Codebook(bits, tuple(map(float, range(-last, last + 1))), "largest", is_linear=True)


# Relative squared error of one member's gradients in blocks of 64 (byte GPT with AdamW, mean of early, mid
# and late in training; of 8, 6 and 5 bits, for a Gaussian, 0.00004, 0.0006 and 0.0025):
#   4 bits   these 0.0086; the best fifteen 0.0083; sixteen, without zero, 0.0073; NF4 0.0083; equally far
#            apart 0.0103; FP4 (E2M1) 0.0114; E3M0 0.0367. Zeros are kept: Adam moves a parameter however
#            small its gradient is.
#   3 bits   these 0.0330, with zero 0.0416; times the largest 0.0357 and 0.0497; equally far apart 0.0562.
#   2 bits   these 0.105; three levels, with zero, 0.168.
# That is with the root mean square as a scale. The one that fits best to the same codes loses 1 to 5 % less
# in 3 bits, 5 to 11 % in 2, and nothing of equal magnitudes, which both rounds would make 2.3 times as
# large. What comes out is then a projection: whatever the block, what is left is less than what there was,
# and no residual grows. It is less after the second round too: by the reach the largest element has the
# last level, and there no level is raised by twice as much as another.
CODEBOOKS: Mapping[int, Codebook] = MappingProxyType(
    {
        **{bits: _linear(bits) for bits in (8, 6, 5)},
        4: Codebook(4, _symmetric(*(float(k * (112 + k * k)) for k in range(8))), "largest", cubic=112),
        3: Codebook(3, _symmetric(0.245094, 0.756005, 1.343909, 2.151946), "least squares", reach=(1.8, 4.0)),
        2: Codebook(2, _symmetric(0.452780, 1.510418), "least squares", reach=(1.8, 3.2)),
        1: Codebook(1, (-1.0, 1.0), "mean magnitude"),
    }
)
"""Codebooks by bits."""


# bf16, which has fp32's range: with half the bytes of fp32, blocks may be half as long for as much.
SCALE_BYTES = 2


@dataclass(frozen=True)
class Coded:
    """Blocks as they travel: rows of equally many, in each the scales first and then the codes.

    Kernels write codes where they are sent from and read them where they arrive: nothing is copied between.
    """

    message: torch.Tensor  # uint8, shape (rows, bytes); the bytes of a row lie one after the other
    share: int  # blocks of a row

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
        coded = cls(torch.empty(rows, share * (SCALE_BYTES + size), dtype=torch.uint8), share)
        # They are sent too, and a scale that is not finite would have the step taken back.
        for row in range(num_blocks // share, rows):
            used = max(0, num_blocks - row * share)
            coded.scales[row, used:] = 0
            coded.codes[row, used:] = 0
        return coded

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor, rows: int, share: int) -> Coded:
        """Return a message of blocks, with zeros behind them."""
        missing = rows * share - len(scales)
        if missing:
            codes = torch.cat([codes, codes.new_zeros(missing, codes.shape[1])])
            scales = torch.cat([scales, scales.new_zeros(missing)])
        # Make one message of bytes: two would cost a latency more.
        parts = [scales.view(torch.uint8).view(rows, -1), codes.view(rows, -1)]
        return cls(torch.cat(parts, dim=1), share)

    @classmethod
    def arrived(cls, message: torch.Tensor, share: int) -> Coded:
        """Return the message as received: a copy only if it does not begin at a whole number of bf16."""
        is_even = message.storage_offset() % SCALE_BYTES == 0 and message.stride(0) % SCALE_BYTES == 0
        return cls(message if is_even else message.contiguous(), share)


def block_bytes(block: int, bits: int) -> int:
    """Return the bytes that a block takes, its scale included."""
    return packed_bytes(block, bits) + SCALE_BYTES
