"""Replicas in parts: each process averages with those that hold the same part of other replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.adapters.ddp_model import is_fsdp2
from thinwire.adapters.sharded.fsdp import attached_to
from thinwire.adapters.sharded.sync import ShardedSync
from thinwire.adapters.sharded.view import Piece, ShardedModel, pieces_of, replicas_of, reshard
from thinwire.comm import Transport
from thinwire.comm.process_group import control_transport
from thinwire.errors import AttachError
from thinwire.local_sgd.replica import Replica
from thinwire.sync import Engine, GradientSync
from thinwire.torch_private import root_mesh


def new_replica(module: nn.Module, replicas: dist.ProcessGroup | Transport | DeviceMesh | None) -> Replica:
    """Return a replica whose processes hold parts of it, in any layout.

    In FSDP2's own layout over one dimension the state is that of the whole model. In any other (tensor or
    expert parallel, native HSDP, a stage of a pipeline) each process saves its part.
    """
    parameters = list(module.parameters())
    laid_out = [parameter.device_mesh for parameter in parameters if hasattr(parameter, "device_mesh")]
    meshes = list({str(mesh.mesh.tolist()): mesh for mesh in laid_out}.values())  # each once
    if any(map(attached_to, parameters)):
        raise AttachError(
            "the model is already attached: its gradients are averaged in every step, so averaging models "
            "would change nothing; use only one of the two"
        )
    show_shards = partial(reshard, module) if is_fsdp2(module) else lambda: None
    if replicas is None or (is_fsdp2(module) and _saves_whole(module, replicas, meshes)):
        sharded = ShardedModel(module)
        sharded.refuse_hsdp()
        if sharded.is_replicated:
            raise AttachError(
                "replicate averages this model's gradients in every step; pass the plain module, without "
                "replicate"
            )
        if not isinstance(replicas, Transport):
            replicas = replicas_of(sharded, replicas)
        pieces = {piece.name: piece for piece in pieces_of(module, sharded)}
        inside = sharded.shards()
        sync_of = partial(_sync_of, pieces, inside)
        return Replica(
            replicas, inside, is_sharded=True, pieces=pieces, sync_of=sync_of, show_shards=show_shards
        )
    inner = _inner_ranks(meshes, replicas)
    if isinstance(replicas, DeviceMesh):
        replicas = replicas.get_group()
    if not isinstance(replicas, Transport):
        shared = sorted(set(dist.get_process_group_ranks(replicas)) & {*inner})
        if len(shared) != 1:
            raise AttachError(
                f"replicas shares the processes {shared} with this replica, {inner}, which hold different "
                'parts of it; pass those that hold the same part, such as mesh["replicate"]'
            )
    replica = Replica(replicas, is_sharded=True, show_shards=show_shards)
    return replace(replica, inside=control_transport(inner)) if len(inner) > 1 else replica


def _saves_whole(module: nn.Module, replicas: object, meshes: list[DeviceMesh]) -> bool:
    """Return whether an FSDP2 model's state is that of the whole model."""
    if len(meshes) == 1 and meshes[0].ndim == 1:
        reshard(module)
        # There may be experts outside of what fully_shard holds.
        held = {id(parameter) for _, parameter in ShardedModel(module).parameters}
        if all(id(it) in held for it in module.parameters() if hasattr(it, "device_mesh")):
            return True
    # If replicas are not a dimension of the parts' meshes, each process saves its own part.
    if isinstance(replicas, Transport):
        return False
    if isinstance(replicas, DeviceMesh):
        ranks = replicas.mesh.flatten().tolist()
    else:
        ranks = dist.get_process_group_ranks(replicas) if isinstance(replicas, dist.ProcessGroup) else []
    inside = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    return len(inside.intersection(ranks)) != 1


def _sync_of(pieces: Mapping[str, Piece], inside: Transport, engine: Engine) -> GradientSync:
    averaged = {}
    for spec in engine.specs:
        # Every process has whole buffers.
        whole = nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), requires_grad=False)
        averaged[spec.name] = pieces.get(spec.name, Piece(spec.name, whole, spec.shape, None, 0))
    return ShardedSync(engine, inside, averaged)


def _inner_ranks(meshes: list[DeviceMesh], replicas: object) -> list[int]:
    """Return the processes that together hold this replica, as far as known."""
    if isinstance(replicas, DeviceMesh):
        root = root_mesh(replicas)
        names, name = root.mesh_dim_names or (), (replicas.mesh_dim_names or ("",))[0]
        if replicas.ndim != 1:
            raise AttachError(
                f"expected the mesh dimension of the replicas alone, got {replicas.mesh_dim_names}; pass "
                'one such as mesh["replicate"]'
            )
        if name in names:
            dim = names.index(name)
            coordinate = root.get_coordinate()
            assert coordinate is not None, "a process of the mesh has its coordinate in it"
            return list(map(int, root.mesh.select(dim, coordinate[dim]).flatten().tolist()))
    # Experts may be on some of the processes that hold the rest, or on all of them in two dimensions.
    ranks_of = [list(map(int, mesh.mesh.flatten().tolist())) for mesh in meshes] or [[dist.get_rank()]]
    widest = max(ranks_of, key=len)
    if not all(set(widest).issuperset(ranks) for ranks in ranks_of):
        shown = " and ".join(str(mesh.mesh.tolist()) for mesh in meshes)
        raise AttachError(
            f"parameters use different meshes, {shown}; pass replicas=mesh['replicate'] of their common "
            "parent mesh"
        )
    return widest
