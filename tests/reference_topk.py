"""Top-k with error feedback in NumPy, entry by entry, as its docstring says; nothing of Thinwire is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def bf16(values: Array) -> Array:
    """Round to the nearest bf16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.asarray(rounded.astype(np.uint32).view(np.float32), dtype=np.float64)


def rounded(values: Array, bits: int) -> Array:
    """What the entries of a chunk that are sent become."""
    if bits == 16:
        return bf16(values)
    sizes = np.sort(np.abs(values))
    lowest, highest = sizes[0], sizes[-1]
    if bits == 2 and len(sizes) > 1:
        sides = [(sizes[:border], sizes[border:]) for border in range(1, len(sizes))]
        best = min(sides, key=lambda halves: sum(((side - side.mean()) ** 2).sum() for side in halves))
        lowest, highest = best[0].mean(), best[1].mean()
    lowest, highest = bf16(np.array([lowest, highest]))
    levels = np.linspace(lowest, highest, 2 ** (bits - 1))
    nearest = np.abs(np.abs(values)[:, None] - levels).argmin(1)
    return np.asarray(np.where(values < 0, -1, 1) * levels[nearest])


@dataclass
class Reference:
    """Members that average what they have."""

    sizes: Sequence[int]  # of the parameters
    num_members: int
    density: float
    bits: int
    chunk: int
    error_decay: float
    merge: str

    def __post_init__(self) -> None:
        self.residuals = np.zeros((self.num_members, sum(self.sizes)))

    def sent(self, wanted: Array) -> Array:
        """What one member sends, zero where it sends nothing."""
        result, first = np.zeros_like(wanted), 0
        for size in self.sizes:
            for start in range(first, first + size, self.chunk):
                part = wanted[start : min(start + self.chunk, first + size)]
                kept = max(1, round(self.density * len(part)))
                places = np.argsort(-np.abs(part))[:kept]
                result[start + places] = rounded(part[places], self.bits)
            first += size
        return result

    def average(self, gradients: Array) -> Array:
        """One step: (members, elements) → (elements,)."""
        wanted = self.error_decay * self.residuals + gradients
        sent = np.stack([self.sent(row) for row in wanted])
        self.residuals = wanted - sent
        divisor = self.num_members if self.merge == "members" else np.maximum((sent != 0).sum(0), 1)
        return np.asarray(sent.sum(0) / divisor)
