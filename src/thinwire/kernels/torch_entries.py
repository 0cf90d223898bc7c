"""Few entries by PyTorch: for every device and type."""

from __future__ import annotations

import math

import torch

from thinwire.kernels.base import SentEntries
from thinwire.tensors.blocks import Chunks


def largest(flat: torch.Tensor, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries of largest magnitude of each chunk: positions in it, ascending, int64, and values.

    Both (chunks, kept). NaN counts as the largest, then infinity. Any of equal ones may be taken.
    """
    rows = chunks.rows(flat)
    positions = _largest(rows, chunks.kept)
    return positions, rows.gather(1, positions)


def add(result: torch.Tensor, entries: SentEntries) -> None:
    """Add what members have sent to zeros, the bucket's, member after member: sums are equal to the bit."""
    indices, values, sent, by_senders = entries
    if by_senders:
        # Count in the result: a second tensor of its length would cost more than all else.
        for where, own in zip(indices, sent, strict=True):
            result.index_add_(0, where, (own != 0).to(result.dtype))
        values = values / result[indices].clamp_min_(1)
        result[indices] = 0
    # Member after member, in one order everywhere: so all get the same bits, whatever the sums round.
    for where, own in zip(indices, values, strict=True):
        result.index_add_(0, where, own)


def _largest(rows: torch.Tensor, kept: int) -> torch.Tensor:
    """Return where the entries of largest magnitude stand in each row, in ascending order."""
    # Only the groups with the highest peaks can have the largest entries: to order those alone is three times
    # as fast as to order whole rows.
    num_rows, length = rows.shape
    size = 1 << int(math.log2(length / kept) / 2 + 0.5)  # about as many groups as there are candidates
    if size == 1 or length % size:
        return rows.abs().topk(kept, sorted=False).indices.sort(1).values
    num_groups = length // size
    grouped = rows.view(num_rows, size, num_groups)  # a group's entries lie `num_groups` apart
    # From both extremes: `abs` would write all of the gradient once more.
    peaks = torch.maximum(grouped.amax(1), grouped.amin(1).neg_())
    groups = peaks.topk(kept, sorted=False).indices
    candidates = grouped.gather(2, groups.unsqueeze(1).expand(-1, size, -1)).abs_().view(num_rows, -1)
    best = candidates.topk(kept, sorted=False).indices
    return (best // kept * num_groups + groups.gather(1, best % kept)).sort(1).values
