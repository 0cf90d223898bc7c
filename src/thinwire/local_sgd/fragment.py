"""A fragment of a model with its last average, and how a model is divided into fragments."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec
from thinwire.tensors.layout import local_tensor


class Averaged(NamedTuple):
    """A tensor of the model that is averaged."""

    name: str  # in the model
    tensor: torch.Tensor  # the model's own tensor, never replaced
    is_buffer: bool  # an outer optimizer leaves buffers alone

    @property
    def spec(self) -> ParameterSpec:
        """The spec as in DDP's buckets: complex as real numbers, with a last dimension of two."""
        return ParameterSpec.of(self.name, self.value)._replace(is_statistic=self.is_buffer)

    @property
    def value(self) -> torch.Tensor:
        """The model's own values, as real numbers; for a sharded parameter, those on this process."""
        tensor = local_tensor(self.tensor)
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Buckets:
    """Tensors that are sent flat, as one for each device and dtype, buffers separately."""

    def __init__(self, averaged: Iterable[Averaged]) -> None:
        kinds = defaultdict(list)
        for tensor in averaged:
            kinds[tensor.value.device, tensor.value.dtype, tensor.is_buffer].append(tensor)
        self._buckets = list(kinds.values())
        self.layout = [tuple(tensor.spec for tensor in bucket) for bucket in self._buckets]

    def __iter__(self) -> Iterator[Averaged]:
        return chain.from_iterable(self._buckets)

    def empty(self, device: torch.device | str | None = None, *, is_kept: bool = False) -> list[torch.Tensor]:
        """Return an uninitialised flat tensor for each bucket."""
        flats = []
        for bucket, specs in zip(self._buckets, self.layout, strict=True):
            value = bucket[0].value
            dtype = torch.promote_types(value.dtype, torch.float32) if is_kept else value.dtype
            flats.append(value.new_empty(sum(spec.numel for spec in specs), dtype=dtype, device=device))
        return flats

    def parts(self, flats: Iterable[torch.Tensor]) -> list[tuple[Averaged, torch.Tensor]]:
        """Return each tensor with its part of the flat tensors, a view in its shape and memory order."""
        parts = []
        for bucket, specs, flat in zip(self._buckets, self.layout, flats, strict=True):
            # In each tensor's own memory order (channels_last, transposed), so that copies are linear passes.
            offset = flat.storage_offset()
            for tensor, spec in zip(bucket, specs, strict=True):
                parts.append((tensor, flat.as_strided(spec.shape, spec.stride, offset)))
                offset += spec.numel
        return parts


class Fragment(Buckets):
    """Some of the averaged tensors, and a copy of what all processes held after their last averaging.

    The *change* since then is sent. The model's tensors are written in place.
    """

    def __init__(self, averaged: Iterable[Averaged], device: torch.device | str | None = None) -> None:
        super().__init__(averaged)
        self.sent_after = 0  # the step after which its change was last sent, or the copy made
        self.num_rounds = 1  # of its last averaging over the group
        self.work = 0.0  # of this member since its last averaging
        self.sent_work = 0.0  # the part of it that the pending averaging has sent
        self.last = self.empty(device, is_kept=True)  # the copy, flat, by bucket; fp32 for 16-bit tensors
        self.lasts = self.parts(self.last)  # each tensor with its part of the copy, always the same tensors

    def set_last(self, saved: Mapping[str, torch.Tensor] | None = None, *, buffers: bool = True) -> None:
        """Set the last average to a saved one; None for the model's values now, the same on all processes."""
        for tensor, last in self.lasts:
            if buffers or not tensor.is_buffer:
                last.copy_(tensor.value if saved is None else saved[tensor.name])

    def named(self, flats: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts of flat tensors by name, as copies on the CPU."""
        # Contiguous, so that a state does not depend on the model's memory format. On the CPU, since all
        # processes of a machine would load a saved GPU tensor onto the same GPU.
        return {
            tensor.name: part.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for tensor, part in self.parts(flats)
        }

    def changes(self) -> list[torch.Tensor]:
        """Return this process's changes since the last averaging: a flat tensor for each bucket."""
        changes = self.empty()
        for (tensor, change), (_, last) in zip(self.parts(changes), self.lasts, strict=True):
            # The copy may be on a different device: subtract it where the change is. Round it first, as the
            # model did: what 16 bits could not hold is not a change.
            change.copy_(last)
            # Unchanged infinite entries of a mask would give inf - inf.
            is_same = tensor.value == change if tensor.is_buffer else None
            torch.sub(tensor.value, change, out=change)
            if is_same is not None:
                change.masked_fill_(is_same, 0)
        return changes

    def write_means(self, means: Iterable[torch.Tensor]) -> None:
        """Set the model to the last average, which stays, plus mean changes, which are overwritten."""
        for (tensor, last), (_, mean) in zip(self.lasts, self.parts(means), strict=True):
            # Add in the means' own memory, to allocate none.
            tensor.value.copy_(mean.add_(last.to(mean)))

    def outer_step(self, means: Iterable[torch.Tensor], outer: torch.optim.Optimizer | None) -> None:
        """Move the last average by mean changes, which are overwritten."""
        for (tensor, last), (_, change) in zip(self.lasts, self.parts(means), strict=True):
            # Buffers are statistics: a step with momentum could make a variance negative.
            if outer is None or tensor.is_buffer:
                last.add_(change.to(last.device))
            else:
                # An optimizer steps against its gradient, but the model must follow the change.
                last.grad = change.neg_().to(last)
        if outer is not None:
            try:
                outer.step()
            finally:
                # It holds all fragments' parameters, and skips those without a gradient.
                outer.zero_grad(set_to_none=True)

    def apply(
        self, means: Iterable[torch.Tensor], outer: torch.optim.Optimizer | None, local_weight: float = 0.0
    ) -> None:
        """Take an outer step, and set the model to its result."""
        self.outer_step(means, outer)
        if not local_weight:
            self.restore_last()
            return
        for tensor, last in self.lasts:
            tensor.value.mul_(local_weight).add_(last.to(tensor.value.device), alpha=1 - local_weight)

    def restore_last(self) -> None:
        """Set the model to the last average."""
        for tensor, last in self.lasts:
            tensor.value.copy_(last)


def layer_of(name: str) -> str:
    """Return the layer of a parameter or buffer: the outermost numbered block, or else its module.

    Examples:
        >>> [layer_of(name) for name in ("blocks.3.mlp.0.weight", "embed.tokens.weight", "scale")]
        ['blocks.3', 'embed.tokens', 'scale']
    """
    parts = name.split(".")
    numbered = next((depth for depth, part in enumerate(parts) if part.isdecimal()), None)
    if numbered is not None and numbered < len(parts) - 1:
        return ".".join(parts[: numbered + 1])
    return name.rpartition(".")[0] or name


def fragments_of(averaged: Sequence[Averaged], num_fragments: int) -> list[list[Averaged]]:
    """Divide a model's layers into fragments of about equal bytes, each with layers from all depths.

    The largest layers are assigned first, each to the fragment with the fewest bytes. This gives the number
    of layers of each size per fragment. Layers of equal size are dealt to the fragments in model order, round
    robin. (The strided fragments of Streaming DiLoCo, arXiv 2501.18512, with bytes balanced.)
    """
    layers = defaultdict(list)
    for item in averaged:
        layers[layer_of(item.name)].append(item)
    by_bytes = defaultdict(list)
    for name, members in layers.items():
        # Bytes of whole parameters: all shards of a model must be divided the same way.
        by_bytes[sum(item.tensor.nbytes for item in members)].append(name)
    num_layers = sum(len(names) for nbytes, names in by_bytes.items() if nbytes)
    if num_fragments > num_layers:
        raise ConfigError(
            f"fragments={num_fragments} is more than the model's trained layers, {num_layers} "
            f"({', '.join(list(layers)[:4])} …); each layer is averaged as a whole, so take at most "
            f"{num_layers}"
        )
    sizes = [0] * num_fragments  # in bytes
    fragment_of: dict[str, int] = {}
    for nbytes, names in sorted(by_bytes.items(), reverse=True):
        share: Counter[int] = Counter()
        for _ in names:
            lightest = sizes.index(min(sizes))
            sizes[lightest] += nbytes
            share[lightest] += 1
        # In model order, so that neighbouring layers are in different fragments.
        dealt: Counter[int] = Counter()
        for number, name in enumerate(names, start=1):
            behind = {f: number * share[f] / len(names) - dealt[f] for f in share if dealt[f] < share[f]}
            fragment_of[name] = max(behind, key=lambda f: (behind[f], -f))
            dealt[fragment_of[name]] += 1
    fragments: list[list[Averaged]] = [[] for _ in range(num_fragments)]
    for item in averaged:
        fragments[fragment_of[layer_of(item.name)]].append(item)
    return fragments
