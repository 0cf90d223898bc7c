"""A replica of an FSDP2 model: each of its processes averages its shards with their equals elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.channel import InProcessTransport, ProcessGroupTransport, Transport
from thinwire.errors import AttachError
from thinwire.fronts.local_sgd.replica import Replica
from thinwire.fronts.sharded.front import alike_on_all_shards, refuse_attached
from thinwire.fronts.sharded.model import Piece, ShardedModel, pieces_of, replicas_of, reshard
from thinwire.fronts.sharded.state import ShardedSync
from thinwire.sync import Engine, GradientSync

__all__ = ["ShardedReplica"]


class ShardedReplica(Replica):
    """A replica whose processes hold a shard of it each.

    Args:
        module: Of which `fully_shard` holds all trained parameters.
        process_group: As of `LocalSGD`.
        mesh: As of `LocalSGD`.

    Raises:
        AttachError: It is not sharded as it must be, or attached, or the group is not of equal shards.
        ConfigError: Both a group and a mesh are given.
    """

    is_sharded = True

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | Transport | None,
        mesh: DeviceMesh | None,
    ) -> None:
        sharded = ShardedModel(module)
        own = sharded.mesh()
        if sharded.is_replicated:
            raise AttachError(
                "replicate averages this model's gradients in every step; pass the plain module instead, "
                "without replicate"
            )
        if not isinstance(process_group, Transport):
            process_group = replicas_of(sharded, process_group, mesh)
        super().__init__(process_group)
        self._pieces = {piece.name: piece for piece in pieces_of(module, sharded)}
        refuse_attached(
            self._pieces.values(),
            "its gradients are averaged over the replicas in every step, so averaging models as well would "
            "change nothing; leave out one of the two",
        )
        self._module = module
        inside = ProcessGroupTransport(own.get_group(), torch.device(own.device_type))
        # A replica of one shard has nobody to ask, and its steps are committed without.
        self._inside = inside if inside.size > 1 else InProcessTransport.group(1)[0]
        self.shards = inside if inside.size > 1 else None

    def show_shards(self) -> None:
        """As `Replica.show_shards`."""
        reshard(self._module)

    def alike(
        self, purpose: str, described: Callable[[], dict[str, str]], action: Callable[[], None]
    ) -> None:
        """As `Replica.alike`."""
        alike_on_all_shards(self._inside, purpose, described, action)

    def sync_of(self, engine: Engine) -> GradientSync:
        """As `Replica.sync_of`."""
        pieces = {spec.name: self._piece(spec.name, spec.shape, spec.dtype) for spec in engine.specs}
        return ShardedSync(engine, self._inside, pieces)

    def shape_of(self, name: str, held: torch.Tensor) -> tuple[int, ...]:
        """As `Replica.shape_of`."""
        return self._piece(name, tuple(held.shape), held.dtype).shape

    def whole(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Replica.whole`, on the CPU. Of a buffer the first shard's: each process has its own."""
        return {name: self._gathered(name, each) for name, each in held.items()}

    def own(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Replica.own`: copies."""
        rank, size = self._inside.rank, self._inside.size
        return {
            name: self._piece(name, tuple(each.shape), each.dtype).cut(rank, size)(each).clone()
            for name, each in whole.items()
        }

    def _gathered(self, name: str, held: torch.Tensor) -> torch.Tensor:
        piece, shards = self._piece(name, tuple(held.shape), held.dtype), self._inside
        whole = torch.empty(piece.shape, dtype=held.dtype)
        # The first shard is the longest; the last ones may be empty, and take part.
        longest = piece.cut(0, shards.size)(whole).numel()
        own = held.new_zeros(longest, device=shards.control_device)
        own[: held.numel()] = held.reshape(-1)
        rows = own.new_empty(shards.size, longest)
        shards.all_gather(rows, own, f"state_dict(), {name}").wait()
        for shard in range(1 if piece.dim is None else shards.size):
            into = piece.cut(shard, shards.size)(whole)
            into.copy_(rows[shard, : into.numel()].view(into.shape))
        return whole

    def _piece(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Piece:
        """Return what this process has of a parameter, or of a buffer of some shape: all of it."""
        if name in self._pieces:
            return self._pieces[name]
        like = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        return Piece(name, like, shape, None, 0)
