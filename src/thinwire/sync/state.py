"""A saved state, of plain values and of tensors by slot and name: how it is packed, checked, and fitted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch

from thinwire.algorithms import Algorithm, Memory, Slot
from thinwire.algorithms.registry import SLOTS
from thinwire.checks import whole_number
from thinwire.comm import Transport, gather_bytes
from thinwire.comm.collectives import in_messages
from thinwire.errors import StateError
from thinwire.plan import BUCKET_SEPARATOR, SHARD_MARK, ParameterSpec
from thinwire.sync.checksum import check_finite, check_kind, check_undamaged, shown_kind, with_checksum

STATE_VERSION = 4
KEYS = {"version", "algorithm", "step", "skipped_steps", "parameters", "slots", "checksum"}
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
EARLIER, SAME_MODEL = "load an earlier state", "load the state of the same model"  # what errors advise

# Averaged in one message, unless a single tensor is larger.
MEAN_BYTES = 64 << 20


class LoadedState(NamedTuple):
    """A state that has been checked; its tensors are copies."""

    step: int  # committed
    skipped_steps: int  # that were not finite
    shapes: dict[str, tuple[int, ...]]  # of all the parameters that were trained, by name
    # fp32 or fp64 tensors by slot and label, the elementwise ones in the parameter's shape.
    slots: dict[Slot, dict[str, torch.Tensor]]
    checksum: str


def average_local(
    memory: Memory, specs: Iterable[ParameterSpec], device: torch.device, transport: Transport, purpose: str
) -> None:
    """Replace what differs between processes by its mean; some may have none of a parameter. Collective.

    Cost: for each slot a message of a byte for each parameter, and as many bytes as it holds, in messages of
    64 MiB; a host synchronisation for each of them; a copy of the slot on the CPU until all have come.
    """
    # In one order on all processes, whatever order parameters and slots became known in.
    ordered = sorted(specs)
    for slot in sorted(memory.slots, key=lambda slot: slot.name):
        if not (slot.is_local and slot.is_elementwise) or not ordered:
            continue
        tensors, means = memory[slot], list[tuple[ParameterSpec, torch.Tensor]]()
        # Ask first: if any member has one, those without send zeros, or it would wait for them forever.
        has = torch.tensor([spec.name in tensors for spec in ordered], dtype=torch.uint8)
        has = has.to(transport.control_device)
        transport.all_reduce(has, f"{purpose}, who has {slot.name}", operation="max").wait()
        held = [spec for spec, one in zip(ordered, has.tolist(), strict=True) if one]
        for dtype, of_one_type in groupby(held, lambda spec: spec.memory_dtype):
            for sent in in_messages(of_one_type, MEAN_BYTES // dtype.itemsize, lambda spec: spec.numel):
                zero = torch.zeros((), dtype=dtype, device=device)
                flat = torch.cat([tensors.get(spec.name, zero.expand(spec.numel)) for spec in sent])
                transport.mean(flat, f"{purpose}, {slot.name} from {sent[0].name} to {sent[-1].name}").wait()
                # Move it off the device, which may have no room for a second residual of the whole model.
                parts = flat.to("cpu").split_with_sizes([spec.numel for spec in sent])
                means += zip(sent, parts, strict=True)
        # Only when all have come: if one fails, memory is as it was.
        for spec, mean in means:
            if spec.name in tensors:
                tensors[spec.name].copy_(mean)
            else:
                tensors[spec.name] = mean.to(device, copy=True)


def combine(
    loaded: dict[Slot, dict[str, torch.Tensor]],
    transport: Transport,
    operation: Literal["sum", "mean"],
    purpose: str,
    *,
    names: Set[str] | None = None,
) -> None:
    """Replace what processes have loaded, each its own, by the sum or mean of all. Collective.

    Some may have none of a parameter. With `names` only what is local to processes is combined, of those.

    Cost: a gather of names and shapes, and a message for each tensor; a second copy until all have come.
    """
    own = [
        (slot.name, slot.is_local, name, str(tensor.dtype).removeprefix("torch."), *tensor.shape)
        for slot, tensors in loaded.items()
        for name, tensor in tensors.items()
        if names is None or (slot.is_local and name in names)
    ]
    said = gather_bytes(json.dumps(own).encode(), transport, f"{purpose}, who has loaded what")
    slots, combined = {slot.name: slot for slot in loaded}, list[tuple[Slot, str, torch.Tensor]]()
    for kind, is_local, name, dtype, *shape in sorted(
        {tuple(entry) for listed in said for entry in json.loads(listed)}
    ):
        slot = slots.get(kind, Slot(kind, is_local=is_local, is_elementwise=True))
        tensor = loaded.get(slot, {}).get(name, torch.zeros(()).expand(shape))
        there = tensor.to(transport.control_device, getattr(torch, dtype), copy=True).contiguous()
        if there.numel():
            transport.all_reduce(there, f"{purpose}, {kind} of {name}", operation=operation).wait()
        combined.append((slot, name, there.cpu()))
    # Only when all have come: if one fails, all is as it was.
    for slot, name, tensor in combined:
        loaded.setdefault(slot, {})[name] = tensor


def packed_state(
    algorithm: Algorithm,
    memory: Memory,
    specs: Mapping[str, ParameterSpec],
    shapes: Mapping[str, tuple[int, ...]],
    unclaimed: Mapping[Slot, Mapping[str, torch.Tensor]],
    *,
    skipped_steps: int,
) -> dict[str, Any]:
    """Return the state of `memory`, as copies on the CPU.

    Names and what they are of stand in tuples of pairs: `torch.distributed.checkpoint` takes mappings apart.
    It fills in only the keys that are there when it loads, so a fresh run has those of every algorithm.
    """
    named = {**SLOTS, **{slot.name: slot for slot in (*algorithm.slots, *memory.slots)}}
    slots = [slot for slot in named.values() if slot.is_saved]
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        "algorithm": repr(algorithm),
        "step": memory.step,
        "skipped_steps": skipped_steps,
        "parameters": tuple(sorted(shapes.items())),
        "slots": tuple((slot.name, (slot.is_local, slot.is_elementwise)) for slot in slots),
    }
    for slot in slots:
        kept = {}
        for label, tensor in memory.slots.get(slot, {}).items():
            if not slot.is_elementwise:
                kept[label] = tensor.to("cpu", copy=True)
                continue
            # In the parameter's shape: who resumes may have a different order of memory (channels last).
            spec = specs[label]
            strided = tensor.as_strided(spec.shape, spec.stride, tensor.storage_offset())
            kept[label] = strided.to("cpu", copy=True, memory_format=torch.contiguous_format)
        # A tensor loaded for a bucket that has not come yet is still to be sent.
        kept |= {name: tensor.clone() for name, tensor in unclaimed.get(slot, {}).items()}
        state[slot.name] = tuple(sorted(kept.items()))
    return with_checksum(state)


def tensors_of_all(
    own: Mapping[str, Any], slots: Iterable[str], transport: Transport
) -> Iterator[tuple[int, tuple[str, str, torch.Tensor]]]:
    """Yield member by member what each packed state has: slot, label and tensor, on the CPU. Collective."""
    mine = [(slot, label, tensor) for slot in slots for label, tensor in own[slot]]
    described = [
        (slot, label, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for slot, label, tensor in mine
    ]
    data = json.dumps(described).encode()
    device = transport.control_device
    # All know before what each has, and in which order. One broadcast a member, however many tensors:
    # a round trip each would take minutes on a slow link.
    for member, listed in enumerate(gather_bytes(data, transport, "state_dict(), who has what")):
        theirs = [
            (slot, label, shape, getattr(torch, dtype)) for slot, label, shape, dtype in json.loads(listed)
        ]
        lengths = [math.prod(shape) * dtype.itemsize for *_, shape, dtype in theirs]
        packed = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        if member == transport.rank:
            for (*_, tensor), part in zip(mine, packed.split_with_sizes(lengths), strict=True):
                part.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        # The last shards of a parameter may be empty.
        if len(packed):
            transport.broadcast(packed, member, f"state_dict(), what process {member} remembers").wait()
        parts = packed.cpu().split_with_sizes(lengths)
        for (slot, label, shape, dtype), part in zip(theirs, parts, strict=True):
            # A copy: each begins where its type may, and does not keep the others.
            yield member, (slot, label, part.clone().view(dtype).view(shape))


def checked_state(
    state: object,
    specs: Mapping[str, ParameterSpec] | None,
    *,
    slots: Iterable[Slot] = (),
    strict: bool = True,
) -> LoadedState:
    """Return a state after checking all of it, before any of it is used.

    Cost: a copy of its tensors, made once their kinds, shapes and what is stored of them have been checked.
    """
    check_kind(state, STATE_VERSION, KEYS, "state_dict()")
    assert isinstance(state, Mapping)
    # All that can be seen without its numbers comes first: a file may name tensors of any size, and no copy
    # is made before it is in order.
    known = {**SLOTS, **{slot.name: slot for slot in slots}}
    tensors = {slot: pairs_of(state, slot.name, *NUMBERS) for slot in _slots(state, known)}
    shapes = {name: tuple(sizes) for name, sizes in pairs_of(state, "parameters", *SHAPES).items()}
    for key in ("algorithm", "checksum"):
        if not isinstance(state[key], str | None):
            raise StateError(f"{key} must be text, got {shown_kind(state[key])}")
    step, skipped_steps = (
        whole_number(key, state[key], minimum=0, error=StateError) for key in ("step", "skipped_steps")
    )
    loaded = LoadedState(step, skipped_steps, shapes, tensors, check_undamaged(state))
    _check_inside(loaded)
    if specs is not None:
        check_model(loaded, specs, strict=strict)
    for slot, of_slot in tensors.items():
        check_finite(slot.name, of_slot)
        # Copies, for the user may go on with what was passed; at least of 32 bits, as memory is.
        for name, tensor in of_slot.items():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            of_slot[name] = tensor.detach().to("cpu", wide, copy=True)
    return loaded


def _slots(state: Mapping[str, Any], known: Mapping[str, Slot]) -> list[Slot]:
    """Return the slots that the tensors of a state are of."""
    slots = []
    for name, (is_local, is_elementwise) in pairs_of(state, "slots", *FLAGS).items():
        # The state says so itself: it may be of an algorithm that is not in use here, and is carried along.
        slot = Slot(name, is_local=is_local, is_elementwise=is_elementwise)
        slots.append(known.get(name, slot))
        if slots[-1] != slot:
            raise StateError(f"the state has a {name} of a different kind than this Thinwire's; {EARLIER}")
    if sorted(slot.name for slot in slots) != sorted(state.keys() - KEYS):
        raise StateError(f"expected a state made by state_dict(), got {shown_kind(state)}")
    return slots


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is kind for item in value)


# For each key of a state: what errors call its value, and a test of it.
Expected = tuple[str, Callable[[Any], bool]]
NUMBERS: Expected = (
    "floating tensors of 16, 32 or 64 bits",
    lambda value: isinstance(value, torch.Tensor) and value.dtype in DTYPES,
)
SHAPES: Expected = "shapes", lambda value: _is_list_of(int, value) and min(value, default=0) >= 0
FLAGS: Expected = "two flags", lambda value: _is_list_of(bool, value) and len(value) == 2


def pairs_of(
    state: Mapping[str, Any], key: str, expected: str, fits: Callable[[Any], bool]
) -> dict[str, Any]:
    """Return the values under a key by name, if they are what is expected."""
    pairs, wrong = state[key], ""
    if not isinstance(pairs, list | tuple):
        raise StateError(f"{key} must be a tuple of pairs of a name and a value, got {shown_kind(pairs)}")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            wrong = f"must hold pairs of a name and a value, got {shown_kind(pair)}"
        elif not fits(pair[1]):
            wrong = f"must pair names with {expected}, got {pair[0]!r}: {shown_kind(pair[1])}"
        if wrong:
            raise StateError(f"{key} {wrong}")
    found = dict(pairs)
    # A mapping could not have a name twice; pairs can, and the last would win unseen.
    if len(found) < len(pairs):
        raise StateError(f"{key} has a name twice; the state is damaged, {EARLIER}")
    return found


def _check_inside(loaded: LoadedState) -> None:
    """Refuse what is not of the parameters that are listed, or not of their shapes."""
    for slot, tensors in loaded.slots.items():
        for label, tensor in tensors.items():
            # A checksum says that a file is as it was written, not that it makes sense.
            listed, is_listed = loaded.shapes.get(label, "nothing"), loaded.shapes.keys() >= names_in(label)
            if not is_listed or (slot.is_elementwise and listed != tensor.shape):
                raise StateError(
                    f"the state's {slot.name} of {label} has shape {tuple(tensor.shape)}, its list of "
                    f"parameters says {listed}; {EARLIER}"
                )
            if slot.check is not None and SHARD_MARK not in label:  # of a shard, whose shape is not listed
                slot.check(label, tensor, loaded.shapes)


def check_model(
    loaded: LoadedState, specs: Mapping[str, ParameterSpec], *, strict: bool = True, by_position: bool = False
) -> None:
    """Refuse the state of a different model."""
    here = {name: spec.shape for name, spec in specs.items()}
    missing, unknown = here.keys() - loaded.shapes.keys(), loaded.shapes.keys() - here.keys()
    # A state saved before any bucket had come lists none, and is of every model.
    if loaded.shapes and (missing or unknown) and strict:
        remedy = "" if by_position else ", or pass strict=False to load what is of both"
        differs = [f"this one does not train {_some(unknown)}"] if unknown else []
        differs += [f"the state has no {_some(missing)}"] if missing else []
        words = f"the state is of a different model: {', and '.join(differs)}"
        raise StateError(f"{words}; {SAME_MODEL}{remedy}")
    for name, shape in here.items():
        if (saved := loaded.shapes.get(name, shape)) != shape:
            raise StateError(f"{name} has shape {saved} in the state and {shape} in the model; {SAME_MODEL}")
    for slot, tensors in loaded.slots.items():
        _check_range(slot.name, tensors, specs)


def _check_range(key: str, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, ParameterSpec]) -> None:
    """Refuse what would become infinite in the type of a model's memory, and stop all its steps."""
    for label, tensor in tensors.items():
        first = label.split(BUCKET_SEPARATOR)[0]
        # Only what is wider than this model's memory can be beyond its range.
        if first not in specs or specs[first].memory_dtype == tensor.dtype or tensor.dtype != torch.float64:
            continue
        largest = tensor.abs().max().item() if tensor.numel() else 0
        if largest > torch.finfo(specs[first].memory_dtype).max:
            raise StateError(
                f"{key} of {label} has {largest:.3g}, which is beyond {specs[first].memory_dtype}, in which "
                f"this model's is kept; {EARLIER}, or one of a model of this type"
            )


def fitting(loaded: LoadedState, specs: Mapping[str, ParameterSpec] | None) -> LoadedState:
    """Return the part of a state that is of these parameters (None: any), and of no single shard of one."""

    def fits(label: str) -> bool:
        return SHARD_MARK not in label and (specs is None or specs.keys() >= names_in(label))

    slots = {
        slot: {label: tensor for label, tensor in tensors.items() if fits(label)}
        for slot, tensors in loaded.slots.items()
    }
    return loaded._replace(slots=slots)


def in_memory_order(
    slot: Slot, tensor: torch.Tensor, spec: ParameterSpec, device: torch.device
) -> torch.Tensor:
    """Return an elementwise tensor as memory holds it: flat, in the parameter's order of memory and type."""
    # Both may come to light only here: of an adapter that learns its parameters bucket by bucket.
    _check_range(slot.name, {spec.name: tensor}, {spec.name: spec})
    if tuple(tensor.shape) != spec.shape:
        shapes = f"shape {tuple(tensor.shape)}, the model's parameter {spec.shape}"
        raise StateError(f"the state's {slot.name} of {spec.name} has {shapes}; {SAME_MODEL}")
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=spec.memory_dtype, device=device)
    return strided.copy_(tensor).as_strided((spec.numel,), (1,))


def names_in(label: str) -> set[str]:
    """Return the parameter of a label; of a whole bucket, the first and the last."""
    return set(label.partition(SHARD_MARK)[0].split(BUCKET_SEPARATOR))


def _some(names: Iterable[str]) -> str:
    """Return the first few names, to be shown."""
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
