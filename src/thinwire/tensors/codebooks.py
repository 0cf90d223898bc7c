"""Codebooks: which numbers a block of gradients may become, in units of the block's scale.

Levels of 3 and 2 bits are those with the least mean squared error on a Gaussian (Lloyd, "Least Squares
Quantization in PCM", 1982; Max, "Quantizing for Minimum Distortion", 1960), those of 4 bits nearly so. At 8
bits they are equally far apart: there rounding hardly counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

Statistic: TypeAlias = Literal["largest", "root mean square", "mean magnitude"]


@dataclass(frozen=True)
class Codebook:
    """What codes of some bits stand for.

    Attributes:
        bits: Of a code.
        levels: Ascending and symmetric; a code is the place of one. Where a level is zero, zeros stay zeros.
        statistic: Of a block: it is the scale; "largest" is divided by the last level, so that nothing is
            cut off.
        is_linear: Whether levels are whole numbers, one apart.
        cubic: Where it is not 0, the level at k from the middle is k · (`cubic` + k²): so it is found without
            a table, and exactly.
    """

    bits: int
    levels: tuple[float, ...]
    statistic: Statistic
    is_linear: bool = False
    cubic: int = 0


def _symmetric(*magnitudes: float) -> tuple[float, ...]:
    """Return levels of both signs; zero, if given, once."""
    return (*[-each for each in reversed(magnitudes) if each], *magnitudes)


# Relative squared error of one member's gradients in blocks of 64 (byte GPT with AdamW, mean of early, mid
# and late in training):
#   4 bits   these 0.0086; the best fifteen 0.0083; sixteen, without zero, 0.0073; NF4 0.0083; equally far
#            apart 0.0103; FP4 (E2M1) 0.0114; E3M0 0.0367. Zeros are kept: Adam moves a parameter however
#            small its gradient is.
#   3 bits   these 0.0330, with zero 0.0416; times the largest 0.0357 and 0.0497; equally far apart 0.0562.
#   2 bits   these 0.105; three levels, with zero, 0.168.
# Scales found by least squares would gain 1 to 4 % of that.
CODEBOOKS: Mapping[int, Codebook] = MappingProxyType(
    {
        8: Codebook(8, tuple(float(level) for level in range(-127, 128)), "largest", is_linear=True),
        4: Codebook(4, _symmetric(*(float(k * (112 + k * k)) for k in range(8))), "largest", cubic=112),
        3: Codebook(3, _symmetric(0.245094, 0.756005, 1.343909, 2.151946), "root mean square"),
        2: Codebook(2, _symmetric(0.452780, 1.510418), "root mean square"),
        1: Codebook(1, (-1.0, 1.0), "mean magnitude"),
    }
)
"""By bits."""
