"""The algorithms that are priced: what each sends, its arithmetic, and what is known of its loss.

Nothing that `thinwire advise` imports needs torch. The bytes are those of the algorithms' own plans, for
gradients in fp32: a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias, cast

from thinwire.wire import Collective

if TYPE_CHECKING:
    from thinwire.algorithms import Algorithm

Shape = tuple[int, ...]


class Volume(NamedTuple):
    """The messages of a bucket in a step, and the memory that it keeps."""

    handed_bytes: tuple[int, ...]  # that a process contributes to each round's collective
    residual_bytes: int = 0


@dataclass(frozen=True)
class WholeElements:
    """Each element by itself."""

    collectives: ClassVar[tuple[Collective, ...]] = ("all_reduce",)
    element_bytes: int

    def sent(self, bucket: Sequence[Shape], members: int) -> Volume:
        return Volume((self.element_bytes * sum(map(math.prod, bucket)),))


@dataclass(frozen=True)
class InBlocks:
    """`Quantize`: codes in blocks, each with a scale of two bytes; each member averages as many blocks."""

    collectives: ClassVar[tuple[Collective, ...]] = ("all_to_all", "all_gather")
    bits: int
    block: int = 64

    @property
    def block_bytes(self) -> int:
        return self.block * self.bits // 8 + 2

    def sent(self, bucket: Sequence[Shape], members: int) -> Volume:
        blocks = sum(math.ceil(math.prod(shape) / self.block) for shape in bucket)
        filled = math.ceil(blocks / members) * members
        return Volume((filled * self.block_bytes, filled // members * self.block_bytes))


@dataclass(frozen=True)
class InFactors:
    """`PowerSGD`: P and Q of each matrix that they halve or more, if alternating one of both; else all."""

    collectives: ClassVar[tuple[Collective, ...]] = ("all_reduce", "all_reduce")
    matrix_rank: int
    alternating: bool = False

    @property
    def factor_pairs(self) -> float:
        """Pairs of P and Q that are sent in a step."""
        return 0.5 if self.alternating else 1.0

    def sent(self, bucket: Sequence[Shape], members: int) -> Volume:
        numels = [math.prod(shape) for shape in bucket]
        factors = [self._factor_bytes(shape) for shape in bucket]
        whole = sum(4 * numel for numel, sent in zip(numels, factors, strict=True) if not sent)
        if whole + sum(factors) >= 4 * sum(numels):
            return Volume((4 * sum(numels),))
        residual = 4 * sum(numels) - whole
        if self.alternating:
            return Volume((whole + sum(factors),), residual)
        return Volume((whole + sum(factors) // 2, sum(factors) // 2), residual)

    def _factor_bytes(self, shape: Shape) -> int:
        """Return the bytes of a gradient's factors; 0 if it is sent whole."""
        matrix_rank = min(self.matrix_rank, *shape)
        sent = int(4 * matrix_rank * sum(shape) * self.factor_pairs)
        return sent if len(shape) == 2 and 2 * sent < 4 * math.prod(shape) else 0


@dataclass(frozen=True)
class LargestEntries:
    """`TopK`: 2^-low_bits of each chunk's entries, with low and high bits of their positions, and codes."""

    collectives: ClassVar[tuple[Collective, ...]] = ("all_gather",)
    low_bits: int
    code_bits: int = 2
    chunk: int = 4096

    def sent(self, bucket: Sequence[Shape], members: int) -> Volume:
        entries = marks = scales = 0
        numels = [math.prod(shape) for shape in bucket]
        for numel in numels:
            for count, length in ((numel // self.chunk, self.chunk), (1, numel % self.chunk)):
                if length:
                    entries += count * max(1, round(length / 2**self.low_bits))
                    marks += count * (length - 1 >> self.low_bits)
                    scales += 2 * count
        marks += entries  # one is set for each entry
        words = math.ceil(entries * (self.low_bits + self.code_bits) / 8)
        num_bytes = math.ceil(marks / 8) + words + 2 * scales
        return Volume((num_bytes + num_bytes % 2,), 4 * sum(numels))


Format: TypeAlias = WholeElements | InBlocks | InFactors | LargestEntries
"""How gradients are sent: the collective of each round, and the bytes."""


@dataclass(frozen=True)
class Priced:
    """An algorithm that `thinwire.advise` and `auto` consider.

    Attributes:
        name: What stands in code after `thinwire.`.
        format: How it sends gradients.
        arithmetic_seconds: What its arithmetic adds to a step for each element, on one H100.
        keeps_16_bits: Whether its means are as good as 16 bits.
        loses_more_than: If this one was not measured: an algorithm (as `str`) that certainly loses less.
        loses_less_than: And one that certainly loses more.
        prints_as: `str` of the algorithm, if it is not the name.
    """

    name: str
    format: Format
    arithmetic_seconds: float
    keeps_16_bits: bool = False
    loses_more_than: str = ""
    loses_less_than: str = ""
    prints_as: str = ""

    @property
    def algorithm(self) -> Algorithm:
        from thinwire.algorithms.registry import parsed  # noqa: PLC0415 - it imports torch

        return cast("Algorithm", parsed(self.name))

    @property
    def measured_as(self) -> str:
        """The name of its losses in the table, `str` of the algorithm."""
        return self.prints_as or self.name


# Arithmetic: the larger of the extra time of whole steps with 163 M parameters, and the device's own time for
# 124 M. Settings that were not timed get the time of the next rougher or larger one. From
# benchmarks/results/2026-11-26-gpu-h100.md, see docs/results.md.
ARITHMETIC_SOURCE = "one H100 (docs/results.md)"
TABLE = (
    Priced("AllReduce()", WholeElements(4), 0.0, keeps_16_bits=True),
    Priced(
        'Cast("bf16")', WholeElements(2), 1.21e-3 / 163e6, keeps_16_bits=True, prints_as="Cast(dtype='bf16')"
    ),
    Priced(
        "Quantize(bits=8)",
        InBlocks(8),
        1.96e-3 / 163e6,
        loses_more_than="Cast(dtype='bf16')",
        loses_less_than="Quantize(bits=4)",
    ),
    Priced(
        "Quantize(bits=6)",
        InBlocks(6),
        1.96e-3 / 163e6,
        loses_more_than="Quantize(bits=8)",
        loses_less_than="Quantize(bits=4)",
    ),
    Priced("Quantize(bits=4)", InBlocks(4), 1.94e-3 / 163e6),
    Priced("Quantize(bits=2)", InBlocks(2), 2.07e-3 / 163e6),
    Priced("PowerSGD(matrix_rank=1)", InFactors(1), 1.54e-3 / 124e6),
    Priced("PowerSGD(matrix_rank=2)", InFactors(2), 1.80e-3 / 124e6),
    Priced("PowerSGD(matrix_rank=4)", InFactors(4), 1.80e-3 / 124e6),
    Priced(
        "PowerSGD(matrix_rank=8)",
        InFactors(8),
        2.37e-3 / 124e6,
        loses_more_than="PowerSGD(matrix_rank=16)",
        loses_less_than="PowerSGD(matrix_rank=4)",
    ),
    Priced(
        "PowerSGD(matrix_rank=4, alternating=True)",
        InFactors(4, alternating=True),
        1.80e-3 / 124e6,
        loses_more_than="PowerSGD(matrix_rank=8, alternating=True)",
    ),
    Priced("PowerSGD(matrix_rank=16)", InFactors(16), 5.86e-3 / 124e6),
    Priced("TopK(density=0.03125)", LargestEntries(low_bits=5), 2.12e-3 / 124e6),
)


def priced() -> dict[str, Priced]:
    """Return the priced algorithms by name."""
    return {row.name: row for row in TABLE}
