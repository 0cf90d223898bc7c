"""What a process holds of its replica of the model: all of it, or (of a sharded model) a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from thinwire.channel import Transport
from thinwire.sync import Engine, GradientSync

__all__ = ["Replica"]


class Replica:
    """A replica that is on one process; see `ShardedReplica` for the other kind.

    Attributes:
        replicas: The processes that meet in an averaging, or a transport; None for the default group.
        shards: Joins the processes of the replica; None where it is on one.
        is_sharded: Whether FSDP2 holds the parameters.
    """

    shards: Transport | None = None
    is_sharded = False

    def __init__(self, replicas: dist.ProcessGroup | Transport | None = None) -> None:
        self.replicas = replicas

    def show_shards(self) -> None:
        """Let the model's parameters be what this process holds of them, as they are between steps."""

    def alike(
        self, purpose: str, described: Callable[[], dict[str, str]], action: Callable[[], None]
    ) -> None:
        """Do something with the other replicas, and go on only if it went well for all shards.

        Args:
            purpose: What is done, for errors.
            described: What must then be the same on all shards, by subject.
            action: Collective over the replicas.

        Raises:
            AgreementError: Replicas differ, or shards do.
        """
        action()

    def sync_of(self, engine: Engine) -> GradientSync:
        """Return the handle of an engine, which saves and loads the state of the whole model."""
        return GradientSync(engine)

    def shape_of(self, name: str, held: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a whole parameter or buffer.

        Args:
            name: Its name.
            held: What this process has of it.
        """
        return tuple(held.shape)

    def whole(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name what has the shapes of whole parameters, of what this process has. Collective."""
        return dict(held)

    def own(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name this process's part of what has the shapes of whole parameters."""
        return dict(whole)
