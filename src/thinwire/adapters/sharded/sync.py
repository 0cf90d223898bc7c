"""The state of a sharded run: that of the whole model, to resume with any number of shards and replicas.

Elementwise tensors, above all the residual, are assembled in the parameter's whole shape. Tensors of a single
shard (a low-rank factor) are labelled with their shard, and loaded by the same shard if there are as many;
other shards start without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from thinwire.adapters.sharded.view import Piece, sharded_like
from thinwire.comm import Transport
from thinwire.comm.agreement import alike_on_all_shards
from thinwire.plan import SHARD_MARK, ParameterSpec
from thinwire.sync import Engine, GradientSync
from thinwire.sync.algorithm_state import assemble, parts_of_all
from thinwire.sync.state import Cuts, Position, SavedState, Tensors, check_finite, of_shard, pack
from thinwire.tensors.layout import local_tensor


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
        """Return the state of the whole model, see `GradientSync`. Collective over all shards and replicas.

        Cost: that of `GradientSync`, and the residual of the whole model on the CPU of each process.
        """
        return pack(self.whole(self.save_shard()))

    def save_shard(self) -> SavedState:
        """Return the state of this shard, once all shards have made the same steps."""
        steps = {"steps": str(self.steps)}
        return alike_on_all_shards(self.shards, "state_dict()", steps, self._engine.save)

    def whole(self, saved: SavedState) -> SavedState:
        """Return the state of the whole model. Collective over the shards."""
        size = self.shards.size
        if size == 1:
            return saved
        slots = assemble(
            saved.slots,
            parts_of_all(saved.slots, self.shards),
            self.specs(),
            lambda part, whole: self.pieces[part.label].cut(whole, part.rank, size),
            lambda part: of_shard(part.label, part.rank, size),
        )
        return saved._replace(shapes={name: piece.shape for name, piece in self.pieces.items()}, slots=slots)

    def specs(self) -> dict[str, ParameterSpec]:
        """Return the whole parameters."""
        return {
            name: ParameterSpec.of(name, torch.empty(piece.shape, dtype=piece.parameter.dtype, device="meta"))
            for name, piece in self.pieces.items()
        }

    def _cuts(self) -> Cuts:
        is_cut = self.shards.size > 1
        return {name: (piece.shape, piece.dim) for name, piece in self.pieces.items()} if is_cut else {}

    @property
    def position(self) -> Position:
        """The process's position in the mesh of replicas and shards; see `GradientSync.position`."""
        replicas, shards = self._engine.transport, self.shards
        return Position(
            rank=replicas.rank * shards.size + shards.rank,
            world_size=replicas.size * shards.size,
            local_rank=shards.rank,
            local_size=shards.size,
        )

    def _checked(self, state: Mapping[str, Any], *, strict: bool) -> SavedState:
        """Return the part of a whole model's state for this shard, or the state that this process saved."""
        loaded = self._engine.check_state_dict(
            state, strict=strict, position=self.position, whole=self.specs()
        )
        return self.cut(loaded) if loaded.position is None else loaded

    def cut(self, loaded: SavedState) -> SavedState:
        """Return this shard's part of a whole model's state."""
        rank, size = self.shards.rank, self.shards.size
        if size == 1:
            return loaded
        pieces, mark = self.pieces, of_shard("", rank, size)
        slots: Tensors = {}
        for slot, tensors in loaded.slots.items():
            if slot.is_elementwise:
                # Copies: views would keep the whole model's tensors in memory.
                held = {n: pieces[n].cut(t, rank, size).clone() for n, t in tensors.items() if n in pieces}
            else:
                own = {label.removesuffix(mark): t for label, t in tensors.items() if label.endswith(mark)}
                held = {label: t for label, t in tensors.items() if SHARD_MARK not in label} | own
            slots[slot] = held
        return loaded._replace(slots=slots)

    def distributed_state(self) -> Stateful:
        """Return a state whose residuals are DTensors, sharded like their parameters."""
        return _InShards(self, self._engine)


class _InShards:
    """The state that `torch.distributed.checkpoint` saves and loads: DTensors for elementwise slots."""

    def __init__(self, sync: ShardedSync, engine: Engine) -> None:
        self._sync, self._engine = sync, engine

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return the state. Collective over all shards and replicas."""
        sync, saved = self._sync, self._sync.save_shard()
        rest = {slot: {} if slot.is_elementwise else tensors for slot, tensors in saved.slots.items()}
        elementwise = [slot for slot in saved.slots if slot.is_elementwise]
        specs = {spec.name: spec for spec in self._engine.specs}
        # Zeros if there is no state: the checkpoint fills in only entries that a fresh run has as well.
        tensors = {}
        for slot in elementwise:
            for name, piece in sync.pieces.items():
                zeros = torch.zeros(specs[name].shape, dtype=specs[name].memory_dtype, device="cpu")
                local = saved.slots[slot].get(name, zeros)
                tensors[f"{slot.name} of {name}"] = sharded_like(piece.parameter, local)
        return {
            "rest": pack(sync.whole(saved._replace(slots=rest))),
            "kept": tuple((slot.name, tuple(sorted(saved.slots[slot]))) for slot in elementwise),
            "tensors": tensors,
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, resharded to this run's shards."""
        loaded = self._sync.cut(self._engine.check_state_dict(state_dict["rest"], whole=self._sync.specs()))
        slots = {slot.name: slot for slot in loaded.slots}
        for slot, names in state_dict["kept"]:
            sharded = {name: state_dict["tensors"][f"{slot} of {name}"] for name in names}
            held = {name: local_tensor(tensor).cpu().clone() for name, tensor in sharded.items()}
            check_finite(slot, held)
            loaded.slots[slots[slot]].update(held)
        self._engine.load(loaded)
