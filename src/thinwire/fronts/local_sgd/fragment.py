"""What is averaged of a model, how it is divided, and what each part was after its last averaging."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from thinwire.errors import ConfigError, GradientError
from thinwire.fronts.ddp_model import plain_name
from thinwire.plan import ParameterSpec

__all__ = [
    "Averaged",
    "Fragment",
    "averaged_tensors",
    "buckets_of",
    "fragments_of",
    "held_of",
    "holding_average",
    "layer_of",
    "names_of_lasts",
    "outer_parameters",
    "parts_of",
]


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


def buckets_of(averaged: Iterable[Averaged]) -> list[list[Averaged]]:
    """Return the tensors that travel as one: those of one device and type, buffers by themselves."""
    kinds = defaultdict(list)
    for each in averaged:
        kinds[each.value.device, each.value.dtype, each.is_buffer].append(each)
    return list(kinds.values())


def layer_of(name: str) -> str:
    """Return the layer of a parameter or buffer, by its name.

    That is the numbered block it is in, of several the outermost one, and else the module that has it.

    Examples:
        >>> [layer_of(name) for name in ("blocks.3.mlp.0.weight", "embed.tokens.weight", "scale")]
        ['blocks.3', 'embed.tokens', 'scale']
    """
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if numbered is not None and numbered < len(parts) - 1:
        return ".".join(parts[: numbered + 1])
    return name.rpartition(".")[0] or name


def fragments_of(averaged: Sequence[Averaged], num_fragments: int) -> list[list[Averaged]]:
    """Deal out the layers of a model: about as many bytes to each fragment, and layers from all depths.

    The largest layers go first, each to the fragment that has least; so it is decided how many layers of
    each size a fragment gets. Which of them is decided in the order of the model, the fragments in turn.
    (The strided fragments of Streaming DiLoCo, arXiv 2501.18512, with bytes balanced.)

    Args:
        averaged: What is averaged, in the order of the model.
        num_fragments: How many.

    Raises:
        ConfigError: There are fewer layers.
    """
    layers = defaultdict(list)
    for each in averaged:
        layers[layer_of(each.name)].append(each)
    by_bytes = defaultdict(list)
    for name, members in layers.items():
        # Of whole parameters: the shards of a model must be divided alike.
        by_bytes[sum(each.tensor.nbytes for each in members)].append(name)
    num_layers = sum(len(names) for nbytes, names in by_bytes.items() if nbytes)
    if num_fragments > num_layers:
        raise ConfigError(
            f"fragments={num_fragments} is more than the layers that the model trains, {num_layers} "
            f"({', '.join(list(layers)[:4])} …); a layer is averaged as a whole, so take at most as many"
        )
    held = [0] * num_fragments  # bytes
    fragment_of: dict[str, int] = {}
    for nbytes, names in sorted(by_bytes.items(), reverse=True):
        share: Counter[int] = Counter()
        for _ in names:
            lightest = held.index(min(held))
            held[lightest] += nbytes
            share[lightest] += 1
        # The order of the model, so that layers next to each other come into different fragments.
        dealt: Counter[int] = Counter()
        for place, name in enumerate(names, start=1):
            behind = {f: place * share[f] / len(names) - dealt[f] for f in share if dealt[f] < share[f]}
            fragment_of[name] = max(behind, key=lambda f: (behind[f], -f))
            dealt[fragment_of[name]] += 1
    fragments: list[list[Averaged]] = [[] for _ in range(num_fragments)]
    for each in averaged:
        fragments[fragment_of[layer_of(each.name)]].append(each)
    return fragments


def parts_of(averaged: Sequence[Averaged], num_fragments: int) -> list[list[tuple[ParameterSpec, ...]]]:
    """Return the buckets of each fragment, for an engine; none for a model that is averaged at once.

    Args:
        averaged: As of `fragments_of`.
        num_fragments: As of `fragments_of`.

    Raises:
        ConfigError: There are fewer layers.
    """
    parts = fragments_of(averaged, num_fragments)
    buckets = [[tuple(one.spec for one in bucket) for bucket in buckets_of(part)] for part in parts]
    return buckets if num_fragments > 1 else []


class Fragment:
    """Some of the averaged tensors, and a copy of what all processes held after their last averaging.

    What travels is the *change* since then, flat, in one bucket for each device and type, buffers by
    themselves. The model's tensors are written in place.

    Args:
        averaged: What is averaged.
        device: Where the copy is; None for where the model's tensors are.

    Attributes:
        layout: The parameters of each bucket.
        lasts: Each tensor with its part of the copy, always the same tensors.
        sent_after: Steps so far when its change was last sent, or the copy taken.
        num_rounds: That its last averaging over the group took.
    """

    def __init__(self, averaged: Sequence[Averaged], device: torch.device | None = None) -> None:
        self.sent_after, self.num_rounds = 0, 1
        self._buckets = buckets_of(averaged)
        self.layout = [tuple(each.spec for each in bucket) for bucket in self._buckets]
        self.lasts = self._parts(self._empty(device))

    def _parts(self, flats: Sequence[torch.Tensor]) -> list[tuple[Averaged, torch.Tensor]]:
        """Return each tensor with its part of what is flat, a view in its shape and order of memory."""
        parts = []
        for bucket, specs, flat in zip(self._buckets, self.layout, flats, strict=True):
            # In each one's own order of memory (channels_last, transposed): copies are straight passes.
            offset = flat.storage_offset()
            for each, spec in zip(bucket, specs, strict=True):
                parts.append((each, flat.as_strided(spec.shape, spec.stride, offset)))
                offset += spec.numel
        return parts

    def take(self, last_average: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take over a saved last average; None for what the model holds now, on all processes alike."""
        for each, last in self.lasts:
            last.copy_(each.value if last_average is None else last_average[each.name])

    def named(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name, as copies on the CPU, the parts of what is flat."""
        return {
            each.name: part.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for each, part in self._parts(flats)
        }

    def flat(self, named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return by bucket, where the model is, what `named` has returned."""
        flats = self._empty()
        for each, part in self._parts(flats):
            part.copy_(named[each.name])
        return flats

    def _empty(self, device: torch.device | None = None) -> list[torch.Tensor]:
        return [
            bucket[0].value.new_empty(sum(spec.numel for spec in specs), device=device)
            for bucket, specs in zip(self._buckets, self.layout, strict=True)
        ]

    def changes(self) -> list[torch.Tensor]:
        """Return by bucket, flat, what has changed since the last averaging on this process."""
        changes = self._empty()
        for (each, change), (_, last) in zip(self._parts(changes), self.lasts, strict=True):
            # The copy may be on another device, so it is subtracted where the change is.
            change.copy_(last)
            # Infinite entries of a mask that stayed the same would give inf - inf.
            is_same = each.value == change if each.is_buffer else None
            torch.sub(each.value, change, out=change)
            if is_same is not None:
                change.masked_fill_(is_same, 0)
        return changes

    def write(self, means: Sequence[torch.Tensor]) -> None:
        """Make the model the last average, which stays, plus mean changes, which are overwritten."""
        for (each, last), (_, mean) in zip(self.lasts, self._parts(means), strict=True):
            # In the means' own memory: their sum needs no other.
            each.value.copy_(mean.add_(last.to(mean.device)))

    def move(
        self, means: Sequence[torch.Tensor], outer: torch.optim.Optimizer | None, mix: float = 0.0
    ) -> None:
        """Make the last average the last average plus mean changes, which are overwritten; the model follows.

        Args:
            means: By bucket.
            outer: Steps the parameters, with minus their mean change as gradient; None for the mean itself.
            mix: The share that the model keeps of what it holds; the rest is of the new average.
        """
        for (each, last), (_, change) in zip(self.lasts, self._parts(means), strict=True):
            # A statistic is no parameter: a step with momentum could make a variance negative.
            if outer is None or each.is_buffer:
                last.add_(change.to(last.device))
            else:
                # An optimizer steps against its gradient, and the model is to follow the change.
                last.grad = change.neg_().to(last.device)
        # It holds all fragments' parameters, and leaves those alone that have no gradient.
        if outer is not None:
            outer.step()
            outer.zero_grad(set_to_none=True)
        for each, last in self.lasts:
            if mix:
                each.value.mul_(mix).add_(last.to(each.value.device), alpha=1 - mix)
            else:
                each.value.copy_(last)


def names_of_lasts(fragments: Iterable[Fragment]) -> dict[int, str]:
    """Return the name of each last average, by its identity: an optimizer knows no names."""
    return {id(last): each.name for fragment in fragments for each, last in fragment.lasts}


def outer_parameters(averaged: Iterable[Averaged], fragments: Iterable[Fragment]) -> list[torch.Tensor]:
    """Return the last averages that an outer optimizer steps: all but those of buffers.

    Args:
        averaged: What is averaged of the model.
        fragments: Those it is divided into.
    """
    lasts = {each.name: last for fragment in fragments for each, last in fragment.lasts}
    # In one order, however many fragments there are: so that its state fits any number.
    return [lasts[each.name] for bucket in buckets_of(averaged) for each in bucket if not each.is_buffer]


@contextmanager
def holding_average(fragments: Iterable[Fragment]) -> Iterator[None]:
    """Let the model hold the last averages while this is open. What it held comes back afterwards."""
    lasts = [pair for fragment in fragments for pair in fragment.lasts]
    own = [each.value.clone() for each, _ in lasts]
    try:
        for each, last in lasts:
            each.value.copy_(last)
        yield
    finally:
        for (each, _), value in zip(lasts, own, strict=True):
            each.value.copy_(value)
