"""Codes with PyTorch: for every device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import torch

from thinwire.kernels.backend import CodeKernels, MeanArgs, ResidualArgs
from thinwire.kernels.matrices import round_into
from thinwire.tensors.accelerators import is_accelerator
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded, pack, packed_bytes, unpack

# How many elements are encoded at a time on the CPU: they stay in a core's cache.
CACHED_ELEMENTS = 1 << 16
MAX_COMPARISONS = 3


def encoded(flat: torch.Tensor, blocks: Blocks, codebook: Codebook) -> Coded:
    """Encode a row for each block; if some are short, rows of a copy padded with zeros."""
    codes, scales = _encoded(blocks.rows(flat), blocks, slice(blocks.total), codebook)
    return Coded.of(codes, scales, blocks.num_members, blocks.share)


def averaged(item: MeanArgs) -> Coded:
    """Sum member after member, and encode the mean."""
    received, blocks, own, codebook, lost, dtype = item
    members, num_blocks = len(received.message), own.stop - own.start
    device, block = received.message.device, blocks.block
    all_codes, all_scales = received.codes, received.scales
    lengths = blocks.lengths[device][own]
    levels = levels_of(codebook, dtype, device)
    # In the memory of `lost`: it becomes the mean minus the encoded mean.
    mean = torch.empty(num_blocks, block, dtype=dtype, device=device) if lost is None else lost
    for some in _cached(mean, copies=members):
        sent = _decoded(all_codes[:, some], all_scales[:, some], levels, block, codebook, members)
        # Scales were divided by the number of members: the sum is the mean, and does not overflow.
        torch.sum(sent, 0, out=mean[some])
        # Below four bits, a zero is decoded as a small number, which would affect the block's scale.
        if not blocks.are_whole:
            mean[some].masked_fill_(_behind(lengths[some], block), 0)
    codes, scales = _encoded(mean, blocks, own, codebook)
    if lost is not None:
        for some in _cached(mean):
            lost[some] -= _decoded(codes[some], scales[some], levels, block, codebook)
    return Coded.of(codes, scales, 1, blocks.share)


def decode(messages: Sequence[Coded], blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
    """Decode a row for each block; through a copy if some are short, or the gradients have 16 bits."""
    block, wide = blocks.block, torch.promote_types(flat.dtype, torch.float32)
    if flat.dtype != wide:
        values = torch.empty_like(flat, dtype=wide)
        decode(messages, blocks, codebook, values)
        round_into(flat, values, None, None)
        return
    levels = levels_of(codebook, flat.dtype, flat.device)
    rows = blocks.rows(flat) if blocks.are_whole else flat.new_empty(blocks.total, block)
    parts = [(coded.codes.flatten(0, 1), coded.scales.flatten()) for coded in messages]
    for some in _cached(rows, copies=len(parts)):
        # Scales are divided by the number of messages: the sum is the mean, and does not overflow.
        first, *others = (
            _decoded(codes[some], scales[some], levels, block, codebook, len(parts))
            for codes, scales in parts
        )
        rows[some] = sum(others, first)
    if not blocks.are_whole:
        torch._foreach_copy_(list(flat.split_with_sizes(list(blocks.numels))), blocks.parts(rows))


def remainder(values: torch.Tensor, sent: Coded, blocks: Blocks, codebook: Codebook) -> torch.Tensor:
    """Return the part of the numbers of all blocks that was not sent."""
    rest = torch.empty_like(values)
    decode([sent], blocks, codebook, rest)
    return torch.sub(values, rest, out=rest)


def decode_and_keep(
    item: ResidualArgs,
    *,
    remainder: Callable[[torch.Tensor, Coded, Blocks, Codebook], torch.Tensor],
    decode: Callable[[Sequence[Coded], Blocks, Codebook, torch.Tensor], None],
) -> torch.Tensor:
    """Decode and return the residual, by a backend's own functions in fp32 and fp64."""
    messages, blocks, codebook, flat, values, sent, lost, own, loss_scale = item
    rest = remainder(values, sent, blocks, codebook)
    if lost is not None:
        # Times the number of members: only this member keeps it, so it counts by that much less in the mean.
        # All parameters together: on an accelerator each one would be a launch.
        flat_lost, pieces = (blocks.num_members * lost).view(-1), list(blocks.pieces(own))
        if pieces:
            torch._foreach_add_([rest[here] for here, _ in pieces], [flat_lost[there] for _, there in pieces])
    # The mean may overwrite the values: they are not read any more.
    decode(messages, blocks, codebook, values)
    if values is not flat:
        round_into(flat, values, rest, None)
    return rest if loss_scale is None else rest.div_(loss_scale)


CODES = CodeKernels(encoded, averaged, decode, partial(decode_and_keep, remainder=remainder, decode=decode))


def levels_of(codebook: Codebook, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the levels of a codebook on a device; do not write to them."""
    if device.type == "cpu":
        return torch.tensor(codebook.levels, dtype=dtype, device="cpu")
    return _levels_on(codebook, dtype, device)


# Cached: otherwise every step would copy them from the host, which waits for such a copy.
@lru_cache(maxsize=32)
def _levels_on(codebook: Codebook, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(codebook.levels, dtype=dtype, device=device)


def _cached(rows: torch.Tensor, copies: int = 1) -> Iterator[slice]:
    """Yield slices of blocks to process together."""
    count, block = rows.shape
    together = max(1, CACHED_ELEMENTS // (copies * block)) if rows.device.type == "cpu" else max(1, count)
    return (slice(start, min(start + together, count)) for start in range(0, count, together))


def _encoded(
    rows: torch.Tensor, blocks: Blocks, own: slice, codebook: Codebook
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of the rows of some blocks."""
    num_blocks, block = rows.shape
    size = packed_bytes(block, codebook.bits)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    codes = torch.empty(num_blocks, size, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(num_blocks, dtype=torch.bfloat16, device=rows.device)
    levels, lengths = levels_of(codebook, dtype, rows.device), blocks.lengths[rows.device][own]
    fits = codebook.statistic == "least squares"
    for some in _cached(rows):
        part = rows[some].to(dtype)
        scale = _scales(part, lengths[some], codebook)
        # Use the bf16 scale, with which codes are decoded, not the exact one.
        units = _in_units(part, scale)
        positions = _nearest(units, levels, codebook)
        if fits:
            coded = _levels_at(positions, levels, codebook)
            # Codes after the end of a short block belong to no numbers.
            if not blocks.are_whole:
                coded.masked_fill_(_behind(lengths[some], block), 0)
            # The factor that minimises the codes' squared error.
            factors = (units * coded).sum(1) / coded.square().sum(1)
            scale = _usable((scale.to(dtype) * factors).bfloat16())
        codes[some], scales[some] = pack(positions, codebook.bits), scale
    return codes, scales


def _scales(rows: torch.Tensor, lengths: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Return the scale of each block, in bf16."""
    tiny = torch.finfo(torch.bfloat16).tiny
    magnitudes = rows.abs()
    largest = magnitudes.amax(1)  # NaN if a number is NaN; then the scale is, too
    if codebook.statistic == "largest":
        wanted = (largest / codebook.levels[-1]).float()
        scales = wanted.bfloat16()
        # Never below the exact scale, or the largest number would be clipped.
        raised = (scales.view(torch.int16) + 1).view(torch.bfloat16)
        # Bits of positive numbers are ordered like the numbers: adding one gives the next.
        scales = torch.where(scales.float() < wanted, raised, scales)
    else:
        # From values relative to the largest: squares of the numbers themselves could overflow.
        shares = magnitudes * torch.where(largest < tiny, 0, 1 / largest)[:, None]
        least, most = codebook.reach
        root = (shares.square().sum(1) / lengths).sqrt()
        scales = (largest * root.clamp(1 / most, 1 / least)).bfloat16()
    return _usable(scales)


def _usable(scales: torch.Tensor) -> torch.Tensor:
    # The reciprocal of a smaller scale would not be finite; NaN stays.
    return torch.where(scales < torch.finfo(torch.bfloat16).tiny, 0, scales)


def _in_units(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.to(rows.dtype)
    return rows * torch.where(wide > 0, 1 / wide, 0)[:, None]


def _behind(lengths: torch.Tensor, block: int) -> torch.Tensor:
    """Return which elements of rows are after the end of their block."""
    return torch.arange(block, device=lengths.device) >= lengths[:, None]


def _nearest(units: torch.Tensor, levels: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Return the index of the nearest level, uint8."""
    if codebook.is_linear:
        last = codebook.levels[-1]
        return (units.round().clamp_(-last, last) + last).nan_to_num_(0).to(torch.uint8)
    middles = (levels[1:] + levels[:-1]) / 2
    # On the CPU a search costs as much as several comparisons.
    if len(middles) > MAX_COMPARISONS or is_accelerator(units.device):
        return torch.bucketize(units, middles, out_int32=True).to(torch.uint8)
    positions = torch.zeros_like(units, dtype=torch.uint8)
    for middle in middles.tolist():
        # A number exactly in the middle rounds down, as in a search.
        positions += units > middle
    return positions


def _decoded(
    codes: torch.Tensor,
    scales: torch.Tensor,
    levels: torch.Tensor,
    block: int,
    codebook: Codebook,
    divisor: int = 1,
) -> torch.Tensor:
    scales = scales.to(levels.dtype)
    # So that infinity does not become the largest number of the gradient's dtype.
    scales = torch.where(scales.isfinite(), scales, torch.nan) / divisor
    positions = unpack(codes, codebook.bits, block)
    return _levels_at(positions, levels, codebook).mul_(scales[..., None])


def _levels_at(positions: torch.Tensor, levels: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    if is_accelerator(positions.device):
        return levels[positions.int()]
    # On the CPU, arithmetic on whole tensors is faster than a look-up for each number.
    if codebook.is_linear or codebook.cubic:
        signed = positions.to(levels.dtype).sub_(len(levels) // 2)
        # All are integers: nothing is rounded.
        return signed.mul_(signed.square().add_(codebook.cubic)) if codebook.cubic else signed
    return torch.index_select(levels, 0, positions.reshape(-1).int()).view(positions.shape)
