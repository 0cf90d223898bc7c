"""States that each process saves for itself, without a message: read again by itself, or merged into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from thinwire.errors import StateError
from thinwire.plan import SHARD_MARK
from thinwire.sync.checksum import check_readable, check_undamaged, with_checksum
from thinwire.tensors.layout import shard_of

KEYS = {"own", "member", "members", "place", "places", "differing", "common", "checksum"}
CUTS = "cuts"  # of a sharded model: whole shapes, and along which dimension each is cut, by name
NUMBERS = ("member", "members", "place", "places")


class Position(NamedTuple):
    """Which process of how many this is, and how many there are on each machine, or in each replica."""

    member: int
    members: int
    places: int

    def __str__(self) -> str:
        return f"process {self.member} of {self.members}, {self.places} a machine"


def position_of(state: Mapping[str, Any]) -> Position:
    """Return which process has saved a state for itself."""
    return Position(state["member"], state["members"], state["places"])


def is_local(state: object) -> bool:
    """Return whether `local_state_dict` has made a state, by its keys."""
    return isinstance(state, Mapping) and state.keys() - {CUTS} == KEYS


def checked_local(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is to be checked further: the state of the process, within that which it has saved."""
    check_readable(state)
    check_undamaged(state)
    differing = state["differing"]
    is_fine = all(type(state[name]) is int and state[name] >= 0 for name in NUMBERS)
    is_fine &= isinstance(state.get(CUTS, ()), list | tuple)
    is_fine &= isinstance(differing, list | tuple) and all(isinstance(name, str) for name in differing)
    if not (is_fine and isinstance(state["own"], Mapping) and isinstance(state["common"], str)):
        raise StateError("expected a state made by local_state_dict(), got other values; load an earlier one")
    own: Mapping[str, Any] = state["own"]
    return own


def own_state(state: Mapping[str, Any], position: Position) -> Mapping[str, Any]:
    """Return the state of a process; refuse that of a different one."""
    own = checked_local(state)
    if position_of(state) != position:
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
    found: set[int] = set()
    merged: dict[str, dict[str, torch.Tensor]] = {}
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    for state in states:
        own = checked_local(state)
        first = first or state
        if any(state[key] != first[key] for key in ("members", "places", "common")):
            raise StateError(
                "the states are not of one step of one run; merge those that were saved together"
            )
        found.add(state["member"])
        cuts, place, places = dict(state.get(CUTS, ())), state["place"], state["places"]
        for slot, (is_local_slot, is_elementwise) in own["slots"]:
            of_slot = merged.setdefault(slot, {})
            for label, tensor in own[slot]:
                dtypes.setdefault(slot, {})[label] = tensor.dtype
                if not is_elementwise:
                    of_slot.setdefault(of_shard(label, place, places) if cuts else label, tensor)
                    continue
                # Each process of a machine has its part, and zeros; machines average. So do replicas, of
                # which each process has a shard, or all of what is not cut.
                shape, dim = cuts.get(label, (tensor.shape, None))
                whole = of_slot.setdefault(label, torch.zeros(tuple(shape), dtype=torch.float64))
                is_other = cuts and dim is None and place > 0
                if (is_local_slot or state["member"] // places == 0) and not is_other:
                    share = tensor.double() / (state["members"] // places if is_local_slot else 1)
                    (whole if dim is None else shard_of(whole, dim, place, places)).add_(share)
    if first is None or found != set(range(first["members"])):
        there = ", ".join(map(str, sorted(found))) or "none"
        raise StateError(
            f"expected the states of all processes, of {first['members'] if first else 'any'}, got {there}"
        )
    slots = {
        slot: tuple(
            (label, each.to(dtypes[slot].get(label, each.dtype))) for label, each in sorted(tensors.items())
        )
        for slot, tensors in merged.items()
    }
    shapes = tuple((name, tuple(shape)) for name, (shape, _) in first.get(CUTS, ()))
    return with_checksum({**first["own"], "parameters": shapes or first["own"]["parameters"], **slots})


def of_shard(label: str, shard: int, num_shards: int) -> str:
    """Return what a label is called in the state of a whole model, if it belongs to a shard alone."""
    return f"{label}{SHARD_MARK}{shard} of {num_shards}"
