"""A replica of an FSDP2 model: each of its processes averages its shards with their equals elsewhere."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.channel import ProcessGroupTransport, Transport
from thinwire.errors import AttachError
from thinwire.fronts.sharded.front import refuse_attached
from thinwire.fronts.sharded.model import Piece, ShardedModel, pieces_of, replicas_of, reshard
from thinwire.fronts.sharded.state import ShardedSync
from thinwire.localsgd.replica import Replica
from thinwire.sync import Engine, GradientSync


class ShardedReplica(Replica):
    """A replica whose processes hold a shard of it each."""

    is_sharded = True

    def __init__(
        self, module: nn.Module, replicas: dist.ProcessGroup | Transport | DeviceMesh | None
    ) -> None:
        sharded = ShardedModel(module)
        own = sharded.mesh()
        sharded.refuse_native()
        if sharded.is_replicated:
            raise AttachError(
                "replicate averages this model's gradients in every step; pass the plain module instead, "
                "without replicate"
            )
        if not isinstance(replicas, Transport):
            replicas = replicas_of(sharded, replicas)
        pieces = {piece.name: piece for piece in pieces_of(module, sharded)}
        refuse_attached(
            pieces.values(),
            "its gradients are averaged over the replicas in every step, so averaging models as well would "
            "change nothing; leave out one of the two",
        )
        inside = ProcessGroupTransport(own.get_group(), torch.device(own.device_type))
        super().__init__(replicas, inside, pieces)
        self._module = module

    def show_shards(self) -> None:
        """As `Replica.show_shards`."""
        reshard(self._module)

    def sync_of(self, engine: Engine) -> GradientSync:
        """As `Replica.sync_of`."""
        pieces = dict(self._pieces)
        # Each process has whole buffers.
        for name, shape, _, dtype, *_ in engine.specs:
            whole = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
            pieces.setdefault(name, Piece(name, whole, shape, None, 0))
        return ShardedSync(engine, self.inside, {spec.name: pieces[spec.name] for spec in engine.specs})
