"""Matrices on their way through a step, the bases they start from, and what is remembered of them.

Notation of the PowerSGD paper (arXiv 1905.13727, algorithm 1): M (rows × columns) is gradient plus error,
P (rows × r) the left and Q (columns × r) the right factor. Factors are held row by row, as Pᵀ and Qᵀ:
skinny products are several times faster that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from thinwire.algorithms.base import Memory
from thinwire.algorithms.lowrank import LowRank
from thinwire.algorithms.orthonormal import orthonormal_rows

__all__ = [
    "Factors",
    "MatrixGroup",
    "Terms",
    "add_scaled",
    "fitted",
    "random_rows",
    "remember",
    "round_into",
    "starting_bases",
]

# Between the seeds of one step and the next: far from any seed a user would choose.
SEED_STRIDE = 1_000_003

# So many are rounded at a time on the CPU: they stay in a core's cache with what is lost of them.
ROUNDED_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices of one shape and matrix rank.

    Attributes:
        labels: One a matrix, the key of its factor in memory.
        matrices: M, fp32 or fp64, each (rows, columns); on entry the gradients alone.
        errors: What is owed on each, (rows, columns); None if nothing.
        matrix_rank: r.
    """

    labels: Sequence[str]
    matrices: Sequence[torch.Tensor]
    errors: Sequence[torch.Tensor | None]
    matrix_rank: int

    def add_errors(self, loss_scale: torch.Tensor | None) -> None:
        """Add to every matrix what is owed on it."""
        for matrix, error in zip(self.matrices, self.errors, strict=True):
            if error is not None:
                add_scaled(matrix, error, loss_scale)


@dataclass(frozen=True)
class Factors:
    """What one iteration makes known of a group.

    Attributes:
        basis: Orthonormal rows, the same on all processes: P̂ᵀ (matrices, r, rows), or Q̂ᵀ (matrices, r,
            columns).
        own: The projection of this process's M on it, as it travelled: P̂ᵀ M (matrices, r, columns), or
            Q̂ᵀ Mᵀ (matrices, r, rows).
        mean: The mean of `own` over the processes.
        basis_is_left: Whether the basis is P̂ᵀ.
    """

    basis: torch.Tensor
    own: torch.Tensor
    mean: torch.Tensor
    basis_is_left: bool = True

    def pair(self, projection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(left, right) with leftᵀ right the approximation that `projection`, own or mean, stands for."""
        return (self.basis, projection) if self.basis_is_left else (projection, self.basis)


Terms: TypeAlias = Sequence[Factors]
"""The iterations of a step; their approximations add up."""


def add_scaled(matrix: torch.Tensor, error: torch.Tensor, loss_scale: torch.Tensor | None) -> None:
    """Add what is owed, in units of the unscaled loss, to a gradient in units of the scaled one."""
    matrix.add_(error if loss_scale is None else error * loss_scale)


def round_into(
    gradient: torch.Tensor, mean: torch.Tensor, error: torch.Tensor | None, loss_scale: torch.Tensor | None
) -> None:
    """Store the mean in a gradient of another type; what its type can't hold stays owed.

    Args:
        gradient: Flat, of any floating type, written.
        mean: Flat, of the same length, in fp32 or fp64.
        error: Flat, in the type of `mean`, takes up what rounding and the range lose; None to forget it.
        loss_scale: What the loss was multiplied by, None for 1.
    """
    most = min(torch.finfo(gradient.dtype).max, torch.finfo(mean.dtype).max)
    together = ROUNDED_ELEMENTS if mean.device.type == "cpu" else max(1, len(mean))
    for start in range(0, len(mean), together):
        some = slice(start, start + together)
        gradient[some] = mean[some].clamp(-most, most)
        if error is not None:
            lost = mean[some] - gradient[some].to(mean.dtype)
            error[some] += lost if loss_scale is None else lost.div_(loss_scale)


def starting_bases(
    config: LowRank, memory: Memory, groups: Sequence[MatrixGroup], *, left: bool
) -> list[torch.Tensor]:
    """Bases to start from, (matrices, r, rows or columns): the last step's mean factors, or random ones.

    Rows that memory lacks, or that died when a gradient had too low a matrix rank, are drawn from a
    standard normal, the same on every process.

    Args:
        config: Seed and warm start.
        memory: Only read.
        groups: The matrices.
        left: Whether for the rows of the matrices, not their columns.
    """
    return orthonormal_rows([_starting_rows(config, memory, group, left=left) for group in groups])


def _starting_rows(config: LowRank, memory: Memory, group: MatrixGroup, *, left: bool) -> torch.Tensor:
    matrix = group.matrices[0]
    shape = (group.matrix_rank, matrix.shape[0 if left else 1])
    if config.warm_start:
        drawn = _first_rows(config.seed, shape, matrix.device)
    else:
        drawn = random_rows(config.seed + SEED_STRIDE * memory.step, shape, matrix.device)
    drawn = drawn.to(matrix.dtype)
    rows = torch.stack([fitted(memory.factor.get(label), drawn) for label in group.labels])
    is_dead = rows.abs().amax(dim=2, keepdim=True) == 0
    return rows.addcmul_(is_dead.to(rows.dtype), drawn)


def remember(
    config: LowRank, memory: Memory, labels: Sequence[str], terms: Terms, loss_scale: torch.Tensor | None
) -> None:
    """Keep the factors of a group, in units of the unscaled loss."""
    factors = terms[-1].mean
    owns = [term.own.flatten(1) for term in terms]
    sent = torch.cat(owns, dim=1) if len(owns) > 1 else owns[0]
    if loss_scale is not None:
        factors, sent = factors / loss_scale, sent / loss_scale
    if config.warm_start:
        memory.factor.update(zip(labels, factors.unbind(), strict=True))
    if config.error_feedback:
        memory.sent.update(zip(labels, sent.unbind(), strict=True))


def fitted(factor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """`factor` in the type and with the rows of `like`: cut, or zeros appended; zeros if other columns."""
    if factor is not None and factor.shape == like.shape:
        return factor.to(like)
    fitted = torch.zeros_like(like)
    if factor is not None and factor.shape[1] == like.shape[1]:
        rows = min(len(factor), len(like))
        fitted[:rows] = factor[:rows]
    return fitted


@lru_cache(maxsize=256)
def _first_rows(seed: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """With a warm start only dead rows are drawn again: the same ones each time."""
    return random_rows(seed, shape, device)


def random_rows(seed: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Standard normal in fp32, drawn on the CPU so that processes with different devices agree."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)
