"""Matrix ranks by parameter, chosen by what the run itself measures.

The idea of choosing them by layer, against the energy that each would leave out: Markov et al., "L-GreCo"
(arXiv 2210.17357). Here no gradient is decomposed for it: the mean factors of the last step have the largest
singular values of the mean gradient (with the residual), and a random projection of the mean error, the same
on all processes, shows how much there is beyond.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.algorithms import accelerators
from thinwire.algorithms.base import Memory
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.bases import random_rows
from thinwire.algorithms.lowrank.config import LowRankRoute
from thinwire.algorithms.lowrank.slots import FACTOR
from thinwire.algorithms.requests import Mean, Message, Request

__all__ = ["Spectra", "Spectrum", "measured", "within_bytes", "within_error"]

# Columns of the projection: its energy is right within some percent where many directions are left out.
SKETCH_COLUMNS = 4
SKETCH_SEED = 7

Spectra = Mapping[str, "Spectrum"]


@dataclass(frozen=True)
class Spectrum:
    """Of one compressed matrix.

    Attributes:
        rank_bytes: What one more matrix rank costs per step, at most.
        max_rank: The largest that is worth while.
        energies: Squared singular values that were found, largest first.
        tail: The energy beyond them.
    """

    rank_bytes: int
    max_rank: int
    energies: Sequence[float]
    tail: float

    @property
    def matrix_rank(self) -> int:
        """That of the factors it was found from."""
        return len(self.energies)

    def energy(self, index: int) -> float:
        """Return a squared singular value, one beyond those found as of a series that adds up to the tail.

        The series is geometric.
        """
        if index < len(self.energies):
            return self.energies[index]
        return self.tail * (1 - self._ratio) * self._ratio ** (index - len(self.energies))

    def tail_at(self, matrix_rank: int) -> float:
        """Return the energy that an approximation of this matrix rank leaves out."""
        if matrix_rank < len(self.energies):
            return self.tail + math.fsum(self.energies[matrix_rank:])
        return self.tail * self._ratio ** (matrix_rank - len(self.energies))

    @property
    def farthest(self) -> tuple[int, int]:
        """The lowest and the highest matrix rank to go to at once: a quarter of it away, and at least one."""
        # The residual, and so the spectrum, follows the matrix rank within some steps only: to go all the way
        # at once overshoots.
        step = max(1, self.matrix_rank // 4)
        return max(1, self.matrix_rank - step), min(max(self.max_rank, 1), self.matrix_rank + step)

    @property
    def _ratio(self) -> float:
        last = self.energies[-1]
        return self.tail / (self.tail + last) if self.tail > 0 else 0.0


def within_bytes(spectra: Spectra, factor_bytes: float) -> dict[str, int]:
    """Return matrix ranks, on the way to those that leave out the least energy of all matrices together.

    Args:
        spectra: By parameter.
        factor_bytes: Of all of them together, per step; kept to as far as matrix rank 1 does.
    """
    max_ranks = {name: spectrum.max_rank for name, spectrum in spectra.items()}
    # First down, then up with what that has freed.
    best = _filled(spectra, dict.fromkeys(spectra, 1), max_ranks, factor_bytes)
    lowered = {
        name: min(spectrum.matrix_rank, max(best[name], spectrum.farthest[0]))
        for name, spectrum in spectra.items()
    }
    if _bytes_of(spectra, lowered) > factor_bytes:
        return best
    return _filled(
        spectra, lowered, {name: spectrum.farthest[1] for name, spectrum in spectra.items()}, factor_bytes
    )


def within_error(spectra: Spectra, max_relative_error: float) -> dict[str, int]:
    """Return matrix ranks, on the way to the smallest that leave out at most a share of each matrix's norm.

    Args:
        spectra: By parameter.
        max_relative_error: The share.
    """
    ranks = {}
    for name, spectrum in spectra.items():
        max_tail = max_relative_error**2 * (spectrum.tail + math.fsum(spectrum.energies))
        enough = (rank for rank in range(1, spectrum.max_rank) if spectrum.tail_at(rank) <= max_tail)
        lowest, highest = spectrum.farthest
        ranks[name] = min(max(next(enough, spectrum.max_rank), lowest), highest)
    return ranks


def _filled(
    spectra: Spectra, start: Mapping[str, int], max_ranks: Mapping[str, int], factor_bytes: float
) -> dict[str, int]:
    """Return `start`, and one more where that leaves out the most energy per byte, until nothing fits."""
    ranks, left = dict(start), factor_bytes - _bytes_of(spectra, start)
    # By name where two are worth the same: all members must choose alike.
    worth = [
        (-spectrum.energy(ranks[name]) / spectrum.rank_bytes, name)
        for name, spectrum in sorted(spectra.items())
        if ranks[name] < max_ranks[name]
    ]
    heapq.heapify(worth)
    while worth:
        _, name = heapq.heappop(worth)
        spectrum = spectra[name]
        if spectrum.rank_bytes <= left:  # else another, whose ranks cost less, may still fit
            left -= spectrum.rank_bytes
            ranks[name] += 1
            if ranks[name] < max_ranks[name]:
                heapq.heappush(worth, (-spectrum.energy(ranks[name]) / spectrum.rank_bytes, name))
    return ranks


def _bytes_of(spectra: Spectra, ranks: Mapping[str, int]) -> int:
    return sum(spectrum.rank_bytes * ranks[name] for name, spectrum in spectra.items())


def measured(
    routes: Sequence[LowRankRoute],
    rank_bytes: Mapping[str, int],
    max_ranks: Mapping[str, int],
    memory: Memory,
) -> Generator[Request | tuple[Message, ...], Any, dict[str, Spectrum]]:
    """Measure the spectra of compressed matrices, the same on all processes; of zero matrices there is none.

    Args:
        routes: Of compressed matrices with factors, at least one.
        rank_bytes: What one more matrix rank costs per step, at most, by parameter.
        max_ranks: By parameter.
        memory: Only read.

    Cost: a message of r + 4 · rows numbers for each matrix, r × r products, one pass over the error, and two
    host synchronisations.
    """
    factors = [memory[FACTOR][route.label] for route in routes]
    device = factors[0].device
    # All members have the same factors, yet may find other last bits on other processors: they take the mean,
    # and choose by that.
    singular_values = _singular_values(factors)
    sketches = [_sketch(route, memory).to(device).view(-1) for route in routes]
    means = yield Mean(torch.cat([torch.cat(singular_values).to(device), *sketches]))
    # Squared only now: wanted is the energy of the mean, and not the mean of energies.
    parts = means.cpu().double().square().split_with_sizes([len(s) for s in (*singular_values, *sketches)])
    found = {}
    for route, numbers, sketch in zip(routes, parts[: len(routes)], parts[len(routes) :], strict=True):
        # On a random direction each row has, on average over directions, its own energy.
        tail = float(sketch.sum()) / SKETCH_COLUMNS
        label = route.label
        if float(numbers.sum()) + tail > 0:
            found[label] = Spectrum(rank_bytes[label], max_ranks[label], numbers.tolist(), tail)
    return found


def _singular_values(factors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the singular values of each factor, fp32 on the CPU, largest first."""
    wide = [accelerators.in_float64(factor) for factor in factors]
    grams = [factor @ factor.t() for factor in wide]
    # Read back as one: r × r numbers each, too few for an accelerator to gain by.
    flat = torch.cat([gram.view(-1).to(grams[0].device) for gram in grams]).cpu()
    squares = [
        part.view(gram.shape)
        for part, gram in zip(flat.split_with_sizes([gram.numel() for gram in grams]), grams, strict=True)
    ]
    return [torch.linalg.eigvalsh(square).clamp(min=0).sqrt().flip(0).float() for square in squares]


def _sketch(route: LowRankRoute, memory: Memory) -> torch.Tensor:
    """Return this process's residual of a matrix on some random directions: (rows, 4)."""
    rows, columns = route.matrix_shape or (0, 0)
    error = memory[ERROR].get(route.label)
    if error is None:
        return torch.zeros(rows, SKETCH_COLUMNS, dtype=torch.float32)
    # The same on all processes: so the mean of what they find is what the mean residual has.
    directions = random_rows(SKETCH_SEED, (SKETCH_COLUMNS, columns), error.device).to(error.dtype)
    return (error.view(rows, columns) @ directions.t()).float()
