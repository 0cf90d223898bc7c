"""From numbers to codes and scales, and back, on any device.

A scale travels as bf16, which has fp32's range: half the bytes, so that blocks may be half as long. Codes are
found for the scale as it travels. A block that has anything that is not finite has such a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from thinwire.algorithms.low_bit.blocks import Blocks
from thinwire.algorithms.low_bit.codebooks import Codebook
from thinwire.algorithms.low_bit.packing import pack, packed_bytes, unpack
from thinwire.algorithms.low_bit.rounding import Draws

__all__ = ["SCALE_BYTES", "Coded", "averaged", "block_bytes", "decoded", "encoded"]

SCALE_BYTES = 2

# So many are coded at a time on the CPU: they stay in a core's cache.
CACHED_ELEMENTS = 1 << 16


class Coded(NamedTuple):
    """Blocks as they travel.

    Attributes:
        codes: Packed, uint8, shape (…, blocks, bytes).
        scales: bf16, shape (…, blocks).
    """

    codes: torch.Tensor
    scales: torch.Tensor


def block_bytes(block: int, bits: int) -> int:
    """Return the bytes that a block takes, its scale included.

    Args:
        block: Its elements.
        bits: Of each.
    """
    return packed_bytes(block, bits) + SCALE_BYTES


def encoded(
    rows: torch.Tensor, lengths: torch.Tensor, codebook: Codebook, draws: Draws | None = None
) -> Coded:
    """Return blocks as they travel.

    Args:
        rows: Shape (blocks, block), fp32 or fp64; zeros behind the end of a short block.
        lengths: Elements of each block.
        codebook: The levels.
        draws: For stochastic rounding; None for the nearest level.
    """
    num_blocks, block = rows.shape
    codes = torch.empty(num_blocks, packed_bytes(block, codebook.bits), dtype=torch.uint8, device=rows.device)
    scales = torch.empty(num_blocks, dtype=torch.bfloat16, device=rows.device)
    for some in _cached(rows):
        part = rows[some]
        scales[some] = _scales(part, lengths[some], codebook)
        units = part * _inverse(scales[some], rows.dtype)[:, None]
        places = (
            _nearest(units, codebook)
            if draws is None
            else _drawn(units, codebook, draws.of(some).uniform(block, rows.dtype))
        )
        codes[some] = pack(places, codebook.bits)
    return Coded(codes, scales)


def decoded(coded: Coded, block: int, codebook: Codebook, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that blocks stand for, shape (blocks, block); NaN where a scale is not finite.

    Args:
        coded: The blocks.
        block: Elements of each.
        codebook: The levels.
        dtype: fp32 or fp64.
    """
    rows = torch.empty(len(coded.scales), block, dtype=dtype, device=coded.scales.device)
    levels = torch.tensor(codebook.levels, dtype=dtype, device=rows.device)
    for some in _cached(rows):
        rows[some] = _decoded(Coded(coded.codes[some], coded.scales[some]), levels, block, codebook)
    return rows


def averaged(
    received: Coded,
    blocks: Blocks,
    own: slice,
    codebook: Codebook,
    dtype: torch.dtype,
    draws: Draws | None = None,
    *,
    keeps_lost: bool = False,
) -> tuple[Coded, torch.Tensor | None]:
    """Return the mean of what members have sent of some blocks, coded again.

    Args:
        received: Codes of shape (members, blocks, bytes), scales (members, blocks).
        blocks: Of the bucket.
        own: Which of them were received.
        codebook: The levels.
        dtype: fp32 or fp64.
        draws: Of these blocks, for stochastic rounding; None for the nearest level.
        keeps_lost: Whether to return what coding the mean has lost.

    Returns:
        The mean, and what it has lost, shape (blocks, block), or None.
    """
    members, num_blocks = received.scales.shape
    device, block = received.scales.device, blocks.block
    lengths = blocks.lengths(device)[own]
    levels = torch.tensor(codebook.levels, dtype=dtype, device=device)
    mean = torch.empty(num_blocks, block, dtype=dtype, device=device)
    for some in _cached(mean, copies=members):
        sent = _decoded(Coded(received.codes[:, some], received.scales[:, some]), levels, block, codebook)
        torch.sum(sent.div_(members), 0, out=mean[some])
        if not blocks.are_whole:
            is_behind = torch.arange(block, device=device) >= lengths[some, None]
            mean[some].masked_fill_(is_behind, 0)
    coded = encoded(mean, lengths, codebook, draws)
    lost = mean.sub_(decoded(coded, block, codebook, dtype)) if keeps_lost else None
    return coded, lost


def _cached(rows: torch.Tensor, copies: int = 1) -> Iterator[slice]:
    """Yield blocks that are worked on together."""
    count, block = rows.shape
    together = max(1, CACHED_ELEMENTS // (copies * block)) if rows.device.type == "cpu" else max(1, count)
    return (slice(start, min(start + together, count)) for start in range(0, count, together))


def _scales(rows: torch.Tensor, lengths: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Return the scale of each block, in bf16."""
    tiny = torch.finfo(torch.bfloat16).tiny
    magnitudes = rows.abs()
    largest = magnitudes.amax(1)
    if codebook.statistic == "largest":
        wanted = (largest / codebook.levels[-1]).float()
        scales = wanted.bfloat16()
        # Not below what is wanted, or the largest would be cut off.
        raised = (scales.view(torch.int16) + 1).view(torch.bfloat16)
        scales = torch.where(scales.float() < wanted, raised, scales)
    else:
        # Of shares of the largest: squares of the numbers themselves could leave the range.
        shares = magnitudes * torch.where(largest < tiny, 0, 1 / largest)[:, None]
        if codebook.statistic == "mean magnitude":
            scales = (largest * (shares.sum(1) / lengths)).bfloat16()
        else:
            scales = (largest * (shares.square().sum(1) / lengths).sqrt()).bfloat16()
    return torch.where(scales < tiny, 0, scales)  # one over it would not be finite; NaN stays


def _inverse(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = scales.to(dtype)
    return torch.where(wide > 0, 1 / wide, 0)


def _nearest(units: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Return the place of the level that is nearest, uint8."""
    levels = torch.tensor(codebook.levels, dtype=units.dtype, device=units.device)
    if codebook.is_linear:
        last = codebook.levels[-1]
        return (units.round().clamp_(-last, last) + last).nan_to_num_(0).to(torch.uint8)
    return torch.bucketize(units, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)


def _drawn(units: torch.Tensor, codebook: Codebook, uniform: torch.Tensor) -> torch.Tensor:
    """Return the place of one of the two levels around each number, so that their mean is it, uint8."""
    levels = torch.tensor(codebook.levels, dtype=units.dtype, device=units.device)
    lower = (torch.bucketize(units, levels[1:-1], right=True)).clamp_(0, len(levels) - 2)
    share = (units - levels[lower]) / (levels[lower + 1] - levels[lower])
    return (lower + (uniform < share)).to(torch.uint8)


def _decoded(coded: Coded, levels: torch.Tensor, block: int, codebook: Codebook) -> torch.Tensor:
    scales = coded.scales.to(levels.dtype)
    # So that what is infinite does not end as the largest number of the gradient's type.
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    places = unpack(coded.codes, codebook.bits, block)
    return levels[places.int()].mul_(scales[..., None])
