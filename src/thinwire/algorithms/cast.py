"""Gradients in 16 bits on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from thinwire.algorithms.base import Algorithm, BucketPlan
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.exact import UncompressedPlan
from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec

WireDtype: TypeAlias = Literal["fp16", "bf16", "float16", "bfloat16"] | torch.dtype

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SHORT_NAMES: dict[object, Literal["fp16", "bf16"]] = {
    **dict.fromkeys(("fp16", "float16", torch.float16), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), "bf16"),
}


def short_name_of(given: object) -> Literal["fp16", "bf16"]:
    """Return what a 16-bit type is called here, given by that name or as torch calls it."""
    # The kind first: what has no hash can't be looked for.
    if not isinstance(given, str | torch.dtype) or given not in _SHORT_NAMES:
        raise ConfigError(f'a 16-bit type must be "fp16" or "bf16", got {given!r}')
    return _SHORT_NAMES[given]


def wire_dtype_of(given: object) -> torch.dtype:
    """Return the torch type that a setting names."""
    return _DTYPES[short_name_of(given)]


@dataclass(frozen=True)
class Cast(Algorithm):
    """Average gradients in 16 bits: half the bytes of fp32, rounded.

    "fp16" has 11 bits of precision and overflows above 65 504 (the mean comes out infinite, so that
    a `GradScaler` skips the step); "bf16" has 8 bits and fp32's range. There is no error feedback,
    as in PyTorch's `fp16_compress_hook`.

    Args:
        dtype: "fp16" or "bf16", or torch's name or object for it: `Cast(torch.bfloat16)`.

    Cost: one round of 2 bytes per element; a 16-bit copy of the bucket while it travels.

    Raises:
        ConfigError: Any other type.

    Examples:
        >>> Cast("bf16").plan([ParameterSpec("weight", (8, 4), (4, 1), torch.float32)]).message_bytes
        64
    """

    slots = (ERROR,)

    dtype: WireDtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", short_name_of(self.dtype))

    @property
    def indivisible(self) -> int:
        """As `Algorithm.indivisible`: an element."""
        return 1

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        """As `Algorithm.prepare`: all travels uncompressed, in 16 bits."""
        return UncompressedPlan.of(specs, wire_dtype_of(self.dtype))
