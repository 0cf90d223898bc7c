"""A replica whose processes hold parts of it in any layout: each averages its own with those of equals."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.channel import ProcessGroupTransport, Transport, group_of
from thinwire.errors import AttachError
from thinwire.fronts.ddp_model import is_fsdp2
from thinwire.fronts.sharded.front import attached_to
from thinwire.fronts.sharded.model import reshard
from thinwire.localsgd.replica import Replica


class PartReplica(Replica):
    """A replica in parts: DTensors over any mesh (tensor, expert, native HSDP), or a stage of a pipeline.

    Each process saves and loads its own part.
    """

    is_sharded = True
    saves_parts = True

    def __init__(self, module: nn.Module, replicas: dist.ProcessGroup | Transport | DeviceMesh) -> None:
        parameters = list(module.parameters())
        if any(map(attached_to, parameters)):
            raise AttachError(
                "the model is attached already, so its gradients are averaged in every step; leave that out"
            )
        inner = _inner_ranks(meshes_of(module), replicas)
        if isinstance(replicas, DeviceMesh):
            replicas = replicas.get_group()
        if not isinstance(replicas, Transport):
            shared = sorted(set(dist.get_process_group_ranks(replicas)) & {*inner})
            if len(shared) != 1:
                raise AttachError(
                    f"the replicas given share the processes {shared} with this replica, {inner}, which hold "
                    "different parts of it; expected those that hold the same part, such as "
                    'mesh["replicate"]'
                )
        inside = None if len(inner) == 1 else ProcessGroupTransport(group_of(inner), parameters[0].device)
        super().__init__(replicas, inside)
        self._sharded_module = module if is_fsdp2(module) else None

    def show_shards(self) -> None:
        """As `Replica.show_shards`."""
        if self._sharded_module is not None:
            reshard(self._sharded_module)

    def whole(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what this process holds."""
        return dict(held)


def meshes_of(module: nn.Module) -> list[DeviceMesh]:
    """Return the meshes over which parameters of a module are laid out, each once."""
    found = [each.device_mesh for each in module.parameters() if hasattr(each, "device_mesh")]
    return list({str(mesh.mesh.tolist()): mesh for mesh in found}.values())


def lies_outside(replicas: object, meshes: list[DeviceMesh]) -> bool:
    """Return whether replicas are no dimension of the meshes over which the parts of a model lie."""
    if isinstance(replicas, Transport):
        return True
    if isinstance(replicas, DeviceMesh):
        ranks = replicas.mesh.flatten().tolist()
    else:
        ranks = dist.get_process_group_ranks(replicas) if isinstance(replicas, dist.ProcessGroup) else []
    own = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    return len(own.intersection(ranks)) == 1


def _inner_ranks(meshes: list[DeviceMesh], replicas: object) -> list[int]:
    """Return the processes that hold this replica together, as far as is known."""
    if isinstance(replicas, DeviceMesh):
        root = replicas._get_root_mesh() if hasattr(replicas, "_get_root_mesh") else replicas
        names, name = root.mesh_dim_names or (), (replicas.mesh_dim_names or ("",))[0]
        if replicas.ndim != 1:
            raise AttachError(
                f"expected one dimension of the mesh, that of the replicas, got {replicas.mesh_dim_names}; "
                'such as mesh["replicate"]'
            )
        if name in names:
            dim = names.index(name)
            coordinate = root.get_coordinate()
            assert coordinate is not None, "a process of the mesh has its place in it"
            return list(map(int, root.mesh.select(dim, coordinate[dim]).flatten().tolist()))
    if len(meshes) > 1:
        shown = " and ".join(str(mesh.mesh.tolist()) for mesh in meshes)
        raise AttachError(
            f"parameters lie on unlike meshes, {shown}, so it is not known which processes hold the replica; "
            'give replicas as a dimension of the mesh that all are parts of, such as mesh["replicate"]'
        )
    return list(map(int, meshes[0].mesh.flatten().tolist())) if meshes else [dist.get_rank()]
