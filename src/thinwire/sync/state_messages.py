"""How processes put their states together: means of residuals, and wholes of parts. All collective."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch

from thinwire.algorithms import Memory, Slot
from thinwire.comm import Transport, gather_bytes
from thinwire.comm.collectives import in_messages
from thinwire.plan import ParameterSpec
from thinwire.sync.state import Tensors

# Averaged in one message, unless a single tensor is larger.
MEAN_BYTES = 64 << 20


class StatePart(NamedTuple):
    """A tensor that some process has."""

    rank: int
    slot: Slot
    label: str
    tensor: torch.Tensor


def average_local(
    memory: Memory, specs: Iterable[ParameterSpec], device: torch.device, transport: Transport, purpose: str
) -> None:
    """Replace what differs between processes by its mean; some may have none of a parameter.

    Cost: for each slot a message of a byte for each parameter, and as many bytes as it holds, in messages of
    64 MiB; a host synchronisation for each of them; a copy of the slot on the CPU until all have come.
    """
    # In one order on all processes, whatever order parameters and slots became known in.
    ordered = sorted(specs)
    means: list[tuple[Slot, ParameterSpec, torch.Tensor]] = []
    for slot in sorted(memory.slots, key=lambda slot: slot.name):
        if not (slot.is_local and slot.is_elementwise) or not ordered:
            continue
        tensors = memory[slot]
        # Ask first: if any member has one, those without send zeros, or it would wait for them forever.
        has = torch.tensor([spec.name in tensors for spec in ordered], dtype=torch.uint8)
        has = has.to(transport.control_device)
        transport.all_reduce(has, f"{purpose}, who has {slot.name}", operation="max").wait()
        held = [spec for spec, is_held in zip(ordered, has.tolist(), strict=True) if is_held]
        for dtype, of_one_type in groupby(held, lambda spec: spec.memory_dtype):
            for sent in in_messages(of_one_type, MEAN_BYTES // dtype.itemsize, lambda spec: spec.numel):
                zero = torch.zeros((), dtype=dtype, device=device)
                flat = torch.cat([tensors.get(spec.name, zero.expand(spec.numel)) for spec in sent])
                transport.mean(flat, f"{purpose}, {slot.name} from {sent[0].name} to {sent[-1].name}").wait()
                # Move it off the device, which may have no room for a second residual of the whole model.
                parts = flat.to("cpu").split_with_sizes([spec.numel for spec in sent])
                means += ((slot, spec, mean) for spec, mean in zip(sent, parts, strict=True))
    # Only when all slots have come: if a message fails, memory is as it was.
    for slot, spec, mean in means:
        if spec.name in memory[slot]:
            memory[slot][spec.name].copy_(mean)
        else:
            memory[slot][spec.name] = mean.to(device, copy=True)


def add_up(loaded: Tensors, transport: Transport) -> Tensors:
    """Return the sum of what processes have loaded, each its own; some may have none of a parameter.

    Cost: a message for each process, of all that it has loaded.
    """
    total: Tensors = {slot: {} for slot in loaded}
    for _, slot, label, tensor in parts_of_all(loaded, transport):
        tensors = total.setdefault(slot, {})
        tensors[label] = tensor if label not in tensors else tensors[label] + tensor
    return total


def parts_of(own: Tensors, rank: int) -> Iterator[StatePart]:
    """Yield what this process has."""
    return (
        StatePart(rank, slot, label, tensor) for slot, held in own.items() for label, tensor in held.items()
    )


def parts_of_all(own: Tensors, transport: Transport) -> Iterator[StatePart]:
    """Yield process by process what each has, on the CPU; a message for each, however many tensors."""
    mine = list(parts_of(own, transport.rank))
    described = [
        (slot.name, slot.is_local, slot.is_elementwise, label, str(tensor.dtype)[6:], *tensor.shape)
        for _, slot, label, tensor in mine
    ]
    data, slots = json.dumps(described).encode(), {slot.name: slot for slot in own}
    for rank, listed in enumerate(gather_bytes(data, transport, "state_dict(), who has what")):
        theirs = list[tuple[Slot, str, torch.dtype, list[int]]]()
        for name, is_local, is_elementwise, label, dtype, *shape in json.loads(listed):
            slot = slots.get(name, Slot(name, is_local=is_local, is_elementwise=is_elementwise))
            theirs.append((slot, label, getattr(torch, dtype), shape))
        lengths = [math.prod(shape) * dtype.itemsize for *_, dtype, shape in theirs]
        packed = torch.empty(sum(lengths), dtype=torch.uint8, device=transport.control_device)
        if rank == transport.rank:
            for part, piece in zip(mine, packed.split_with_sizes(lengths), strict=True):
                piece.copy_(part.tensor.contiguous().view(-1).view(torch.uint8))
        # The last shards of a parameter may be empty.
        if len(packed):
            transport.broadcast(packed, rank, f"state_dict(), what process {rank} remembers").wait()
        for (slot, label, dtype, shape), piece in zip(
            theirs, packed.cpu().split_with_sizes(lengths), strict=True
        ):
            # A copy: each begins where its type may, and does not keep the others.
            yield StatePart(rank, slot, label, piece.clone().view(dtype).view(shape))


def assemble(
    slots: Iterable[Slot],
    parts: Iterable[StatePart],
    specs: Mapping[str, ParameterSpec],
    view_of: Callable[[StatePart, torch.Tensor], torch.Tensor],
    label_of: Callable[[StatePart], str] = lambda part: part.label,
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
            # Several may have it as a whole; the first one's counts.
            tensors.setdefault(part.label, part.tensor)
        else:
            if part.label not in tensors:
                zeros = torch.empty_strided(spec.shape, spec.stride, dtype=part.tensor.dtype).zero_()
                tensors[part.label] = zeros
            view_of(part, tensors[part.label]).copy_(part.tensor)
    return whole
