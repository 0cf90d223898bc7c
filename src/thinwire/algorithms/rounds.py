"""The two rounds of PowerSGD on a list of matrices, wherever they come from.

Notation of the paper (arXiv 1905.13727, algorithm 1): M (rows × columns) is gradient plus error, P
(rows × r) the left and Q (columns × r) the right factor. Factors are held row by row, as Pᵀ and Qᵀ:
skinny products are several times faster that way.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from thinwire.algorithms.base import Memory
from thinwire.algorithms.lowrank import LowRank
from thinwire.algorithms.orthonormal import orthonormal_rows

__all__ = ["Factors", "MatrixGroup", "approximate", "remember", "round_into", "settle", "starting_factors"]

# A block of rows stays in a core's cache between the products of one pass.
BLOCK_BYTES = 512 * 1024


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices of one shape and rank.

    Attributes:
        matrices: M, fp32, each (rows, columns); on entry the gradients alone.
        errors: What is owed on each, (rows, columns); None if nothing.
        right: Qᵀ, orthonormal rows, (matrices, r, columns).
    """

    matrices: Sequence[torch.Tensor]
    errors: Sequence[torch.Tensor | None]
    right: torch.Tensor


@dataclass(frozen=True)
class Factors:
    """What two rounds make known, of a group or (without the first dimension) of one matrix.

    Attributes:
        left: P̂ᵀ, orthonormal rows, (matrices, r, rows). The same on all processes.
        own: P̂ᵀ M of this process, (matrices, r, columns), as it travelled.
        mean: The mean of `own` over the processes, which is P̂ᵀ times the mean M.
    """

    left: torch.Tensor
    own: torch.Tensor
    mean: torch.Tensor

    def each(self) -> Iterator[Factors]:
        """The factors of one matrix after the other."""
        for left, own, mean in zip(self.left, self.own, self.mean, strict=True):
            yield Factors(left, own, mean)


def approximate(
    config: LowRank,
    groups: Sequence[MatrixGroup],
    whole: Sequence[torch.Tensor],
    dtype: torch.dtype,
    loss_scale: torch.Tensor | None,
) -> Generator[torch.Tensor, torch.Tensor, tuple[list[Factors], Sequence[torch.Tensor]]]:
    """Add its error to every matrix, in place, and find the factors of the mean: the rounds of a step.

    Args:
        config: Power iterations and wire type.
        groups: The matrices.
        whole: Flat gradients that ride along in the first message.
        dtype: Of the gradients; left factors and what rides along travel in its message type.
        loss_scale: What the loss was multiplied by, None for 1.

    Returns:
        The factors of each group, and the means of `whole`.

    Cost: two rounds a power iteration; in each, every matrix is read twice (and once written).
    """
    rights = [group.right for group in groups]
    whole_means: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        first, last = iteration == 0, iteration + 1 == config.power_iterations
        lefts = [_products(*pair, loss_scale, add_error=first) for pair in zip(groups, rights, strict=True)]
        mean = yield _message([*lefts, *whole] if first else lefts, config.message_dtype(dtype))
        if first:
            rest = mean[sum(left.numel() for left in lefts) :]
            whole_means = rest.split_with_sizes([gradient.numel() for gradient in whole])
        lefts = orthonormal_rows(_split(mean, like=lefts))

        owns = [_projections(group, left) for group, left in zip(groups, lefts, strict=True)]
        message = _message(owns, config.message_dtype(torch.float32))
        if config.wire_dtype is not None:
            owns = _split(message.float(), like=owns)  # what travels is what counts as paid
        means = _split((yield message), like=owns)
        if not last:
            rights = orthonormal_rows(means)
    return [Factors(*each) for each in zip(lefts, owns, means, strict=True)], whole_means


def _products(
    group: MatrixGroup, right: torch.Tensor, loss_scale: torch.Tensor | None, *, add_error: bool
) -> torch.Tensor:
    """(M Q)ᵀ of every matrix, (matrices, r, rows), after adding its error to it."""
    rows = group.matrices[0].shape[0]
    left = right.new_empty(right.shape[0], right.shape[1], rows)
    for matrix, error, q, p in zip(group.matrices, group.errors, right, left, strict=True):
        for block in _row_blocks(matrix):
            if add_error and error is not None:
                matrix[block].add_(error[block] if loss_scale is None else error[block] * loss_scale)
            torch.mm(q, matrix[block].t(), out=p[:, block])
    return left


def _projections(group: MatrixGroup, left: torch.Tensor) -> torch.Tensor:
    """P̂ᵀ M of every matrix, (matrices, r, columns)."""
    own = left.new_empty(left.shape[0], left.shape[1], group.right.shape[2])
    for matrix, p, projection in zip(group.matrices, left, own, strict=True):
        torch.mm(p, matrix, out=projection)
    return own


def settle(
    matrix: torch.Tensor, error: torch.Tensor | None, factors: Factors, loss_scale: torch.Tensor | None
) -> None:
    """Turn M into the mean gradient P̂ · mean, in place, and leave M − P̂ · own in `error`.

    With own in place of mean, differences between processes leave the error memory, which so stays
    bounded. The mean of the errors is the same either way.

    Args:
        matrix: M, (rows, columns).
        error: Where to write what this process still owes, (rows, columns); None to forget it.
        factors: Of this matrix.
        loss_scale: What the loss was multiplied by, None for 1.
    """
    for block in _row_blocks(matrix):
        p = factors.left[:, block].t()
        if error is not None:
            torch.addmm(matrix[block], p, factors.own, alpha=-1, out=error[block])
            if loss_scale is not None:
                error[block].div_(loss_scale)
        torch.mm(p, factors.mean, out=matrix[block])


def round_into(
    gradient: torch.Tensor, mean: torch.Tensor, error: torch.Tensor | None, loss_scale: torch.Tensor | None
) -> None:
    """Store the mean in a gradient of another type; what its type can't hold stays owed.

    Args:
        gradient: Flat, of any floating type, written.
        mean: Flat fp32 of the same length.
        error: Flat fp32, takes up what rounding and the type's range lose; None to forget it.
        loss_scale: What the loss was multiplied by, None for 1.
    """
    most = min(torch.finfo(gradient.dtype).max, torch.finfo(torch.float32).max)
    gradient.copy_(mean.clamp(-most, most))
    if error is not None:
        lost = mean - gradient.float()
        error.add_(lost if loss_scale is None else lost.div_(loss_scale))


def starting_factors(
    config: LowRank, memory: Memory, labels: Sequence[str], shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Qᵀ to start from, (matrices, r, columns), orthonormal rows: the last ones, or random ones.

    Rows that memory lacks, or that died when a gradient had too low a rank, are drawn from a
    standard normal, the same on every process.

    Args:
        config: Seed and warm start.
        memory: Only read.
        labels: One a matrix, the keys of their factors.
        shape: (r, columns).
        device: Where to put them.
    """
    drawn = _random_rows(config.seed, 0 if config.warm_start else memory.step, shape, device)
    right = torch.stack([_fitted(memory.factor.get(label), drawn) for label in labels])
    right = torch.where((right == 0).all(dim=2, keepdim=True), drawn, right)
    return orthonormal_rows([right])[0]


def remember(
    config: LowRank, memory: Memory, label: str, factors: Factors, loss_scale: torch.Tensor | None
) -> None:
    """Keep the factors of one matrix, in units of the unscaled loss."""
    if config.warm_start:
        memory.factor[label] = factors.mean if loss_scale is None else factors.mean / loss_scale
    if config.error_feedback:
        memory.sent[label] = factors.own if loss_scale is None else factors.own / loss_scale


def _fitted(factor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """`factor` with the rows of `like`: cut, or zeros appended; all zeros if it has other columns."""
    if factor is not None and factor.shape == like.shape:
        return factor.to(like.device)
    fitted = torch.zeros_like(like)
    if factor is not None and factor.shape[1] == like.shape[1]:
        rows = min(len(factor), len(like))
        fitted[:rows] = factor[:rows]
    return fitted


@lru_cache(maxsize=256)
def _random_rows(seed: int, step: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Standard normal, drawn on the CPU so that processes with different devices agree."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return torch.randn(shape, generator=generator).to(device)


def _message(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A new flat tensor with all parts."""
    return torch.cat([part.reshape(-1) for part in parts]).to(dtype)


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The head of `flat` as fp32 tensors shaped like `like`."""
    sizes = [tensor.numel() for tensor in like]
    parts = flat[: sum(sizes)].float().split_with_sizes(sizes)
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that fit in a core's cache; all rows at once on an accelerator."""
    rows, columns = matrix.shape
    step = max(1, BLOCK_BYTES // (4 * columns)) if matrix.device.type == "cpu" else rows
    for start in range(0, rows, step):
        yield slice(start, start + step)
