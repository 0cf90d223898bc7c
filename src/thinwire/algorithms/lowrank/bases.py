"""The bases that a step starts from, and the factors that one step leaves for the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.algorithms.base import Memory
from thinwire.algorithms.kernels.dispatch import orthonormal_rows
from thinwire.algorithms.kernels.matrices import MatrixGroup
from thinwire.algorithms.lowrank.slots import FACTOR

__all__ = ["StartingBases", "fitted", "random_rows"]

# Between the seeds of one step and the next: far from any seed a user would choose.
SEED_STRIDE = 1_000_003


class StartingBases:
    """Makes the bases of a bucket.

    Args:
        seed: Of the random rows, the same on every process.
        warm_start: Whether to start from the last step's factors.
    """

    def __init__(self, seed: int, *, warm_start: bool) -> None:
        self._seed = seed
        self._warm_start = warm_start
        # With a warm start only dead rows are drawn again: the same ones each time.
        self._first_rows: dict[tuple[tuple[int, int], torch.device], torch.Tensor] = {}

    def of(self, memory: Memory, groups: Sequence[MatrixGroup], *, left: bool) -> list[torch.Tensor]:
        """Return bases, (matrices, r, rows or columns): the last step's mean factors, or random ones.

        Rows that memory lacks, or that died when a gradient had too low a matrix rank, are drawn from a
        standard normal, the same on every process.

        Args:
            memory: Only read.
            groups: The matrices.
            left: Whether for the rows of the matrices, not their columns.
        """
        return orthonormal_rows([self._rows(memory, group, left=left) for group in groups])

    def _rows(self, memory: Memory, group: MatrixGroup, *, left: bool) -> torch.Tensor:
        matrix = group.matrices[0]
        shape = (group.matrix_rank, matrix.shape[0 if left else 1])
        if self._warm_start:
            key = (shape, matrix.device)
            if key not in self._first_rows:
                self._first_rows[key] = random_rows(self._seed, shape, matrix.device)
            drawn = self._first_rows[key]
        else:
            drawn = random_rows(self._seed + SEED_STRIDE * memory.step, shape, matrix.device)
        drawn = drawn.to(matrix.dtype)
        rows = torch.stack([fitted(memory[FACTOR].get(label), drawn) for label in group.labels])
        is_dead = rows.abs().amax(dim=2, keepdim=True) == 0
        return rows.addcmul_(is_dead.to(rows.dtype), drawn)


def fitted(factor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a factor in type and rows of `like`, cut or extended by zeros; zeros if it has other columns.

    Args:
        factor: Shape (r, columns), or None for zeros.
        like: Shape (rows, columns).
    """
    if factor is not None and factor.shape == like.shape:
        return factor.to(like)
    fitting = torch.zeros_like(like)
    if factor is not None and factor.shape[1] == like.shape[1]:
        rows = min(len(factor), len(like))
        fitting[:rows] = factor[:rows]
    return fitting


def random_rows(seed: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return standard normal rows in fp32, drawn on the CPU so that processes with other devices agree.

    Args:
        seed: The same on all processes.
        shape: (rows, columns).
        device: Where they are wanted.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)
