"""One state of those that all processes saved for themselves, without a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from thinwire.algorithms import Slot
from thinwire.errors import StateError
from thinwire.plan import SHARD_MARK
from thinwire.sync.state import Layout, SavedState, Tensors, pack, read_state
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
    ranks, local_ranks = set[int](), set[int]()
    merged: Tensors = {}
    dtypes = dict[tuple[Slot, str], torch.dtype]()
    for state in states:
        loaded = read_state(state)
        if loaded.layout is None:
            raise StateError("expected a state made by local_state_dict(), got one of all processes")
        position, _, cuts = loaded.layout
        run = (position.world_size, position.local_size, cuts, loaded.digest)
        if first is None:
            first, first_run, num_processes = loaded, run, position.world_size
        if run != first_run or position.rank in ranks:
            raise StateError(
                "the states are not of one step of one run, or one is there twice; merge those that were "
                "saved together"
            )
        _add(loaded, loaded.layout, merged, dtypes, is_first=position.local_rank not in local_ranks)
        ranks.add(position.rank)
        local_ranks.add(position.local_rank)
    if first is None or ranks != set(range(num_processes)):
        listed = ", ".join(map(str, sorted(ranks))) or "none"
        raise StateError(
            f"expected the states of all processes, of {num_processes if first else 'any'}, got {listed}"
        )
    for (slot, label), dtype in dtypes.items():
        merged[slot][label] = merged[slot][label].to(dtype)
    cuts = first.layout.cuts if first.layout else {}
    shapes = {name: shape for name, (shape, _) in cuts.items()} or first.shapes
    return pack(first._replace(shapes=shapes, slots=merged, layout=None))


def _add(
    loaded: SavedState,
    layout: Layout,
    merged: Tensors,
    dtypes: dict[tuple[Slot, str], torch.dtype],
    *,
    is_first: bool,
) -> None:
    """Add the state of one process to those before it; it may be the first of its local rank."""
    (_, world_size, local_rank, local_size, _), _, cuts = layout
    for slot, tensors in loaded.slots.items():
        of_slot = merged.setdefault(slot, {})
        for label, tensor in tensors.items():
            if not slot.is_elementwise:
                of_slot.setdefault(of_shard(label, local_rank, local_size) if cuts else label, tensor)
                continue
            # Each process of a machine has its part, and zeros; machines average. So do replicas, of
            # which each process has a shard, or all of what is not cut.
            shape, dim = cuts.get(label, (tuple(tensor.shape), None))
            dtypes[slot, label] = tensor.dtype
            whole = of_slot.setdefault(label, torch.zeros(shape, dtype=torch.float64))
            if shape_of_shard(shape, dim, local_rank, local_size) != tensor.shape or whole.shape != shape:
                raise StateError(
                    f"the {slot.name} of {label} has shape {tuple(tensor.shape)}, which is no part of "
                    f"{tuple(whole.shape)}; merge states that were saved together"
                )
            is_other = bool(cuts) and dim is None and local_rank > 0
            if (slot.is_local or is_first) and not is_other:
                share = tensor.double() / (world_size // local_size if slot.is_local else 1)
                (whole if dim is None else shard_of(whole, dim, local_rank, local_size)).add_(share)


def of_shard(label: str, shard: int, num_shards: int) -> str:
    """Return the name of a label in the state of a whole model, if it belongs to a shard alone."""
    return f"{label}{SHARD_MARK}{shard} of {num_shards}"
