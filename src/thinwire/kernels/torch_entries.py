"""Few entries with PyTorch: for every device and dtype."""

from __future__ import annotations

import math

import torch

from thinwire.kernels.backend import EntryKernels, TopKQuery
from thinwire.kernels.matrices import round_into
from thinwire.tensors import accelerators
from thinwire.tensors.coded import pack, unpack
from thinwire.tensors.entries import SCALE_DTYPE, Chunks, EntryLayout

# If sums must not depend on order, magnitudes are integers in units of a chunk's largest magnitude over
# `PARTS`. The sum of at most 65,536 of them is below 2^63.
PARTS = 1 << 46


def encode(query: TopKQuery) -> torch.Tensor:
    """Encode the largest entries of each chunk; in fp32 and fp64 the residual is added in place."""
    layout = query.layout
    wanted = query.flat.to(query.error.dtype)  # the bucket itself, if it has this dtype
    # It becomes the residual, so it is in units of the unscaled loss.
    if query.loss_scale is not None:
        wanted.div_(query.loss_scale)
    query.wanted = wanted.add_(query.error, alpha=query.decay)
    # Chunks of one length at a time.
    chosen = [largest(wanted, chunks) for chunks in layout.parts]
    positions = torch.cat([positions.view(-1) for positions, _ in chosen])
    values = torch.cat([values.view(-1) for _, values in chosen])
    chunk = chunk_of_entries(layout, wanted.device)
    if layout.bits == 16:
        return packed(layout, positions, values, on_the_wire(values), chunk)
    scales = on_the_wire(torch.cat([end_levels(rows, layout.bits) for _, rows in chosen]))
    return packed(layout, positions, codes_of(values, chunk, scales, layout.bits), scales, chunk)


def decode(query: TopKQuery, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all members' indices in the bucket, and values."""
    layout, dtype = query.layout, query.error.dtype
    chunk = chunk_of_entries(layout, gathered.device)
    indices, codes, scales = unpacked(layout, gathered, chunk)
    if layout.bits == 16:
        return indices, scales.to(dtype)
    scales = scales.view(len(gathered), -1, 2)
    return indices, values_of(codes, chunk, scales, layout.bits, dtype)


def merge(
    query: TopKQuery,
    sent: tuple[torch.Tensor, torch.Tensor],
    less: torch.Tensor,
    is_healthy: torch.Tensor | None = None,
) -> None:
    """Sum member after member, in the same order everywhere, so that all get the same bits."""
    layout, flat, wanted, (indices, values) = query.layout, query.flat, query.wanted, sent
    assert wanted is not None
    assert is_healthy is None
    own = indices[query.rank]
    before = wanted[own]
    after = before - values[query.rank]
    # In double: the difference of two large squares may be small.
    reduced = (before.to(less.dtype).square() - after.to(less.dtype).square()).split_with_sizes(
        [chunks.count * chunks.kept for chunks in layout.parts]
    )
    sums = [part.view(chunks.count, -1).sum(1) for part, chunks in zip(reduced, layout.parts, strict=True)]
    less.index_copy_(0, layout.table[less.device][5], torch.cat(sums))
    wanted[own] = after
    # In fp32 the bucket itself is the residual until it becomes the mean, so copy it first. With other
    # dtypes, first add to the residual what rounding to the gradient's dtype loses.
    if wanted is flat:
        query.error.copy_(wanted)
        _add(wanted.zero_(), query, indices, values)
        return
    mean = torch.zeros_like(wanted)
    _add(mean, query, indices, values)
    round_into(flat, mean, wanted, query.loss_scale)
    query.error.copy_(wanted)


def _add(result: torch.Tensor, query: TopKQuery, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Add what members have sent to `result`, which is zeros."""
    scaled = values if query.loss_scale is None else values * query.loss_scale
    if query.by_senders:
        # Count in the result itself: a second tensor of its length would cost more than all the rest.
        for where, of_member in zip(indices, values, strict=True):
            result.index_add_(0, where, (of_member != 0).to(result.dtype))
        scaled = scaled / result[indices].clamp_min_(1)
        result[indices] = 0
    else:
        scaled = scaled / scaled.new_full((), len(indices))  # as in `_steps`
    for where, of_member in zip(indices, scaled, strict=True):
        result.index_add_(0, where, of_member)


ENTRIES = EntryKernels(lambda layout: True, encode, decode, merge)


def largest(flat: torch.Tensor, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each chunk's entries of largest magnitude: positions in it, ascending, int64, and values.

    Both (chunks, kept). NaN counts as the largest, then infinity. Any of several equal ones may be taken.
    """
    rows = chunks.rows(flat)
    positions = _largest(rows, chunks.kept)
    return positions, rows.gather(1, positions)


def _largest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of each row's entries of largest magnitude, ascending."""
    # Only the groups with the highest peaks can have the largest entries: sorting only those is three times
    # as fast as sorting whole rows.
    num_rows, length = rows.shape
    size = 1 << int(math.log2(length / count) / 2 + 0.5)  # about as many groups as there are candidates
    if size == 1 or length % size:
        return rows.abs().topk(count, sorted=False).indices.sort(1).values
    num_groups = length // size
    grouped = rows.view(num_rows, size, num_groups)  # a group's entries lie `num_groups` apart
    # From both extremes: `abs` would write the whole gradient once more.
    peaks = torch.maximum(grouped.amax(1), grouped.amin(1).neg_())
    groups = peaks.topk(count, sorted=False).indices
    candidates = grouped.gather(2, groups.unsqueeze(1).expand(-1, size, -1)).abs_().view(num_rows, -1)
    best = candidates.topk(count, sorted=False).indices
    return (best // count * num_groups + groups.gather(1, best % count)).sort(1).values


# A message: marks and words with positions and codes, then scales.


def chunk_of_entries(layout: EntryLayout, device: torch.device) -> torch.Tensor:
    """Return each entry's chunk."""
    chunk = torch.arange(layout.num_chunks, device=device)
    # With the size given: otherwise the host would wait for the device to count.
    return chunk.repeat_interleave(layout.table[device][2], output_size=layout.num_entries)


def _first_marks(layout: EntryLayout, chunk: torch.Tensor) -> torch.Tensor:
    """Return each entry's mark if the high bits of its position were zero."""
    return layout.table[chunk.device][1, chunk] + torch.arange(layout.num_entries, device=chunk.device)


def packed(
    layout: EntryLayout,
    positions: torch.Tensor,  # in their chunks, int64, (entries,), ascending in each chunk
    codes: torch.Tensor,  # of few bits, (entries,)
    scales: torch.Tensor,  # two per chunk; or, with 16 bits, the values
    chunk: torch.Tensor,  # each entry's chunk
) -> torch.Tensor:
    """Return entries as bytes, (`num_bytes`,)."""
    marks = torch.zeros(layout.num_marks, dtype=torch.uint8, device=positions.device)
    marks.index_fill_(0, _first_marks(layout, chunk) + (positions >> layout.low_bits), 1)
    streams = [pack(marks, 1)]
    words = positions & (1 << layout.low_bits) - 1
    if layout.code_bits:
        words = (words << layout.code_bits) + codes
    if layout.low_bits + layout.code_bits:
        streams.append(pack(words, layout.low_bits + layout.code_bits))
    # Words and marks first, padded to whole bytes; scales are whole bytes.
    message = torch.cat([*streams, scales.view(-1).view(torch.uint8)])
    return torch.nn.functional.pad(message, (0, layout.num_bytes - len(message)))


def unpacked(
    layout: EntryLayout, gathered: torch.Tensor, chunk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all members' indices in the bucket, codes and scales, without waiting for an accelerator."""
    streams = gathered[:, : sum(layout.stream_bytes)].split_with_sizes(layout.stream_bytes, dim=1)
    marks, packed_words, scale_bytes = streams
    set_marks = unpack(marks, 1, layout.num_marks)
    # The n-th set mark belongs to the n-th entry. All unset ones are moved after the last, and cut off.
    number = set_marks.cumsum(-1).sub_(1).masked_fill_(set_marks == 0, layout.num_entries)
    indices = torch.arange(layout.num_marks, device=gathered.device).expand_as(number)
    behind = indices.new_empty(len(gathered), layout.num_entries + 1)
    high = behind.scatter_(1, number, indices)[:, :-1] - _first_marks(layout, chunk)
    indices = layout.table[chunk.device][0, chunk] + (high << layout.low_bits)
    # Copy: unaligned bytes can't be viewed as a wider dtype.
    scales = scale_bytes.clone(memory_format=torch.contiguous_format).view(SCALE_DTYPE)
    codes = packed_words
    if layout.low_bits + layout.code_bits:
        words = unpack(packed_words, layout.low_bits + layout.code_bits, layout.num_entries)
        indices += words >> layout.code_bits
        codes = words & (1 << layout.code_bits) - 1
    return indices, codes, scales


# Levels: few bits for the sent entries of a chunk.


def on_the_wire(values: torch.Tensor) -> torch.Tensor:
    """Return values in bf16; finite ones stay finite."""
    # Rounded up, the largest fp32 numbers, and fp64 numbers above, would become infinite: a skipped step.
    limit = torch.finfo(SCALE_DTYPE).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(SCALE_DTYPE)


def end_levels(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the lowest and highest level of each row, (rows, 2); not finite if any of its values is not."""
    magnitudes = rows.abs()
    peaks = magnitudes.amax(1, keepdim=True)
    if bits == 2 and rows.shape[1] > 1:
        return _two_means(magnitudes, peaks)
    return torch.cat([magnitudes.amin(1, keepdim=True), peaks], dim=1)


def codes_of(values: torch.Tensor, chunk: torch.Tensor, ends: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the index of each value's nearest level, with its sign in the next bit: uint8, (entries,)."""
    lowest, step, highest_code = _steps(ends, bits, values.dtype)
    # If all sent entries of a chunk have one magnitude, the step is zero, and any code is right.
    divisor = step.where(step > 0, 1).index_select(0, chunk)
    codes = values.abs().sub_(lowest.index_select(0, chunk)).div_(divisor)
    # A value that is not finite needs no code: the levels of its chunk show it.
    codes.round_().clamp_(0, highest_code).nan_to_num_(0)
    return codes.to(torch.uint8) | ((values < 0).to(torch.uint8) << bits - 1)


def values_of(
    codes: torch.Tensor, chunk: torch.Tensor, ends: torch.Tensor, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """Decode codes to values."""
    lowest, step, highest_code = _steps(ends, bits, dtype)
    magnitudes = step.index_select(1, chunk).mul_(codes & highest_code).add_(lowest.index_select(1, chunk))
    return torch.where(codes > highest_code, -magnitudes, magnitudes)


def _steps(ends: torch.Tensor, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the lowest level, the distance between levels, and the highest one's index."""
    lowest, highest = ends.to(dtype).unbind(-1)
    highest_code = (1 << bits - 1) - 1
    step = highest - lowest
    if highest_code > 1:
        # Divide by a tensor: for a host number, CUDA would multiply by its rounded reciprocal.
        step /= step.new_full((), highest_code)
    return lowest, step, highest_code


def _two_means(magnitudes: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the two levels of each row, (rows, 2), with the least squared error of its magnitudes.

    They are the means of the magnitudes below and above some border; all borders are tried.
    """
    # Divide by the peak, so that no square overflows. If a value is not finite, its unit shows it in the end.
    units = peaks + (peaks == 0)
    ordered = (magnitudes / units).sort(1).values
    if accelerators.is_accelerator(ordered.device):
        # Integer sums do not depend on order, which CUDA does not guarantee.
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
