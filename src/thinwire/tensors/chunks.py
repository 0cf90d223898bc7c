"""A bucket's gradients cut into chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire.plan import ParameterSpec


class Run(NamedTuple):
    """Chunks of one parameter that lie one behind the other.

    Attributes:
        parameter: By index in the bucket.
        first: Where the first one begins in the bucket, in elements.
        num_chunks: How many they are.
    """

    parameter: int
    first: int
    num_chunks: int


@dataclass(frozen=True)
class Chunks:
    """The chunks of a bucket that have one length.

    Attributes:
        length: Elements of each.
        kept: Entries of each that are sent.
        runs: Where they lie.
    """

    length: int
    kept: int
    runs: tuple[Run, ...]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return sum(run.num_chunks for run in self.runs)

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the chunks as rows, (count, length): a view where they lie together, else a copy."""
        parts = [flat[run.first : run.first + run.num_chunks * self.length] for run in self.runs]
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        return together.view(self.count, self.length)


def kept_of(length: int, density: float) -> int:
    """Return how many entries of a chunk are sent: at least one.

    Examples:
        >>> kept_of(4096, 1 / 64), kept_of(100, 1 / 64), kept_of(10, 1 / 64)
        (64, 2, 1)
    """
    return max(1, round(density * length))


def chunks_of(specs: Sequence[ParameterSpec], length: int, density: float) -> tuple[Chunks, ...]:
    """Cut parameters into chunks, anew at each, in the order of memory; the last of each may be shorter.

    Returns:
        By length, each in the order of the bucket.

    Examples:
        >>> shapes = {"weight": (10, 10), "bias": (10,)}
        >>> specs = [ParameterSpec.of(name, torch.empty(shape)) for name, shape in shapes.items()]
        >>> [(chunks.length, chunks.count) for chunks in chunks_of(specs, 40, 0.1)]
        [(40, 2), (20, 1), (10, 1)]
    """
    runs: dict[int, list[Run]] = defaultdict(list)
    first = 0
    for parameter, spec in enumerate(specs):
        count, shorter = divmod(spec.numel, length)
        if count:
            runs[length].append(Run(parameter, first, count))
        if shorter:
            runs[shorter].append(Run(parameter, first + count * length, 1))
        first += spec.numel
    return tuple(Chunks(each, kept_of(each, density), tuple(found)) for each, found in runs.items())
