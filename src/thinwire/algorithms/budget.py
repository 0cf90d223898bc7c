"""Matrix ranks by parameter, chosen by what the run itself measures.

The idea of choosing them by layer, against the energy that each would leave out: Markov et al., "L-GreCo"
(arXiv 2210.17357). Here nothing is decomposed for it: the mean factors of the last step have the largest
singular values of the mean gradient, and the error memory tells how much is left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.algorithms.base import Memory
from thinwire.plan import Route

__all__ = ["Spectra", "Spectrum", "measured", "within_bytes", "within_error"]

Spectra = Mapping[str, "Spectrum"]


@dataclass(frozen=True)
class Spectrum:
    """Of one compressed matrix.

    Attributes:
        rank_bytes: What one more matrix rank costs a step.
        most_rank: The largest that is worth while.
        energies: Squared singular values that were found, largest first.
        rest: The energy beyond them.
    """

    rank_bytes: int
    most_rank: int
    energies: Sequence[float]
    rest: float

    @property
    def matrix_rank(self) -> int:
        """That of the factors that tell it."""
        return len(self.energies)

    def energy(self, index: int) -> float:
        """A squared singular value; beyond those found, of a geometric series that adds up to the rest."""
        if index < len(self.energies):
            return self.energies[index]
        return self.rest * (1 - self._ratio) * self._ratio ** (index - len(self.energies))

    def rest_at(self, matrix_rank: int) -> float:
        """The energy that an approximation of this matrix rank leaves out."""
        if matrix_rank < len(self.energies):
            return self.rest + math.fsum(self.energies[matrix_rank:])
        return self.rest * self._ratio ** (matrix_rank - len(self.energies))

    @property
    def _ratio(self) -> float:
        last = self.energies[-1]
        return self.rest / (self.rest + last) if self.rest > 0 else 0.0


def within_bytes(spectra: Spectra, factor_bytes: float) -> dict[str, int]:
    """Half the way to the matrix ranks that leave out the least energy of all matrices together.

    Half, because what a matrix owes, and so its spectrum, follows its matrix rank within some steps: the
    whole way overshoots. What is then left of the bytes goes where it leaves out least.

    Args:
        spectra: By parameter.
        factor_bytes: For all of them, a step; kept to as far as matrix rank 1 does.
    """
    best = _filled(spectra, dict.fromkeys(spectra, 1), factor_bytes)
    half = {name: max(1, (each.matrix_rank + best[name]) // 2) for name, each in spectra.items()}
    return _filled(spectra, half, factor_bytes) if _bytes_of(spectra, half) <= factor_bytes else best


def within_error(spectra: Spectra, relative_error: float) -> dict[str, int]:
    """Half the way to the smallest matrix rank of each that leaves out at most this share of its norm."""
    ranks = {}
    for name, each in spectra.items():
        most_rest = relative_error**2 * (each.rest + math.fsum(each.energies))
        enough = (rank for rank in range(1, each.most_rank) if each.rest_at(rank) <= most_rest)
        ranks[name] = min(each.most_rank, (each.matrix_rank + next(enough, each.most_rank) + 1) // 2)
    return ranks


def _filled(spectra: Spectra, start: Mapping[str, int], factor_bytes: float) -> dict[str, int]:
    """`start`, and one more where that leaves out the most energy a byte, until nothing fits."""
    ranks, left = dict(start), factor_bytes - _bytes_of(spectra, start)
    worth = [
        (-each.energy(ranks[name]) / each.rank_bytes, name)
        for name, each in sorted(spectra.items())
        if ranks[name] < each.most_rank
    ]
    heapq.heapify(worth)
    while worth:
        _, name = heapq.heappop(worth)
        each = spectra[name]
        if each.rank_bytes <= left:
            left -= each.rank_bytes
            ranks[name] += 1
            if ranks[name] < each.most_rank:
                heapq.heappush(worth, (-each.energy(ranks[name]) / each.rank_bytes, name))
    return ranks


def _bytes_of(spectra: Spectra, ranks: Mapping[str, int]) -> int:
    return sum(each.rank_bytes * ranks[name] for name, each in spectra.items())


def measured(
    routes: Sequence[Route], most_ranks: Mapping[str, int], memory: Memory
) -> Generator[torch.Tensor, torch.Tensor, dict[str, Spectrum]]:
    """The spectra of all compressed matrices, the same on all processes: one message of r + 1 numbers each.

    Args:
        routes: Of the compressed matrices.
        most_ranks: By parameter.
        memory: Only read.

    Cost: r × r products and eigenvalues, and one norm, a matrix; one host synchronisation.
    """
    known = [route for route in routes if route.label in memory.factor]
    parts = []
    for route in known:
        factor = memory.factor[route.label].double()
        energies = torch.linalg.eigvalsh(factor @ factor.t()).clamp(min=0).flip(0)
        error = memory.error.get(route.label)
        rest = energies.new_zeros(1) if error is None else error.double().square().sum().view(1)
        parts += [energies, rest.to(energies.device)]
    means = yield torch.cat(parts)
    found = {}
    lengths = [len(memory.factor[route.label]) + 1 for route in known]
    for route, numbers in zip(known, means.cpu().split_with_sizes(lengths), strict=True):
        *energies_found, rest_found = numbers.tolist()
        rank_bytes = route.message_bytes // (route.matrix_rank or 1)
        found[route.label] = Spectrum(rank_bytes, most_ranks[route.label], energies_found, rest_found)
    return found
