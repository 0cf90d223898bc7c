"""Matrices in eigenbases of their mean gradients: codes are then relative to each direction's own size.

A gradient is large in few directions. Rounding adds noise of one size to all of them, which hides small ones,
and Muon makes all directions equally large. So each matrix M is encoded as

    X_ij = (Uᵀ M V)_ij / (r_i c_j)

where U and V are the eigenvectors of Ḡ Ḡᵀ and Ḡᵀ Ḡ, of the mean gradients Ḡ, and r_i² and c_j² are the
variances that the latest means had in their directions. All elements of X are of about one size.

This is transform coding (Goyal, "Theoretical Foundations of Transform Coding", 2001), in bases that all
members compute from the same means. SOAP (arXiv 2409.11321) runs Adam in such bases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch

from thinwire.algorithms.base import Bucket, Memory, Slot
from thinwire.errors import StateError
from thinwire.kernels.matrices import round_into
from thinwire.plan import ParameterSpec

# An eigendecomposition is expensive.
REFRESH_STEPS = 10
DECAY = 0.95  # of covariances and variances, a step
# Longer sides are cut into pieces, each with a basis of its own: the cost of a basis grows with its cube.
MAX_PIECE = 512
# The least variance, relative to a side's largest, and absolute: a gradient may be zero in some directions,
# or in all.
LEAST, TINY = 1e-4, 1e-12


def is_in(pattern: str, spec: ParameterSpec) -> bool:
    """Return whether a pattern of names selects a matrix; this process's shard of it may be empty."""
    return len(spec.shape) == 2 and fnmatchcase(spec.name, pattern)


def piece_of(side: int) -> int:
    """Return the length of the equal pieces that a side is cut into: 1 if the side is long and prime.

    Examples:
        >>> [piece_of(side) for side in (768, 3072, 11008, 1031)]
        [384, 512, 344, 1]
    """
    return next(piece for piece in range(min(side, MAX_PIECE), 0, -1) if side % piece == 0)


def _check_length(
    width_of: Callable[[int], int], label: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise if a slot's tensor has not `width_of(side)` numbers for each row and column of the matrix."""
    shape = shapes[label]
    if len(shape) != 2 or tuple(tensor.shape) != (sum(side * width_of(side) for side in shape),):
        raise StateError(
            f"the eigenbasis of {label} has shape {tuple(tensor.shape)}, but the parameter has {shape}; load "
            "an earlier state"
        )


COVARIANCE = Slot("covariance", is_listed=False, check=partial(_check_length, piece_of))
"""The `Pair` of the decayed means of Ḡ Ḡᵀ and Ḡᵀ Ḡ, flat. Ḡ is scaled to norm 1."""

EIGENVECTORS = Slot("eigenvectors", is_listed=False, check=partial(_check_length, piece_of))
"""The `Pair` of U and V, flat: eigenvectors as columns, those of the largest eigenvalues first."""

VARIANCES = Slot("variances", is_listed=False, check=partial(_check_length, lambda side: 1))
"""All r_i², then all c_j²: decayed means over the steps, each measured before Ḡ changes the bases."""


class Pair(NamedTuple):
    """A square for each piece of a matrix's two sides: shape (pieces, piece, piece)."""

    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor, shape: Sequence[int]) -> Pair:
        """Return views of a slot's tensor."""
        parts = flat.split_with_sizes([side * piece_of(side) for side in shape])
        return cls(*(part.view(-1, *2 * [piece_of(side)]) for part, side in zip(parts, shape, strict=True)))

    def flat(self) -> torch.Tensor:
        return torch.cat([self.rows.flatten(), self.columns.flatten()])

    def turn(self, M: torch.Tensor) -> torch.Tensor:
        """Return Uᵀ M V."""
        return _times(self.columns.mT, _times(self.rows.mT, M).T).T

    def turn_back(self, Y: torch.Tensor) -> torch.Tensor:
        """Return U Y Vᵀ."""
        return _times(self.columns, _times(self.rows, Y).T).T


def _times(squares: torch.Tensor, M: torch.Tensor) -> torch.Tensor:
    """Multiply each piece of a matrix's rows by its square."""
    return (squares @ M.reshape(*squares.shape[:2], -1)).flatten(0, 1)


@dataclass(frozen=True)
class Eigenbasis:
    """The matrices of a bucket that are encoded in eigenbases."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int] | None, ...]  # (rows, columns) in memory order; None if it is no matrix

    @classmethod
    def of(cls, specs: Sequence[ParameterSpec], pattern: str) -> Eigenbasis:
        """Return that of a bucket's parameters of two dimensions whose names match a pattern."""
        shapes = [spec.matrix_shape if spec.numel and is_in(pattern, spec) else None for spec in specs]
        return cls(tuple(spec.name for spec in specs), tuple(shapes))

    def turned(self, bucket: Bucket, memory: Memory, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of the gradients, in which each matrix M is X."""
        turned = torch.empty_like(bucket.flat, dtype=dtype)
        for name, shape, gradient, part in self._parts(bucket, turned):
            if shape is None:
                part.copy_(gradient)
                continue
            X = _short(gradient.view(shape)).to(dtype)
            if name in memory[EIGENVECTORS]:
                X = Pair.of(memory[EIGENVECTORS][name], X.shape).turn(X)
            if name in memory[VARIANCES]:
                X = X / _sizes(memory[VARIANCES][name], X.shape)
            part.view(X.shape).copy_(X)
        return turned

    def turn_back(self, turned: torch.Tensor, bucket: Bucket, memory: Memory) -> None:
        """Write the means to the gradients; the bases follow them."""
        for name, shape, gradient, part in self._parts(bucket, turned):
            if shape is None:
                round_into(gradient, part, None, None)
                continue
            M = _short(gradient.view(shape))
            mean = part.view(M.shape)
            if name in memory[VARIANCES]:
                mean = mean * _sizes(memory[VARIANCES][name], mean.shape)
            if name in memory[EIGENVECTORS]:
                squares = _unit(mean).square()
                _add(VARIANCES, name, torch.cat([squares.sum(1), squares.sum(0)]), memory)
                mean = Pair.of(memory[EIGENVECTORS][name], mean.shape).turn_back(mean)
            _follow(name, mean, memory)
            round_into(gradient, (mean if M.is_contiguous() else mean.T).reshape(-1), None, None)

    def _parts(
        self, bucket: Bucket, turned: torch.Tensor
    ) -> Iterable[tuple[str, tuple[int, int] | None, torch.Tensor, torch.Tensor]]:
        return zip(self.names, self.shapes, bucket.gradients, bucket.split(turned), strict=True)


def _short(M: torch.Tensor) -> torch.Tensor:
    """Return a matrix with at most as many rows as columns: most blocks of codes then lie in one row."""
    return M if M.shape[0] <= M.shape[1] else M.T


def _unit(mean: torch.Tensor) -> torch.Tensor:
    """Scale to norm 1, so that the loss scale does not matter; zeros stay zeros."""
    # First to a largest element of 1: squares of small gradients would underflow.
    scaled = mean / mean.abs().amax().clamp_min(torch.finfo(mean.dtype).tiny)
    unit: torch.Tensor = scaled / scaled.norm().clamp_min(1)
    return unit


def _sizes(variances: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return all r_i c_j."""
    sides = variances.split_with_sizes(list(shape))
    r, c = (side.clamp_min(TINY).maximum(LEAST * side.amax()).sqrt() for side in sides)
    return torch.outer(r, c)


def _follow(name: str, mean: torch.Tensor, memory: Memory) -> None:
    """Add a mean gradient to the covariances; at first and in every tenth step, find their eigenvectors."""
    unit = _unit(mean)
    pieces = [M.reshape(-1, piece_of(len(M)), M.shape[1]) for M in (unit, unit.T)]
    _add(COVARIANCE, name, Pair(*(M @ M.mT for M in pieces)).flat(), memory)
    if name not in memory[EIGENVECTORS] or memory.step % REFRESH_STEPS == 0:
        covariances = Pair.of(memory[COVARIANCE][name], mean.shape)
        ascending = [torch.linalg.eigh(covariance).eigenvectors for covariance in covariances]
        memory[EIGENVECTORS][name] = Pair(*(eigenvectors.flip(-1) for eigenvectors in ascending)).flat()


def _add(slot: Slot, name: str, new: torch.Tensor, memory: Memory) -> None:
    """Add to a decayed mean."""
    before = memory[slot].get(name)
    memory[slot][name] = new if before is None else new.lerp(before, DECAY)
