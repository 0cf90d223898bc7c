"""Numbers of like magnitude in few bits: a sign, and one of some levels that each chunk has of its own.

Sent are the lowest and the highest level of a chunk, in bf16; the others lie evenly between them. Two levels
are the best there are: those that leave the least squared error. More of them reach from the smallest
magnitude of the chunk to the largest. All entries that are sent are large, so levels need not begin at zero.
"""

from __future__ import annotations

import torch

from thinwire.tensors import accelerators

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
