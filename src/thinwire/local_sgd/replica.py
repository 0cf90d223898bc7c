"""A process's replica of the model: what is averaged of it, and what it was after the last averaging."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from thinwire.ddp import plain_name
from thinwire.errors import ConfigError, GradientError, StepError
from thinwire.plan import ParameterSpec

__all__ = ["Averaged", "Replica", "averaged_tensors"]


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
    """What is averaged of a module: trainable parameters and, if asked, saved floating buffers.

    Integer buffers (BatchNorm's `num_batches_tracked`) have no mean; buffers that the module does not
    save (masks, position tables) are constants.

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
        if parameter.requires_grad and name not in left_out:
            _check_parameter(name, parameter)
            found.append(Averaged(plain_name(name), parameter, is_buffer=False))
    if not found:
        raise ConfigError(f"{type(module).__name__} has no trainable parameter: there is nothing to average")
    saved = [
        Averaged(name, buffer, is_buffer=True)
        for name, buffer in (_saved_buffers(module) if buffers else ())
        if name not in left_out and buffer.is_floating_point()
    ]
    return [*found, *saved]


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ConfigError(f"{name} has no shape yet; run one forward pass before averaging the model")
    if hasattr(parameter, "to_local"):
        raise GradientError(f"{name} is sharded over processes; LocalSGD averages whole replicas only")


def _saved_buffers(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    seen = set()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if id(buffer) not in seen and name not in part._non_persistent_buffers_set:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


class _Bucket(NamedTuple):
    """Tensors of one device and type: what they were after the last averaging, flat and as views of it."""

    members: tuple[Averaged, ...]
    specs: tuple[ParameterSpec, ...]
    flat: torch.Tensor

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat` cut up into the shapes and the orders of memory of the members."""
        views, offset = [], flat.storage_offset()
        for spec in self.specs:
            views.append(flat.as_strided(spec.shape, spec.stride, offset))
            offset += spec.numel
        return views


class Replica:
    """The averaged tensors of one process, and a copy of what all processes held after the last averaging.

    What travels is the *change* since then. The model's tensors are written in place.

    Args:
        averaged: What is averaged. The copy is taken of their values now.

    Attributes:
        last_parameters: The parameters after the last averaging, without buffers: what an outer optimizer
            steps. Always the same tensors.

    Cost: one copy of them, and another one while an averaging is under way.
    """

    def __init__(self, averaged: Sequence[Averaged]) -> None:
        kinds = defaultdict(list)
        for each in averaged:
            kinds[each.value.device, each.value.dtype].append(each)
        self._averaged = list(averaged)
        self._buckets = [_new_bucket(members) for members in kinds.values()]
        self.last_parameters = self._of_parameters([bucket.flat for bucket in self._buckets])

    @property
    def layout(self) -> list[tuple[ParameterSpec, ...]]:
        """The parameters of each bucket: one a device and type."""
        return [bucket.specs for bucket in self._buckets]

    @property
    def device(self) -> torch.device:
        """Where the first bucket lives."""
        return self._buckets[0].flat.device

    def take(self) -> None:
        """What the model holds now, on all processes alike, counts as the last average."""
        for bucket in self._buckets:
            _take(bucket)

    def check_unchanged(self, averaged: Sequence[Averaged]) -> None:
        """Refuse a model that trains other tensors now than when the copy was taken.

        Raises:
            StepError: It does.
        """
        before, now = ([(each.name, id(each.tensor)) for each in of] for of in (self._averaged, averaged))
        if before != now:
            differing = sorted({name for name, _ in set(before) ^ set(now)})
            raise StepError(
                f"the model's trainable parameters or buffers are others than on entry: {differing[:4]}; "
                "leave the LocalSGD context before you freeze, unfreeze or replace some, and enter a new one"
            )

    def changes(self) -> list[torch.Tensor]:
        """By bucket, flat: what has changed since the last averaging on this process."""
        changes = [torch.empty_like(bucket.flat) for bucket in self._buckets]
        for bucket, flat in zip(self._buckets, changes, strict=True):
            triples = zip(bucket.members, bucket.views(flat), bucket.views(bucket.flat), strict=True)
            for each, change, last in triples:
                torch.sub(each.value, last, out=change)
                if each.is_buffer:
                    change.masked_fill_(each.value == last, 0)  # infinite entries that stayed the same
        return changes

    def write(self, mean_changes: Sequence[torch.Tensor]) -> None:
        """The model becomes the last average plus `mean_changes`; the last average stays what it was."""
        for bucket, mean in zip(self._buckets, mean_changes, strict=True):
            _write(bucket, bucket.flat + mean)

    def move(self, mean_changes: Sequence[torch.Tensor]) -> None:
        """The last average, and the model, become the last average plus `mean_changes`."""
        for bucket, mean in zip(self._buckets, mean_changes, strict=True):
            bucket.flat.add_(mean)
            _write(bucket, bucket.flat)

    def move_by(self, outer: torch.optim.Optimizer, mean_changes: Sequence[torch.Tensor]) -> None:
        """`move`, but of parameters by a step of `outer`, whose gradient is minus the mean change."""
        for last, change in zip(self.last_parameters, self._of_parameters(mean_changes), strict=True):
            last.grad = change.neg_()
        outer.step()
        outer.zero_grad(set_to_none=True)
        for bucket, mean in zip(self._buckets, mean_changes, strict=True):
            triples = zip(bucket.members, bucket.views(bucket.flat), bucket.views(mean), strict=True)
            for each, last, change in triples:
                if each.is_buffer:
                    last.add_(change)
            _write(bucket, bucket.flat)

    def _of_parameters(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters' views of `flats`, without those of buffers."""
        return [
            view
            for bucket, flat in zip(self._buckets, flats, strict=True)
            for each, view in zip(bucket.members, bucket.views(flat), strict=True)
            if not each.is_buffer
        ]

    def last_average(self) -> dict[str, torch.Tensor]:
        """By name, as copies: what all processes held after the last averaging."""
        return {
            spec.name: view.clone(memory_format=torch.contiguous_format)
            for bucket in self._buckets
            for spec, view in zip(bucket.specs, bucket.views(bucket.flat), strict=True)
        }

    def load(self, last_average: Mapping[str, torch.Tensor]) -> None:
        """Take over a saved last average. The model is left alone."""
        for bucket in self._buckets:
            for spec, view in zip(bucket.specs, bucket.views(bucket.flat), strict=True):
                view.copy_(last_average[spec.name])


def _new_bucket(members: Sequence[Averaged]) -> _Bucket:
    specs = tuple(each.spec for each in members)
    flat = members[0].value.new_empty(sum(spec.numel for spec in specs))
    bucket = _Bucket(tuple(members), specs, flat)
    _take(bucket)
    return bucket


def _take(bucket: _Bucket) -> None:
    for each, view in zip(bucket.members, bucket.views(bucket.flat), strict=True):
        view.copy_(each.value)


def _write(bucket: _Bucket, flat: torch.Tensor) -> None:
    for each, view in zip(bucket.members, bucket.views(flat), strict=True):
        each.value.copy_(view)
