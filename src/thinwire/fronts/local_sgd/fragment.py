"""A slice of the model: what is averaged of it, what it was after the last averaging, what averages it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from thinwire.errors import ConfigError, GradientError, NonfiniteError, StepError
from thinwire.fronts.ddp_model import plain_name
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine

__all__ = ["Averaged", "Fragment", "are_finite", "averaged_tensors"]


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
        return ParameterSpec.of(self.name, self.value)

    @property
    def value(self) -> torch.Tensor:
        """The model's own values, as real numbers."""
        tensor = self.tensor.detach()
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def averaged_tensors(module: nn.Module, *, ignored: Iterable[str], buffers: bool) -> list[Averaged]:
    """Return what is averaged of a module: trainable parameters and, if asked, saved floating buffers.

    Integer buffers (BatchNorm's `num_batches_tracked`) have no mean; buffers that the module does not save
    (masks, position tables) are constants.

    Args:
        module: The module.
        ignored: Names of parameters and buffers to leave out.
        buffers: Whether to include buffers.

    Raises:
        ConfigError: It trains nothing, or has parameters without a shape yet.
        GradientError: It has parameters that are sharded over processes.
    """
    left_out = set(ignored)
    found = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or name in left_out:
            continue
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(f"{name} has no shape yet; run one forward pass before averaging the model")
        if hasattr(parameter, "to_local"):
            raise GradientError(f"{name} is sharded over processes; LocalSGD averages whole replicas only")
        found.append(Averaged(plain_name(name), parameter, is_buffer=False))
    if not found:
        raise ConfigError(f"{type(module).__name__} has no trainable parameter: there is nothing to average")
    seen: set[int] = set()
    for prefix, part in module.named_modules() if buffers else ():
        for own_name, buffer in part.named_buffers(recurse=False):
            name = f"{prefix}.{own_name}" if prefix else own_name
            if id(buffer) not in seen and own_name not in part._non_persistent_buffers_set:
                seen.add(id(buffer))
                if buffer.is_floating_point() and name not in left_out:
                    found.append(Averaged(name, buffer, is_buffer=True))
    return found


class Fragment:
    """Some of the averaged tensors, and a copy of what all processes held after their last averaging.

    What travels is the *change* since then, flat, in one bucket for each device and type. The model's
    tensors are written in place. Each fragment has an engine of its own, and so memory, step count and plan.

    Args:
        averaged: What is averaged.
        engine: Averages the changes over the group.

    Attributes:
        parameters: Those of the copy, without buffers, for an outer optimizer: always the same tensors.
        outer: Steps them, with minus their mean change as gradient; None for the mean itself.
    """

    def __init__(self, averaged: Sequence[Averaged], engine: Engine) -> None:
        self.averaged, self.engine = tuple(averaged), engine
        self.outer: torch.optim.Optimizer | None = None
        kinds = defaultdict(list)
        for each in averaged:
            kinds[each.value.device, each.value.dtype].append(each)
        self._buckets = list(kinds.values())
        self._layout = [tuple(each.spec for each in bucket) for bucket in self._buckets]
        self._last = [
            bucket[0].value.new_empty(sum(spec.numel for spec in specs))
            for bucket, specs in zip(self._buckets, self._layout, strict=True)
        ]
        self._lasts = self._parts(self._last)
        self.parameters = [last for each, last in self._lasts if not each.is_buffer]

    def _parts(self, flats: Sequence[torch.Tensor]) -> list[tuple[Averaged, torch.Tensor]]:
        """Return each tensor with its part of what is flat, a view in its shape and order of memory."""
        parts = []
        for bucket, specs, flat in zip(self._buckets, self._layout, flats, strict=True):
            offset = flat.storage_offset()
            for each, spec in zip(bucket, specs, strict=True):
                parts.append((each, flat.as_strided(spec.shape, spec.stride, offset)))
                offset += spec.numel
        return parts

    def take(self) -> None:
        """Let what the model holds now, on all processes alike, count as the last average."""
        for each, last in self._lasts:
            last.copy_(each.value)

    def load(self, last_average: Mapping[str, torch.Tensor]) -> None:
        """Take over a saved last average. The model is left alone."""
        for each, last in self._lasts:
            last.copy_(last_average[each.name])

    def last_average(self) -> dict[str, torch.Tensor]:
        """Return by name, as copies, what all processes held after the last averaging."""
        return {each.name: last.clone(memory_format=torch.contiguous_format) for each, last in self._lasts}

    def changes(self) -> list[torch.Tensor]:
        """Return by bucket, flat, what has changed since the last averaging on this process."""
        changes = [torch.empty_like(last) for last in self._last]
        for (each, change), (_, last) in zip(self._parts(changes), self._lasts, strict=True):
            torch.sub(each.value, last, out=change)
            if each.is_buffer:
                change.masked_fill_(each.value == last, 0)  # infinite entries that stayed the same
        return changes

    def average(self, changes: Sequence[torch.Tensor], engine: Engine) -> None:
        """Replace changes by their means. Collective.

        Args:
            changes: By bucket, as from `changes`.
            engine: What averages them.

        Raises:
            StepError: A mean is not finite. The memory is as it was.
            CommunicationError: A collective failed. The memory is as it was.
        """
        try:
            committed = engine.average(zip(self._layout, changes, strict=True))
        except NonfiniteError:
            committed = False
        if not committed or not are_finite(changes):
            raise StepError(
                "the mean change of the parameters is not finite though that of each process is: it has left "
                "the range of the type it travels in. Nothing was averaged; average more often, or otherwise"
            )

    def write(self, means: Sequence[torch.Tensor]) -> None:
        """Make the model the last average, which stays, plus mean changes, which are overwritten."""
        for (each, last), (_, mean) in zip(self._lasts, self._parts(means), strict=True):
            each.value.copy_(mean.add_(last))

    def move(self, means: Sequence[torch.Tensor], *, by_outer: bool) -> None:
        """Make the last average, and the model, the last average plus mean changes, which are overwritten.

        Args:
            means: By bucket.
            by_outer: Whether the outer optimizer, if there is one, is what moves the parameters.
        """
        outer = self.outer if by_outer else None
        for (each, last), (_, change) in zip(self._lasts, self._parts(means), strict=True):
            if outer is None or each.is_buffer:
                last.add_(change)
            else:
                last.grad = change.neg_()
        if outer is not None:
            outer.step()
            outer.zero_grad(set_to_none=True)
        for each, last in self._lasts:
            each.value.copy_(last)


def are_finite(flats: Sequence[torch.Tensor]) -> bool:
    """Return whether every element is finite. Cost: one host synchronisation."""
    device = flats[0].device
    return bool(torch.stack([flat.isfinite().all().to(device) for flat in flats]).all())
