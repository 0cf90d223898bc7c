"""A process's part of its replica of the model: all of it, or a shard of a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from thinwire.algorithms import Slot
from thinwire.comm import InProcessTransport, Transport
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, GradientSync
from thinwire.sync.algorithm_state import assemble, parts_of_all

if TYPE_CHECKING:
    from thinwire.adapters.sharded.view import Piece

HELD = Slot("what processes hold", is_elementwise=True)


@dataclass(frozen=True)
class Replica:
    """A replica over processes that each hold a part of it; a single process holds all of it."""

    replicas: dist.ProcessGroup | Transport | None = None  # the replicas that this one is averaged with
    inside: Transport = field(default_factory=lambda: InProcessTransport.group(1)[0])  # joins its processes
    is_sharded: bool = False  # its parameters are DTensors, or parts of the model
    # This process's piece of each parameter; empty if it holds all of them, or saves only its own part.
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    sync_of: Callable[[Engine], GradientSync] = GradientSync  # saves and loads the state of the whole model
    # Makes the model's parameters this process's shards, as they are between steps.
    show_shards: Callable[[], object] = lambda: None

    @property
    def place(self) -> str | None:
        """The part of the model whose state this process saves; None if it saves that of the whole model."""
        saves_whole = self.pieces or self.inside.size == 1
        return None if saves_whole else f"part {self.inside.rank} of {self.inside.size}"

    def shape_of(self, name: str, held: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a whole parameter or buffer."""
        return self.pieces[name].shape if name in self.pieces else tuple(held.shape)

    def whole(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors with the shapes of whole parameters, by name, on the CPU. Collective.

        Each process has its own whole copy of a buffer: the result has that of the first shard.
        """
        if not self.pieces or self.inside.size == 1:
            return dict(held)
        specs = {
            name: ParameterSpec.of(name, part.new_empty(self.shape_of(name, part), device="meta"))
            for name, part in held.items()
        }
        parts = parts_of_all({HELD: dict(held)}, self.inside)
        return assemble([HELD], parts, specs, lambda it, whole: self._cut(it.label, whole, it.rank))[HELD]

    def own(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this process's parts of tensors with the shapes of whole parameters: copies if cut."""
        return {
            name: self._cut(name, tensor, self.inside.rank).clone() if name in self.pieces else tensor
            for name, tensor in whole.items()
        }

    def _cut(self, name: str, whole: torch.Tensor, shard: int) -> torch.Tensor:
        return self.pieces[name].cut(whole, shard, self.inside.size)
