"""A process's part of its replica of the model: all of it, or (of a sharded model) a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from thinwire.comm import InProcessTransport, Transport
from thinwire.sync import Engine, GradientSync

if TYPE_CHECKING:
    from thinwire.adapters.sharded.model import Piece


@dataclass(frozen=True)
class Replica:
    """A replica, over processes that hold a part of it each; of one process, the part is all of it."""

    replicas: dist.ProcessGroup | Transport | None = None  # that this one is averaged with
    inside: Transport = field(default_factory=lambda: InProcessTransport.group(1)[0])  # joins its processes
    is_sharded: bool = False  # its parameters are DTensors, or parts of the model
    saves_parts: bool = False  # each process its own
    pieces: Mapping[str, Piece] = field(default_factory=dict)  # what this process has of each parameter
    sync_of: Callable[[Engine], GradientSync] = GradientSync  # saves and loads the state of the whole model
    # Lets the parameters be what this process holds of them, as they are between steps.
    show_shards: Callable[[], object] = bool

    @property
    def shards(self) -> Transport | None:
        """Joins the processes of the replica; None if there is one."""
        return None if self.inside.size == 1 else self.inside

    def shape_of(self, name: str, held: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a whole parameter or buffer."""
        return self.pieces[name].shape if name in self.pieces else tuple(held.shape)

    def whole(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name, on the CPU, what has the shapes of whole parameters. Collective.

        A buffer, which all have whole, is the first shard's: each process has its own.
        """
        if self.saves_parts or self.shards is None:
            return dict(held)
        return {name: self._gathered(name, part, self.shards) for name, part in held.items()}

    def own(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name this process's part of what has the shapes of whole parameters: a copy if cut."""
        shard, shards = self.inside.rank, self.inside.size
        return {
            name: self.pieces[name].cut(tensor, shard, shards).clone() if name in self.pieces else tensor
            for name, tensor in whole.items()
        }

    def _gathered(self, name: str, held: torch.Tensor, shards: Transport) -> torch.Tensor:
        piece = self.pieces.get(name)
        whole = torch.empty(self.shape_of(name, held), dtype=held.dtype)
        parts = [whole]
        if piece is not None and piece.dim is not None:
            parts = [piece.cut(whole, shard, shards.size) for shard in range(shards.size)]
        # The first shard is the longest; the last ones may be empty, and take part.
        padded = held.new_zeros(parts[0].numel(), device=shards.control_device)
        padded[: held.numel()] = held.reshape(-1)
        rows = padded.new_empty(shards.size, len(padded))
        shards.all_gather(rows, padded, f"state_dict(), {name}").wait()
        for part, row in zip(parts, rows, strict=False):
            part.copy_(row[: part.numel()].view(part.shape))
        return whole
