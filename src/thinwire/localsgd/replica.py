"""What a process holds of its replica of the model: all of it, or (of a sharded model) a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from thinwire.channel import InProcessTransport, Transport
from thinwire.sync import Engine, GradientSync

if TYPE_CHECKING:
    from thinwire.fronts.sharded.model import Piece


class Replica:
    """A replica, over processes that hold a shard of it each; of one process, the shard is all of it."""

    is_sharded = False  # its parameters are DTensors, or parts of the model
    saves_parts = False  # each process its own

    def __init__(
        self,
        replicas: dist.ProcessGroup | Transport | None = None,
        inside: Transport | None = None,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        self.replicas = replicas
        # Joins the processes of the replica; None if there is one.
        self.shards = None if inside is None or inside.size == 1 else inside
        self.inside = InProcessTransport.group(1)[0] if self.shards is None else self.shards
        self._pieces = pieces or {}

    def show_shards(self) -> None:
        """Let the model's parameters be what this process holds of them, as they are between steps."""

    def sync_of(self, engine: Engine) -> GradientSync:
        """Return the handle of an engine, which saves and loads the state of the whole model."""
        return GradientSync(engine)

    def shape_of(self, name: str, held: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a whole parameter or buffer."""
        return self._pieces[name].shape if name in self._pieces else tuple(held.shape)

    def whole(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name, on the CPU, what has the shapes of whole parameters. Collective.

        A buffer, which all have whole, is the first shard's: each process has its own.
        """
        return {name: self._gathered(name, each) for name, each in held.items()}

    def own(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name this process's part of what has the shapes of whole parameters: a copy if cut."""
        place, shards = self.inside.rank, self.inside.size
        return {
            name: self._pieces[name].cut(place, shards)(each).clone() if name in self._pieces else each
            for name, each in whole.items()
        }

    def _gathered(self, name: str, held: torch.Tensor) -> torch.Tensor:
        if self.shards is None:
            return held
        piece, shards = self._pieces.get(name), self.shards
        whole = torch.empty(self.shape_of(name, held), dtype=held.dtype)
        parts = [whole]
        if piece is not None and piece.dim is not None:
            parts = [piece.cut(shard, shards.size)(whole) for shard in range(shards.size)]
        # The first shard is the longest; the last ones may be empty, and take part.
        own = held.new_zeros(parts[0].numel(), device=shards.control_device)
        own[: held.numel()] = held.reshape(-1)
        rows = own.new_empty(shards.size, len(own))
        shards.all_gather(rows, own, f"state_dict(), {name}").wait()
        for part, row in zip(parts, rows, strict=False):
            part.copy_(row[: part.numel()].view(part.shape))
        return whole
