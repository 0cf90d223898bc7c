"""One state of those that all processes saved for themselves, without a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from thinwire.algorithms import Slot
from thinwire.errors import StateError
from thinwire.plan import SHARD_MARK
from thinwire.sync.state import Position, SavedState, Tensors, pack, read_state
from thinwire.tensors.layout import shape_of_shard, shard_of


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state, as `state_dict` would have, of the states that all processes saved for themselves.

    It is for `load_state_dict` on any number of processes: residuals become their mean, so nothing is lost.

    Args:
        states: What `local_state_dict` returned on each process, in any order; read one after the other.

    Cost: as much memory as a state in fp64, beside the one being read.

    Raises:
        StateError: One is damaged, twice there or missing, or they are not of one step of one run.
    """
    first: SavedState | None = None
    first_run: object = None
    ranks = set[int]()
    merged: Tensors = {}
    dtypes = dict[tuple[Slot, str], torch.dtype]()
    for state in states:
        loaded = read_state(state)
        if (position := loaded.position) is None:
            raise StateError("expected a state made by local_state_dict(), got one of all processes")
        run = (position.world_size, position.local_size, loaded.cuts, loaded.digest)
        if first is None:
            first, first_run, num_processes = loaded, run, position.world_size
        if run != first_run or position.rank in ranks:
            raise StateError(
                "the states are not of one step of one run, or one is there twice; merge those that were "
                "saved together"
            )
        _add(loaded, position, merged, dtypes)
        ranks.add(position.rank)
    if first is None or ranks != set(range(num_processes)):
        listed = ", ".join(map(str, sorted(ranks))) or "none"
        raise StateError(
            f"expected the states of all processes, of {num_processes if first else 'any'}, got {listed}"
        )
    for (slot, label), dtype in dtypes.items():
        merged[slot][label] = merged[slot][label].to(dtype)
    shapes = {name: shape for name, (shape, _) in first.cuts.items()} or first.shapes
    return pack(first._replace(shapes=shapes, slots=merged, position=None))


def _add(
    loaded: SavedState, position: Position, merged: Tensors, dtypes: dict[tuple[Slot, str], torch.dtype]
) -> None:
    """Add the state of one process to those before it."""
    (_, world_size, local_rank, local_size, _), cuts = position, loaded.cuts
    for slot, tensors in loaded.slots.items():
        of_slot = merged.setdefault(slot, {})
        for label, tensor in tensors.items():
            if not slot.is_elementwise:
                of_slot.setdefault(of_shard(label, local_rank, local_size) if cuts else label, tensor)
                continue
            # The mean over machines, of which each process has its part, and zeros; or over replicas, of
            # which each has a shard, or all of what is not cut.
            shape, dim = cuts.get(label, (tuple(tensor.shape), None))
            dtypes[slot, label] = tensor.dtype
            whole = of_slot.setdefault(label, torch.zeros(shape, dtype=torch.float64))
            if shape_of_shard(shape, dim, local_rank, local_size) != tensor.shape or whole.shape != shape:
                raise StateError(
                    f"the {slot.name} of {label} has shape {tuple(tensor.shape)}, which is no part of "
                    f"{tuple(whole.shape)}; merge states that were saved together"
                )
            share = tensor.double() / (world_size // local_size)
            if dim is not None:
                shard_of(whole, dim, local_rank, local_size).add_(share)
            elif not cuts or local_rank == 0:
                whole.add_(share)


def of_shard(label: str, shard: int, num_shards: int) -> str:
    """Return the name of a label in the state of a whole model, if it belongs to a shard alone."""
    return f"{label}{SHARD_MARK}{shard} of {num_shards}"
