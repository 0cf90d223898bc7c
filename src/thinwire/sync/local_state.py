"""States that each process saves for itself, without a message: read again by itself, or merged into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from thinwire.algorithms import Slot
from thinwire.errors import StateError
from thinwire.plan import SHARD_MARK
from thinwire.sync.checksum import check_readable, check_undamaged, shown_kind, with_checksum
from thinwire.sync.state import SHAPES, Expected, LoadedState, checked_state, pairs_of
from thinwire.tensors.layout import shape_of_shard, shard_of

KEYS = {"own", "member", "members", "place", "places", "differing", "common", "checksum"}
MACHINES = "machines"  # the ranks on each machine; states of Thinwire 0.2 have none
CUTS = "cuts"  # of a sharded model: whole shapes, and along which dimension each is cut, by name
NUMBERS = ("member", "members", "place", "places")

Cuts: TypeAlias = dict[str, tuple[tuple[int, ...], int | None]]
"""Of each parameter of a sharded model the whole shape, and along which dimension it is cut, if it is."""


class Position(NamedTuple):
    """Which process of how many this is, and its place of how many on its machine, or in its replica."""

    member: int
    members: int
    place: int
    places: int
    machines: tuple[tuple[int, ...], ...] | None = None  # the ranks on each, if machines have several

    def __str__(self) -> str:
        where = f", at place {self.place}" if self.places > 1 else ""
        return f"process {self.member} of {self.members}, {self.places} a machine{where}"


def position_of(state: Mapping[str, Any]) -> Position:
    """Return which process has saved a state for itself."""
    member, members, place, places = (state[name] for name in NUMBERS)
    return Position(member, members, place, places, state.get(MACHINES))


def is_local(state: object) -> bool:
    """Return whether `local_state_dict` has made a state, by its keys."""
    return isinstance(state, Mapping) and state.keys() - {CUTS, MACHINES} == KEYS


def checked_local(state: object) -> Mapping[str, Any]:
    """Return the part to be checked further: the state of the process, within that which it has saved."""
    check_readable(state)
    if not (isinstance(state, Mapping) and is_local(state)):
        raise StateError(f"expected a state made by local_state_dict(), got {shown_kind(state)}")
    check_undamaged(state)
    differing = state["differing"]
    is_fine = all(type(state[name]) is int and state[name] >= 0 for name in NUMBERS)
    is_fine &= isinstance(differing, list | tuple) and all(isinstance(name, str) for name in differing)
    if not (is_fine and isinstance(state["own"], Mapping) and isinstance(state["common"], str)):
        raise StateError("expected a state made by local_state_dict(), got other values; load an earlier one")
    _, members, place, places, _ = position = position_of(state)
    if position.member >= members or place >= places or members % places:
        raise StateError(f"the state is of {position}, which can't be: it is damaged; load an earlier one")
    own: Mapping[str, Any] = state["own"]
    return own


def own_state(state: Mapping[str, Any], position: Position) -> Mapping[str, Any]:
    """Return the state of a process; refuse that of a different one."""
    own = checked_local(state)
    # Processes of one place have the same in what is not local; what is local is added up, whoever shares a
    # machine.
    if position_of(state)._replace(machines=None) != position._replace(machines=None):
        raise StateError(
            f"the state was saved by {position_of(state)}, and this is {position}; load each process's own "
            "file, or on all processes thinwire.checkpoint.merge(…) of all files"
        )
    return own


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state, as `state_dict` would have, of the states that all processes saved for themselves.

    It is for `load_state_dict` on any number of processes: residuals become their mean, so nothing is lost.

    Args:
        states: What `local_state_dict` returned on each process, in any order; read one after the other.

    Cost: as much memory as a state in fp64, beside the one being read.

    Raises:
        StateError: One is damaged, twice there or missing, or they are not of one step of one run.
    """
    first: Mapping[str, Any] | None = None
    first_run: object = None
    found, found_places = set[int](), set[int]()
    merged: dict[Slot, dict[str, torch.Tensor]] = {}
    dtypes: dict[tuple[Slot, str], torch.dtype] = {}
    for state in states:
        loaded = checked_state(checked_local(state), specs=None)
        position, cuts = position_of(state), _cuts_of(state)
        run = (position.members, position.places, state["common"], cuts, loaded.step, loaded.skipped_steps)
        if first is None:
            first, first_run = state, run
        if run != first_run or position.member in found:
            raise StateError(
                "the states are not of one step of one run, or one is there twice; merge those that were "
                "saved together"
            )
        _add(loaded, position, cuts, merged, dtypes, is_first=position.place not in found_places)
        found.add(position.member)
        found_places.add(position.place)
    if first is None or found != set(range(first["members"])):
        there = ", ".join(map(str, sorted(found))) or "none"
        raise StateError(
            f"expected the states of all processes, of {first['members'] if first else 'any'}, got {there}"
        )
    shapes = tuple((name, shape) for name, (shape, _) in sorted(_cuts_of(first).items()))
    whole = {**first["own"], "parameters": shapes or first["own"]["parameters"]}
    whole["slots"] = tuple((slot.name, (slot.is_local, slot.is_elementwise)) for slot in merged)
    for slot, tensors in merged.items():
        whole[slot.name] = tuple(
            (label, tensor.to(dtypes.get((slot, label), tensor.dtype)))
            for label, tensor in sorted(tensors.items())
        )
    return with_checksum(whole)


def _add(
    loaded: LoadedState,
    position: Position,
    cuts: Cuts,
    merged: dict[Slot, dict[str, torch.Tensor]],
    dtypes: dict[tuple[Slot, str], torch.dtype],
    *,
    is_first: bool,
) -> None:
    """Add the state of one process to those before it; of its place it may be the first."""
    _, members, place, places, _ = position
    for slot, tensors in loaded.slots.items():
        of_slot = merged.setdefault(slot, {})
        for label, tensor in tensors.items():
            if not slot.is_elementwise:
                of_slot.setdefault(of_shard(label, place, places) if cuts else label, tensor)
                continue
            # Each process of a machine has its part, and zeros; machines average. So do replicas, of
            # which each process has a shard, or all of what is not cut.
            shape, dim = cuts.get(label, (tuple(tensor.shape), None))
            if shape_of_shard(shape, dim, place, places) != tensor.shape:
                raise StateError(
                    f"the {slot.name} of {label} has shape {tuple(tensor.shape)}, which is no part of "
                    f"{shape}: the state is damaged; load an earlier one"
                )
            dtypes[slot, label] = tensor.dtype
            whole = of_slot.setdefault(label, torch.zeros(shape, dtype=torch.float64))
            if whole.shape != shape:
                raise StateError(
                    f"the {slot.name} of {label} has shapes {tuple(whole.shape)} and {shape}; merge states "
                    "that were saved together"
                )
            is_other = bool(cuts) and dim is None and place > 0
            if (slot.is_local or is_first) and not is_other:
                share = tensor.double() / (members // places if slot.is_local else 1)
                (whole if dim is None else shard_of(whole, dim, place, places)).add_(share)


def _cuts_of(state: Mapping[str, Any]) -> Cuts:
    """Return how a sharded model was cut."""
    if CUTS not in state:
        return {}
    return {name: (tuple(shape), dim) for name, (shape, dim) in pairs_of(state, CUTS, *CUT).items()}


def _is_cut(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2 or not SHAPES[1](value[0]):
        return False
    return value[1] is None or (type(value[1]) is int and 0 <= value[1] < len(value[0]))


CUT: Expected = "a whole shape and one of its dimensions", _is_cut


def of_shard(label: str, shard: int, num_shards: int) -> str:
    """Return the name of a label in the state of a whole model, if it belongs to a shard alone."""
    return f"{label}{SHARD_MARK}{shard} of {num_shards}"
