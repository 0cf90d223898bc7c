"""How processes put their states together: means of residuals, and wholes of parts. All collective."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import NamedTuple

import torch

from thinwire.algorithms import Memory, Slot
from thinwire.comm import Transport, gather_bytes
from thinwire.comm.collectives import in_messages
from thinwire.comm.transport import Operation
from thinwire.plan import ParameterSpec
from thinwire.sync.state import Tensors

# Reduced in one message, unless a single tensor is larger.
MESSAGE_BYTES = 64 << 20


class Part(NamedTuple):
    """A tensor that some process has."""

    rank: int
    slot: Slot
    label: str
    tensor: torch.Tensor


class _Entry(NamedTuple):
    """A tensor that some processes of a group have; the others have zeros."""

    slot: str
    is_local: bool
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def average_local(
    memory: Memory, specs: Iterable[ParameterSpec], device: torch.device, transport: Transport, purpose: str
) -> None:
    """Replace what differs between processes by its mean; some may have none of a parameter.

    Cost: for each slot a message of a byte for each parameter, and as many bytes as it holds, in messages of
    64 MiB; a host synchronisation for each of them; a copy of the slot on the CPU until all have come.
    """
    # In one order on all processes, whatever order parameters and slots became known in.
    ordered = sorted(specs)
    for slot in sorted(memory.slots, key=lambda slot: slot.name):
        if not (slot.is_local and slot.is_elementwise) or not ordered:
            continue
        tensors = memory[slot]
        # Ask first: if any member has one, those without send zeros, or it would wait for them forever.
        has = torch.tensor([spec.name in tensors for spec in ordered], dtype=torch.uint8)
        has = has.to(transport.control_device)
        transport.all_reduce(has, f"{purpose}, who has {slot.name}", operation="max").wait()
        entries = [
            _Entry(slot.name, slot.is_local, spec.name, str(spec.memory_dtype)[6:], (spec.numel,))
            for spec, is_there in zip(ordered, has.tolist(), strict=True)
            if is_there
        ]
        # Only when all have come: if one fails, memory is as it was.
        for entry, mean in _reduced(entries, [tensors] * len(entries), device, transport, "mean", purpose):
            if entry.name in tensors:
                tensors[entry.name].copy_(mean)
            else:
                tensors[entry.name] = mean.to(device, copy=True)


def combine(
    loaded: Tensors,
    transport: Transport,
    operation: Operation,
    purpose: str,
    *,
    names: Set[str] | None = None,
) -> None:
    """Replace what processes have loaded, each its own, by the sum or mean of all.

    Some may have none of a parameter. With `names` only what is local to processes is combined, of those.

    Cost: a gather of names and shapes, and as many bytes as there are, in messages of 64 MiB; a second copy
    until all have come.
    """
    own = [
        _Entry(slot.name, slot.is_local, name, str(tensor.dtype)[6:], tuple(tensor.shape))
        for slot, tensors in loaded.items()
        for name, tensor in tensors.items()
        if names is None or (slot.is_local and name in names)
    ]
    # Parameters may not be known yet, so shapes are told.
    said = gather_bytes(json.dumps(own).encode(), transport, f"{purpose}, who has loaded what")
    everyones = (_Entry._make(entry) for listed in said for entry in json.loads(listed))
    entries = sorted({entry._replace(shape=tuple(entry.shape)) for entry in everyones})
    slots = {slot.name: slot for slot in loaded}
    slots |= {
        e.slot: Slot(e.slot, is_local=e.is_local, is_elementwise=True) for e in entries if e.slot not in slots
    }
    tensors = [loaded.setdefault(slots[entry.slot], {}) for entry in entries]
    for entry, flat in _reduced(entries, tensors, transport.control_device, transport, operation, purpose):
        loaded[slots[entry.slot]][entry.name] = flat.view(entry.shape).clone()


def _reduced(
    entries: Sequence[_Entry],
    held: Sequence[Mapping[str, torch.Tensor]],
    device: torch.device,
    transport: Transport,
    operation: Operation,
    purpose: str,
) -> list[tuple[_Entry, torch.Tensor]]:
    """Return sums or means over a group, flat and on the CPU; `held` has this process's tensors by name."""
    reduced = list[tuple[_Entry, torch.Tensor]]()
    for dtype, of_one_type in groupby(zip(entries, held, strict=True), lambda pair: pair[0].torch_dtype):
        limit = MESSAGE_BYTES // dtype.itemsize
        for sent in in_messages(of_one_type, limit, lambda pair: pair[0].numel):
            zero = torch.zeros((), dtype=dtype, device=device)
            own = [tensors.get(entry.name, zero.expand(entry.numel)) for entry, tensors in sent]
            flat = torch.cat([tensor.to(device, dtype).reshape(-1) for tensor in own])
            first, last = sent[0][0], sent[-1][0]
            if flat.numel():
                what = f"{purpose}, {first.slot} from {first.name} to {last.name}"
                transport.all_reduce(flat, what, operation=operation).wait()
            # Move it off the device, which may have no room for a second residual of the whole model.
            parts = flat.to("cpu").split_with_sizes([entry.numel for entry, _ in sent])
            reduced += zip((entry for entry, _ in sent), parts, strict=True)
    return reduced


def parts_of(own: Tensors, rank: int) -> Iterator[Part]:
    """Yield what this process has."""
    return (Part(rank, slot, label, tensor) for slot, held in own.items() for label, tensor in held.items())


def parts_of_all(own: Tensors, transport: Transport) -> Iterator[Part]:
    """Yield member by member what each has, on the CPU; a message for each member, however many tensors."""
    slots = {slot.name: slot for slot in own}
    mine = list(parts_of(own, transport.rank))
    described = [
        (part.slot.name, part.label, list(part.tensor.shape), str(part.tensor.dtype)[6:]) for part in mine
    ]
    everyone = gather_bytes(json.dumps(described).encode(), transport, "state_dict(), who has what")
    for rank, listed in enumerate(everyone):
        theirs = [
            (slot, label, shape, getattr(torch, dtype)) for slot, label, shape, dtype in json.loads(listed)
        ]
        lengths = [math.prod(shape) * dtype.itemsize for *_, shape, dtype in theirs]
        packed = torch.empty(sum(lengths), dtype=torch.uint8, device=transport.control_device)
        if rank == transport.rank:
            for part, piece in zip(mine, packed.split_with_sizes(lengths), strict=True):
                piece.copy_(part.tensor.contiguous().view(-1).view(torch.uint8))
        # The last shards of a parameter may be empty.
        if len(packed):
            transport.broadcast(packed, rank, f"state_dict(), what process {rank} remembers").wait()
        pieces = packed.cpu().split_with_sizes(lengths)
        for (slot, label, shape, dtype), piece in zip(theirs, pieces, strict=True):
            # A copy: each begins where its type may, and does not keep the others.
            yield Part(rank, slots[slot], label, piece.clone().view(dtype).view(shape))


def assemble(
    slots: Iterable[Slot],
    parts: Iterable[Part],
    specs: Mapping[str, ParameterSpec],
    view_of: Callable[[Part, torch.Tensor], torch.Tensor],
    label_of: Callable[[Part], str] = lambda part: part.label,
) -> Tensors:
    """Return whole tensors of the parts of several processes; zeros where no one has a part.

    Args:
        slots: Of all parts.
        parts: What all have, or what this process has.
        specs: Of the whole parameters.
        view_of: Returns where in the whole tensor a part lies.
        label_of: Returns under which label a tensor goes that is not elementwise.
    """
    whole: Tensors = {slot: {} for slot in slots}
    for part in parts:
        tensors, spec = whole[part.slot], specs.get(part.label)
        if not part.slot.is_elementwise:
            tensors.setdefault(label_of(part), part.tensor)
        elif spec is None or part.tensor.shape == spec.shape:
            # Of what several have as a whole the first one's.
            tensors.setdefault(part.label, part.tensor)
        else:
            if part.label not in tensors:
                zeros = torch.empty_strided(spec.shape, spec.stride, dtype=part.tensor.dtype).zero_()
                tensors[part.label] = zeros
            view_of(part, tensors[part.label]).copy_(part.tensor)
    return whole
