"""A tensor of a model that is averaged, and what this process holds of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from thinwire.plan import ParameterSpec


class Averaged(NamedTuple):
    """A tensor of the model that is averaged.

    Attributes:
        name: Its name in the model.
        tensor: The model's own tensor, never replaced.
        is_buffer: Whether it is a buffer: an outer optimizer leaves it alone.
    """

    name: str
    tensor: torch.Tensor
    is_buffer: bool

    @property
    def spec(self) -> ParameterSpec:
        """As DDP's buckets hold it: complex as real numbers, with a last dimension of two."""
        return ParameterSpec.of(self.name, self.value)._replace(is_statistic=self.is_buffer)

    @property
    def value(self) -> torch.Tensor:
        """The model's own values, as real numbers; of a sharded parameter, those on this process."""
        tensor = held_of(self.tensor)
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor

    @property
    def identity(self) -> tuple[object, ...]:
        """What must stay as it is while averagings go on."""
        return id(self.tensor), tuple(self.value.shape), self.value.dtype, self.value.device


def held_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor, which shares its memory."""
    detached = tensor.detach()
    # Of a DTensor, not by its type: that takes seconds to import.
    return detached.to_local() if hasattr(detached, "to_local") else detached
