"""The state of a sharded run: that of the whole model, so that any number of shards and replicas go on.

What is elementwise, the residual above all, is put together in the parameter's whole shape. What belongs to
a shard alone (a low-rank factor) is kept with a note of which shard it is of, and taken up by the same shard
of as many; other shards start without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from thinwire.adapters.sharded.model import Piece, local_of, sharded_like
from thinwire.algorithms import Slot
from thinwire.comm import Transport
from thinwire.comm.agreement import alike_on_all_shards
from thinwire.plan import SHARD_MARK, ParameterSpec
from thinwire.sync import Engine, GradientSync
from thinwire.sync.checksum import check_finite, with_checksum
from thinwire.sync.local_state import CUTS, Position, is_local, of_shard
from thinwire.sync.state import LoadedState, tensors_of_all


class ShardedSync(GradientSync):
    """The handle of a sharded model: its state is that of the whole model."""

    def __init__(
        self,
        engine: Engine,
        shards: Transport,
        pieces: Mapping[str, Piece],
        forget_pass: Callable[[], None] = lambda: None,
        detach: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(engine, detach)
        self.shards, self.pieces, self._forget_pass = shards, pieces, forget_pass

    def abandon(self) -> None:
        super().abandon()
        self._forget_pass()

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """As `GradientSync.state_dict`, of the whole model. Collective over all shards and replicas.

        Cost: the residual of the whole model on the CPU of each process, besides that of `GradientSync`.
        """
        return _whole_state(self.own_state(), self.pieces, self.shards)

    @torch.inference_mode(False)
    def local_state_dict(self) -> dict[str, Any]:
        """As `GradientSync.local_state_dict`: of this process's shards."""
        state, shards = super().local_state_dict(), self.shards
        if shards.size == 1:
            return state
        cuts = tuple(sorted((name, (piece.shape, piece.dim)) for name, piece in self.pieces.items()))
        # Processes of all shards have these in common; factors and the shapes of shards differ.
        common = {key: state["own"][key] for key in ("algorithm", "step", "skipped_steps")}
        return with_checksum(
            {
                **state,
                **self.position._asdict(),
                "common": with_checksum({**common, CUTS: cuts})["checksum"],
                CUTS: cuts,
            }
        )

    def own_state(self) -> dict[str, Any]:
        """Return the state of this shard, once all shards have made the same steps."""
        steps = {"steps": str(self.steps)}
        return alike_on_all_shards(self.shards, "state_dict()", lambda: steps, self._engine.state_dict)

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """As `GradientSync.load_state_dict`; also a state of other shards and replicas, or of DDP."""
        if is_local(state):
            self._load_local(state, strict=strict)
        else:
            self._engine.load(self.own_part(state, strict=strict))

    @property
    def position(self) -> Position:
        """As `GradientSync.position`: process by process of the mesh of replicas and shards."""
        replicas, shards = self._engine.transport, self.shards
        member = replicas.rank * shards.size + shards.rank
        return Position(member, replicas.size * shards.size, shards.rank, shards.size)

    def own_part(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedState:
        """Check a state of the whole model, and return what it has for this shard."""
        specs = {
            name: ParameterSpec.of(name, torch.empty(piece.shape, dtype=piece.parameter.dtype, device="meta"))
            for name, piece in self.pieces.items()
        }
        loaded = self._engine.check_state_dict(state, strict=strict, specs=specs)
        return _cut(loaded, self.pieces, self.shards)

    def distributed_state(self) -> Stateful:
        """Residuals are DTensors, sharded as their parameters are."""
        return _InShards(self, self._engine)


class _InShards:
    """The state that `torch.distributed.checkpoint` saves and loads: DTensors for elementwise slots."""

    def __init__(self, sync: ShardedSync, engine: Engine) -> None:
        self._sync, self._engine = sync, engine

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return the state. Collective over all shards and replicas."""
        sync, own = self._sync, self._sync.own_state()
        elementwise = [name for name, kind in own["slots"] if kind[1]]
        rest = _whole_state({**own, **dict.fromkeys(elementwise, ())}, sync.pieces, sync.shards)
        specs = {spec.name: spec for spec in self._engine.specs}
        # Zeros if nothing is remembered: the checkpoint fills in only what a fresh run has as well.
        tensors = {}
        for slot in elementwise:
            kept = dict(own[slot])
            for name, piece in sync.pieces.items():
                zeros = torch.zeros(specs[name].shape, dtype=specs[name].memory_dtype)
                tensors[f"{slot} of {name}"] = sharded_like(piece.parameter, kept.get(name, zeros))
        return {
            "rest": with_checksum(rest),
            "kept": tuple((slot, tuple(sorted(dict(own[slot])))) for slot in elementwise),
            "tensors": tensors,
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned, resharded to this run's shards."""
        loaded = self._sync.own_part(state_dict["rest"])
        slots, tensors = {slot.name: slot for slot in loaded.slots}, dict(loaded.slots)
        for slot, names in state_dict["kept"]:
            held = {n: local_of(state_dict["tensors"][f"{slot} of {n}"]).cpu().clone() for n in names}
            check_finite(slot, held)
            tensors[slots[slot]] = held
        self._engine.load(loaded._replace(slots=tensors))


def _whole_state(own: Mapping[str, Any], pieces: Mapping[str, Piece], shards: Transport) -> dict[str, Any]:
    """Return the state of the whole model. Collective over the shards."""
    if shards.size == 1:
        return dict(own)
    is_elementwise = {name: kind[1] for name, kind in own["slots"]}
    whole: dict[str, dict[str, torch.Tensor]] = {slot: {} for slot in is_elementwise}
    for shard, (slot, label, tensor) in tensors_of_all(own, is_elementwise, shards):
        if not is_elementwise[slot]:
            whole[slot][of_shard(label, shard, shards.size)] = tensor
            continue
        # A shard of which nothing is remembered has zeros there.
        into = whole[slot].setdefault(label, torch.zeros(pieces[label].shape, dtype=tensor.dtype))
        # If all shards have the whole, take the first one's.
        if shard == 0 or pieces[label].dim is not None:
            pieces[label].cut(shard, shards.size)(into).copy_(tensor)
    return with_checksum(
        {
            **own,
            "parameters": tuple(sorted((name, piece.shape) for name, piece in pieces.items())),
            **{slot: tuple(sorted(tensors.items())) for slot, tensors in whole.items()},
        }
    )


def _cut(loaded: LoadedState, pieces: Mapping[str, Piece], shards: Transport) -> LoadedState:
    """Return the part of a loaded state that is this shard's."""
    if shards.size == 1:
        return loaded
    cut = {name: piece.cut(shards.rank, shards.size) for name, piece in pieces.items()}
    shapes = dict(loaded.shapes)
    for name, piece in pieces.items():
        shapes[name] = tuple(cut[name](torch.empty(piece.shape, device="meta")).shape)
    mark = of_shard("", shards.rank, shards.size)
    slots: dict[Slot, dict[str, torch.Tensor]] = {}
    for slot, tensors in loaded.slots.items():
        # Copies: views would keep the whole model's in memory.
        if slot.is_elementwise:
            slots[slot] = {name: cut[name](tensor).clone() for name, tensor in tensors.items() if name in cut}
            continue
        of_this = {k.removesuffix(mark): tensor for k, tensor in tensors.items() if k.endswith(mark)}
        # Tensors of no shard were checked with the state as a whole.
        if slot.check is not None:
            for label, tensor in of_this.items():
                slot.check(label, tensor, shapes)
        slots[slot] = {k: tensor for k, tensor in tensors.items() if SHARD_MARK not in k} | of_this
    return loaded._replace(shapes=shapes, slots=slots)
