"""Gradients in 16 bits on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire.algorithms.base import Algorithm, Bucket, Memory, Rounds
from thinwire.algorithms.exact import exchange_whole
from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec, Plan, Route

__all__ = ["Cast", "WireDtype", "wire_dtype_of"]

WireDtype = Literal["fp16", "bf16"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def wire_dtype_of(name: object) -> torch.dtype:
    """The torch type called "fp16" or "bf16".

    Raises:
        ConfigError: It is neither.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise ConfigError(f'a 16-bit type must be "fp16" or "bf16", got {name!r}')
    return _DTYPES[name]


@dataclass(frozen=True)
class Cast(Algorithm):
    """Average gradients in 16 bits: half the bytes of fp32, rounded.

    "fp16" has 11 bits of precision and overflows above 65 504 (the mean comes out infinite, so that
    a `GradScaler` skips the step); "bf16" has 8 bits and fp32's range. There is no error feedback,
    as in PyTorch's `fp16_compress_hook`.

    Args:
        dtype: "fp16" or "bf16".

    Cost: one round of 2 bytes an element; a 16-bit copy of the bucket while it travels.

    Raises:
        ConfigError: Any other type.

    Examples:
        >>> Cast("bf16").plan([ParameterSpec("weight", (8, 4), (4, 1), torch.float32)]).message_bytes
        64
    """

    dtype: WireDtype

    def __post_init__(self) -> None:
        wire_dtype_of(self.dtype)

    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """Everything travels whole, in 16 bits."""
        return Plan(tuple(Route((spec.name,), spec.gradient_bytes, 2 * spec.numel) for spec in specs))

    def exchange(self, bucket: Bucket, memory: Memory) -> Rounds:
        """One round: the flat gradient in 16 bits."""
        yield from exchange_whole(bucket, memory, wire_dtype_of(self.dtype))
