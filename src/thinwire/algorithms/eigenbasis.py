"""Matrices in the eigenbasis of their mean gradients: codes are then relative to each direction's own size.

A gradient is large in few directions. Rounding adds noise of one size to all of them, which hides small ones,
and Muon makes all directions equally large. In the eigenbasis of Ḡ Ḡᵀ each direction is a row, with scales of
its own.

This is transform coding (Goyal, "Theoretical Foundations of Transform Coding", 2001), in a basis that all
members compute from the same means. SOAP (arXiv 2409.11321) runs Adam in such a basis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from thinwire.algorithms.base import Bucket, Memory, Slot
from thinwire.errors import StateError
from thinwire.kernels.matrices import round_into
from thinwire.plan import ParameterSpec

# An eigendecomposition is expensive.
REFRESH_STEPS = 10
COVARIANCE_DECAY = 0.95


def _check_square(label: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if this can't belong to the parameter's matrix."""
    shape = shapes[label]
    if len(shape) != 2 or tuple(tensor.shape) != (min(shape), min(shape)):
        raise StateError(
            f"the eigenbasis of {label} has shape {tuple(tensor.shape)}, but the parameter has {shape}; load "
            "an earlier state"
        )


COVARIANCE = Slot("covariance", is_listed=False, check=_check_square)
"""The decayed mean of Ḡ Ḡᵀ, (side, side), of gradients scaled to norm 1."""

EIGENVECTORS = Slot("eigenvectors", is_listed=False, check=_check_square)
"""Its eigenvectors as columns, those of the largest eigenvalues first."""


@dataclass(frozen=True)
class Eigenbasis:
    """The matrices of a bucket, each with the basis of its shorter side in memory."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int] | None, ...]  # (rows, columns) in memory order; None if it is no matrix

    @classmethod
    def of(cls, specs: Sequence[ParameterSpec], pattern: str) -> Eigenbasis:
        """Return that of a bucket's parameters of two dimensions whose names match a pattern."""
        shapes = []
        for spec in specs:
            is_matrix = len(spec.shape) == 2 and fnmatchcase(spec.name, pattern)
            shapes.append(spec.matrix_shape if is_matrix else None)
        return cls(tuple(spec.name for spec in specs), tuple(shapes))

    def turned(self, bucket: Bucket, memory: Memory, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of the gradients: of each matrix M with eigenvectors U, Uᵀ M."""
        turned = torch.empty_like(bucket.flat, dtype=dtype)
        for name, shape, gradient, part in self._parts(bucket, turned):
            if shape is None:
                part.copy_(gradient)
                continue
            M, U = _short(gradient.view(shape)).to(dtype), memory[EIGENVECTORS].get(name)
            part.view(M.shape).copy_(M if U is None else U.T @ M)
        return turned

    def turn_back(self, turned: torch.Tensor, bucket: Bucket, memory: Memory) -> None:
        """Write the means to the gradients; the bases follow them."""
        for name, shape, gradient, part in self._parts(bucket, turned):
            if shape is None:
                round_into(gradient, part, None, None)
                continue
            M, U = _short(gradient.view(shape)), memory[EIGENVECTORS].get(name)
            mean = part.view(M.shape) if U is None else U @ part.view(M.shape)
            _follow(name, mean, memory)
            round_into(gradient, (mean if M.is_contiguous() else mean.T).reshape(-1), None, None)

    def _parts(
        self, bucket: Bucket, turned: torch.Tensor
    ) -> Iterable[tuple[str, tuple[int, int] | None, torch.Tensor, torch.Tensor]]:
        return zip(self.names, self.shapes, bucket.gradients, bucket.split(turned), strict=True)


def _short(M: torch.Tensor) -> torch.Tensor:
    """Return a matrix with at most as many rows as columns."""
    return M if M.shape[0] <= M.shape[1] else M.T


def _follow(name: str, mean: torch.Tensor, memory: Memory) -> None:
    """Add a mean gradient to the covariance; at first and in every tenth step, find the eigenvectors."""
    # Scaled to norm 1: squares of small gradients would underflow, and the loss scale does not matter.
    unit = mean / mean.norm().clamp_min(torch.finfo(mean.dtype).tiny)
    covariance, before = unit @ unit.T, memory[COVARIANCE].get(name)
    if before is not None:
        covariance = covariance.lerp(before, COVARIANCE_DECAY)
    memory[COVARIANCE][name] = covariance
    if name not in memory[EIGENVECTORS] or memory.step % REFRESH_STEPS == 0:
        ascending = torch.linalg.eigh(covariance).eigenvectors
        memory[EIGENVECTORS][name] = ascending.flip(1)
