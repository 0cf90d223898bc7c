"""What is averaged of a model: its trainable parameters, and buffers that it saves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from thinwire.errors import ConfigError, GradientError
from thinwire.fronts.ddp_model import plain_name
from thinwire.plan import ParameterSpec

__all__ = ["Averaged", "averaged_tensors", "held_of"]


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


def averaged_tensors(
    module: nn.Module, *, ignored: Iterable[str], buffers: bool, is_sharded: bool = False
) -> list[Averaged]:
    """Return what is averaged of a module: trainable parameters and, if asked, saved floating buffers.

    Integer buffers (BatchNorm's `num_batches_tracked`) have no mean; buffers that the module does not save
    (masks, position tables) are constants.

    Args:
        module: The module.
        ignored: Names of parameters and buffers to leave out.
        buffers: Whether to include buffers.
        is_sharded: Whether FSDP2 holds its parameters.

    Raises:
        ConfigError: It trains nothing, or has parameters without a shape yet.
        GradientError: It has parameters that others than FSDP2 have sharded over processes.
    """
    left_out = set(ignored)
    found = []
    # In the model's order, which is the same on every process and decides what travels where.
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or name in left_out:
            continue
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(f"{name} has no shape yet; run one forward pass before averaging the model")
        if hasattr(parameter, "to_local") and not is_sharded:
            raise GradientError(
                f"{name} is sharded over processes, expected whole parameters or those of fully_shard; "
                "LocalSGD averages no others"
            )
        found.append(Averaged(plain_name(name), parameter, is_buffer=False))
    if not found:
        raise ConfigError(f"{type(module).__name__} has no trainable parameter: there is nothing to average")
    # Module by module: which buffers are not saved only the module knows that has them. One that modules
    # share is averaged once.
    seen: set[int] = set()
    for prefix, part in module.named_modules() if buffers else ():
        for own_name, buffer in part.named_buffers(recurse=False):
            name = f"{prefix}.{own_name}" if prefix else own_name
            if id(buffer) not in seen and own_name not in part._non_persistent_buffers_set:
                seen.add(id(buffer))
                if buffer.is_floating_point() and name not in left_out:
                    found.append(Averaged(name, buffer, is_buffer=True))
    return found
