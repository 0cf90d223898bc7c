"""The format of saved states, their loader, and the merge of states that processes saved for themselves.

A state is a mapping of plain values and tensors on the CPU:

    version, algorithm, step, skipped_steps
    parameters      ((name, shape), …) of all trained parameters
    slots           ((slot, (is_local, is_elementwise)), …)
    error, …        for each slot ((name, tensor), …), elementwise ones in the parameter's shape
    layout          if one process has saved it for itself: a `Position`, and "cuts" of a sharded model

Pairs are in tuples because `torch.distributed.checkpoint` flattens mappings, and loads only keys that are
already present. For the same reason a fresh run has the slots of every algorithm.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch

from thinwire.algorithms import Algorithm, Memory, Slot
from thinwire.algorithms.registry import SLOTS
from thinwire.checks import listed, whole_number
from thinwire.errors import StateError
from thinwire.plan import BUCKET_SEPARATOR, SHARD_MARK, ParameterSpec
from thinwire.tensors.layout import shape_of_shard, shard_of

FORMAT = 5
FORMAT_0_2 = 4  # Thinwire 0.2 wrote it: this version reads it, the next one does not
NAMES_IN_0_2 = {"rank": "member", "world_size": "members", "local_rank": "place", "local_size": "places"}
KEYS = {"version", "algorithm", "step", "skipped_steps", "parameters", "slots"}
MAX_LISTED = 4
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
EARLIER, SAME_MODEL = "load an earlier state", "load the state of the same model"  # advice in errors

Tensors: TypeAlias = dict[Slot, dict[str, torch.Tensor]]
"""Tensors by slot and label; elementwise ones in the parameter's shape."""

Cuts: TypeAlias = dict[str, tuple[tuple[int, ...], int | None]]
"""For each parameter of a sharded model: its whole shape, and the dimension along which it is cut, if any."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Which process it is: of all, and of its machine's or (of a sharded model) its replica's."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_size: int = 1
    machines: tuple[tuple[int, ...], ...] | None = None  # each machine's ranks, if it has several

    def __str__(self) -> str:
        where = f", with local rank {self.local_rank}" if self.local_size > 1 else ""
        return f"process {self.rank} of {self.world_size}, {self.local_size} a machine{where}"


class SavedState(NamedTuple):
    """A state, unpacked."""

    algorithm: str
    step: int  # committed steps
    skipped_steps: int  # steps that were not finite
    shapes: Mapping[str, tuple[int, ...]]  # all trained parameters' shapes, by name
    slots: Tensors
    position: Position | None = None  # the process that saved it for itself; None for a state of all
    cuts: Cuts = {}  # noqa: RUF012 - never written
    digest: int = 0  # for processes to compare what they have loaded


class StatePart(NamedTuple):
    """A tensor that one process has."""

    rank: int
    slot: Slot
    label: str
    tensor: torch.Tensor


def tensors_to_save(algorithm: Algorithm, memory: Memory, specs: Mapping[str, ParameterSpec]) -> Tensors:
    """Return memory as copies on the CPU."""
    named = {**SLOTS, **{slot.name: slot for slot in (*algorithm.slots, *memory.slots)}}
    # DCP loads only what the state of the resuming run lists, and fails if the saved one lacks any of it.
    slots: Tensors = {
        slot: {} for slot in named.values() if slot.is_saved and (slot.is_listed or memory.slots.get(slot))
    }
    for slot, tensors in slots.items():
        for label, tensor in memory.slots.get(slot, {}).items():
            if slot.is_elementwise:
                # In the parameter's shape: the resuming process may use another memory format.
                spec = specs[label]
                strided = tensor.as_strided(spec.shape, spec.stride, tensor.storage_offset())
                tensors[label] = strided.to("cpu", copy=True, memory_format=torch.contiguous_format)
            else:
                tensors[label] = tensor.to("cpu", copy=True)
    return slots


def pack(state: SavedState) -> dict[str, Any]:
    """Return a state in the format above."""
    slots = sorted(state.slots, key=lambda slot: slot.name)  # in one order on all processes
    packed: dict[str, Any] = {
        "version": FORMAT,
        "algorithm": state.algorithm,
        "step": state.step,
        "skipped_steps": state.skipped_steps,
        "parameters": tuple(sorted(state.shapes.items())),
        "slots": tuple((slot.name, (slot.is_local, slot.is_elementwise)) for slot in slots),
    }
    for slot in slots:
        tensors = state.slots[slot]
        packed[slot.name] = tuple((label, tensors[label].contiguous()) for label in sorted(tensors))
    if state.position is not None:
        packed["layout"] = {**vars(state.position), "cuts": tuple(sorted(state.cuts.items()))}
    return packed


def updated(state: Any) -> Any:
    """Convert a state of 0.2's `local_state_dict`, which is two mappings, to this version's format."""
    if not isinstance(state, Mapping) or "own" not in state:
        return state
    layout = {name: state[before] for name, before in NAMES_IN_0_2.items()}
    layout |= {"machines": state.get("machines"), "cuts": state.get("cuts", ())}
    return {**state["own"], "layout": layout}


@contextmanager
def damage_named() -> Iterator[None]:
    """Turn errors raised by values of wrong kinds into a StateError."""
    try:
        yield
    except StateError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(
            f"the state can't be read, {type(error).__name__}: {error}; pass what state_dict() returned"
        ) from error


@damage_named()
def read_state(state: Any, of_algorithm: Iterable[Slot] = ()) -> SavedState:
    """Check a saved state, also one of 0.2, and return it with copied tensors."""
    state, known = updated(state), {**SLOTS, **{slot.name: slot for slot in of_algorithm}}
    check_kind(state, KEYS, "state_dict()")
    slots: Tensors = {}
    for name, (is_local, is_elementwise) in state["slots"]:
        # From the state itself: the slot may belong to an algorithm that is not in use; it is kept anyway.
        slot = Slot(name, is_local=is_local, is_elementwise=is_elementwise)
        if known.get(name, slot) != slot:
            raise StateError(
                f"the state's {name} is of a different kind than in this version of Thinwire; {EARLIER}"
            )
        slot = known.get(name, slot)
        # DCP has loaded only what this run lists.
        pairs = state[name] if slot.is_listed else state.get(name, ())
        slots[slot] = {label: _copied(tensor) for label, tensor in pairs}
    cuts: Cuts = {}
    for name, (shape, dim) in state.get("layout", {}).get("cuts", ()):
        cuts[name] = (tuple(map(int, shape)), None if dim is None else range(len(shape))[dim])
    shapes = {name: tuple(map(int, shape)) for name, shape in state["parameters"]}
    for slot, tensors in slots.items():
        _check_slot(slot, tensors, shapes)
    loaded = SavedState(
        str(state["algorithm"]),
        whole_number("step", state["step"], minimum=0, error=StateError),
        whole_number("skipped_steps", state["skipped_steps"], minimum=0, error=StateError),
        shapes,
        slots,
        position_of(state),
        cuts,
    )
    return loaded._replace(digest=_digest(loaded))


def _check_slot(
    slot: Slot, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse tensors of unlisted parameters, of wrong shapes, or that are not finite."""
    for label, tensor in tensors.items():
        shape, is_known = shapes.get(label, "nothing"), shapes.keys() >= names_in(label)
        if not is_known or (slot.is_elementwise and shape != tensor.shape):
            raise StateError(
                f"the state's {slot.name} of {label} has shape {tuple(tensor.shape)}, but its list of "
                f"parameters says {shape}; {EARLIER}"
            )
        # A shard's whole shape is not listed.
        if slot.check is not None and SHARD_MARK not in label:
            slot.check(label, tensor, shapes)
    check_finite(slot.name, tensors)


@damage_named()
def position_of(state: Mapping[str, Any]) -> Position | None:
    """Return the position of the process that saved a state for itself; None for a state of all."""
    layout = updated(state).get("layout")
    if layout is None:
        return None
    saved_by = Position(
        rank=int(layout["rank"]),
        world_size=int(layout["world_size"]),
        local_rank=int(layout["local_rank"]),
        local_size=int(layout["local_size"]),
        machines=layout["machines"] and tuple(map(tuple, layout["machines"])),
    )
    is_possible = (
        saved_by.rank in range(saved_by.world_size)
        and saved_by.local_rank in range(saved_by.local_size)
        and saved_by.world_size % saved_by.local_size == 0
    )
    if not is_possible:
        raise StateError(f"the state says that it was saved by {saved_by}, which is impossible; {EARLIER}")
    return saved_by


def _copied(tensor: object) -> torch.Tensor:
    """Return a copy, since the user may change the state; in at least 32 bits, like memory."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
        got = _kind(tensor)
        raise StateError(f"expected floating tensors of 16, 32 or 64 bits, got {got}; {EARLIER}")
    return tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32), copy=True)


def _digest(loaded: SavedState) -> int:
    """Return a digest of what must be equal on all processes, without each process's own tensors."""
    slots = loaded.slots
    if loaded.position is not None:
        # Processes of a machine or of a replica hold different parts.
        is_alike = loaded.position.local_size == 1
        slots = {slot: tensors for slot, tensors in slots.items() if is_alike and not slot.is_local}
    shapes = loaded.cuts or loaded.shapes
    return digest_of((loaded.algorithm, loaded.step, loaded.skipped_steps, shapes, slots))


def digest_of(value: object, crc: int = 0) -> int:
    """Return a CRC-32 of plain values and tensors, however nested.

    Examples:
        >>> digest_of({"step": 3, "error": [torch.zeros(2)]})
        1407462302
    """
    if isinstance(value, torch.Tensor):
        # A tensor subclass, such as the state of an 8-bit optimizer, may have no memory at its address.
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise StateError(f"the state has a {type(value).__name__}, expected plain tensors; {EARLIER}")
        held = value.detach().cpu().contiguous()
        crc = zlib.crc32(f"{tuple(held.shape)} {held.dtype}".encode(), crc)
        # Read the memory itself: NumPy has no bfloat16, and may not be installed.
        data = (ctypes.c_char * held.nbytes).from_address(held.data_ptr()) if held.nbytes else b""
        return zlib.crc32(data, crc)
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=lambda item: str(item[0]))
    if isinstance(value, list | tuple):
        return reduce(lambda crc, item: digest_of(item, crc), value, crc)
    return zlib.crc32(repr(value).encode(), crc)


def check_kind(state: object, keys: Set[str], made_by: str) -> None:
    """Refuse a value that is not a state, or has a different version; it may have additional keys."""
    if not isinstance(state, Mapping) or not state.keys() >= keys:
        raise StateError(f"expected a state made by {made_by}, got {_kind(state)}")
    if not isinstance(state["version"], int) or state["version"] not in (FORMAT_0_2, FORMAT):
        raise StateError(
            f"the state has version {state['version']!r}, but this Thinwire release reads version {FORMAT} "
            "and 0.2's; load it with the release that saved it"
        )


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))[:8]}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return type(value).__name__


def check_finite(key: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not finite: they would stop all later steps, or spread to the model."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise StateError(f"{key} of {name} is not finite: the state is damaged; load an earlier one")


def check_model(loaded: SavedState, specs: Mapping[str, ParameterSpec], *, strict: bool = True) -> None:
    """Refuse the state of a different model."""
    missing, unknown = specs.keys() - loaded.shapes.keys(), loaded.shapes.keys() - specs.keys()
    # A state saved before the first bucket lists no parameters, and fits every model.
    if loaded.shapes and (missing or unknown) and strict:
        remedy = "" if missing == specs.keys() else ", or pass strict=False to load what both have"
        differs = [f"this model does not train {listed(sorted(unknown), MAX_LISTED)}"] if unknown else []
        differs += [f"the state has no {listed(sorted(missing), MAX_LISTED)}"] if missing else []
        words = f"the state is of a different model: {', and '.join(differs)}"
        raise StateError(f"{words}; {SAME_MODEL}{remedy}")
    for name, spec in specs.items():
        if (saved := loaded.shapes.get(name, spec.shape)) != spec.shape:
            shapes = f"{saved} in the state and {spec.shape} in the model"
            raise StateError(f"{name} has shape {shapes}; {SAME_MODEL}")


def check_position(saved_by: Position, here: Position | None) -> None:
    """Refuse a state that a different process has saved for itself."""
    # The layout of machines may differ: processes of one local rank share tensors that are not local, and
    # local ones are summed over a machine in any case.
    if here is None or replace(saved_by, machines=None) != replace(here, machines=None):
        raise StateError(
            f"the state was saved by {saved_by}, but this is {here or 'for all processes'}; load each "
            "process's own file, or load thinwire.checkpoint.merge(…) of all files on all processes"
        )


def in_memory_order(
    slot: Slot, tensor: torch.Tensor, spec: ParameterSpec, device: torch.device
) -> torch.Tensor:
    """Return an elementwise tensor as memory holds it: flat, in the parameter's memory order and dtype."""
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=spec.memory_dtype, device=device)
    return strided.copy_(tensor).as_strided((spec.numel,), (1,))


def names_in(label: str) -> set[str]:
    """Return a label's parameter; for a whole bucket, its first and last."""
    return set(label.partition(SHARD_MARK)[0].split(BUCKET_SEPARATOR))


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states that all processes saved for themselves into one, as `state_dict` returns it.

    `load_state_dict` takes it on any number of processes: residuals become their mean, so nothing is lost.

    Args:
        states: The results of `local_state_dict` on each process, in any order; read one after the other.

    Cost: the memory of a state in fp64, in addition to the one being read.

    Raises:
        StateError: One is damaged, duplicate or missing, or they are not from one step of one run.
    """
    first: SavedState | None = None
    first_run: object = None
    ranks, merged, dtypes = set[int](), Tensors(), dict[tuple[Slot, str], torch.dtype]()
    for state in states:
        loaded = read_state(state)
        if (position := loaded.position) is None:
            raise StateError("expected a state made by local_state_dict(), got one of all processes")
        run = (position.world_size, position.local_size, loaded.cuts, loaded.digest)
        if first is None:
            first, first_run, num_processes = loaded, run, position.world_size
        if run != first_run or position.rank in ranks:
            raise StateError(
                "the states are from different steps or runs, or one is given twice; merge states that were "
                "saved together"
            )
        _add(loaded, position, merged, dtypes)
        ranks.add(position.rank)
    if first is None or ranks != set(range(num_processes)):
        found = f"those of ranks {listed(sorted(ranks))} of {num_processes}" if ranks else "none"
        raise StateError(
            f"expected the states of all processes, got {found}; copy the files of all machines into one "
            "folder first"
        )
    for (slot, label), dtype in dtypes.items():
        merged[slot][label] = merged[slot][label].to(dtype)
    shapes = {name: shape for name, (shape, _) in first.cuts.items()} or first.shapes
    return pack(first._replace(shapes=shapes, slots=merged, position=None))


def _add(
    loaded: SavedState, position: Position, merged: Tensors, dtypes: dict[tuple[Slot, str], torch.dtype]
) -> None:
    """Add the state of one process to the merged ones."""
    local_rank, local_size, cuts = position.local_rank, position.local_size, loaded.cuts
    num_averaged = position.world_size // local_size
    for slot, tensors in loaded.slots.items():
        of_slot = merged.setdefault(slot, {})
        for label, tensor in tensors.items():
            if not slot.is_elementwise:
                of_slot.setdefault(of_shard(label, local_rank, local_size) if cuts else label, tensor)
                continue
            # The mean over machines: each process has its part of a machine's tensor, and zeros. Or over
            # replicas: each process has a shard, or the whole of a tensor that is not cut.
            shape, dim = cuts.get(label, (tuple(tensor.shape), None))
            dtypes[slot, label] = tensor.dtype
            whole = of_slot.setdefault(label, torch.zeros(shape, dtype=torch.float64, device="cpu"))
            if shape_of_shard(shape, dim, local_rank, local_size) != tensor.shape or whole.shape != shape:
                raise StateError(
                    f"the {slot.name} of {label} has shape {tuple(tensor.shape)}, which is not a part of "
                    f"{tuple(whole.shape)}; merge states that were saved together"
                )
            share = tensor.double() / num_averaged
            if dim is not None:
                shard_of(whole, dim, local_rank, local_size).add_(share)
            elif not cuts or local_rank == 0:
                whole.add_(share)


def of_shard(label: str, shard: int, num_shards: int) -> str:
    """Return a label for the state of a whole model, if the tensor belongs to a single shard."""
    return f"{label}{SHARD_MARK}{shard} of {num_shards}"
