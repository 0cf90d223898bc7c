"""A view of FSDP2 models: which parameters are reduced together, and which pass is a step's last."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from thinwire import torch_private
from thinwire.adapters.ddp_model import DIVIDED, plain_name
from thinwire.comm import InProcessTransport, ProcessGroupTransport, Transport
from thinwire.comm.process_group import checked_group, own_group
from thinwire.errors import AttachError
from thinwire.plan import ParameterSpec
from thinwire.tensors.layout import local_tensor, shard_of


def sharded_like(parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded like a parameter, with this process's part `local`."""
    if not isinstance(parameter, DTensor):
        return local
    # Without the check, which is collective over the shards: other shards may not call this.
    mesh, layout, shape = parameter.device_mesh, parameter.placements, parameter.shape
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=shape, stride=parameter.stride())


class Piece(NamedTuple):
    """This process's part of a parameter: some of its rows, or a slice along another dimension."""

    name: str  # in the user's own module
    parameter: torch.nn.Parameter  # FSDP's
    shape: tuple[int, ...]  # of the whole parameter
    dim: int | None  # along which it is cut; None if this process has all of it
    group: int  # FSDP's, whose parameters become ready together

    @property
    def spec(self) -> ParameterSpec:
        """This process's shard, for an engine."""
        return ParameterSpec.of(self.name, local_tensor(self.parameter))

    def cut(self, whole: torch.Tensor, shard: int, num_shards: int) -> torch.Tensor:
        """Return a shard of a tensor of the whole shape: a view, perhaps empty."""
        return whole if self.dim is None else shard_of(whole, self.dim, shard, num_shards)


class ShardedModel(torch_private.FSDPModel):
    """A sharded model as Thinwire sees it: its mesh, and the groups of its shards and replicas."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._averaging: list[tuple[Any, dist.ProcessGroup]] = []
        try:
            super().__init__(model)
            self._infos = [group.mesh_info for group in self.groups]
            dims = [(info.shard_mesh_dim, info.replicate_mesh_dim) for info in self._infos]
            # Read everything that is needed later once, so that anything missing is found now.
            _ = self.waits_for_more, self.is_in_pass, list(self.parameters)
            _ = list(map(self.has_calls_to_come, range(len(self.groups))))
        except AttributeError as error:
            raise AttachError(
                f"FSDP2 of torch {torch.__version__} differs from the versions that Thinwire supports "
                f"({error}); use torch 2.6 to 2.15"
            ) from error
        # The first with `replicate` alone; the second in native HSDP, `fully_shard` over replicas and shards.
        self.is_replicated = all(shards is None for shards, _ in dims)
        self.is_native = any(None not in both for both in dims)
        self.is_averaged_by_torch = self.is_replicated or self.is_native

    @property
    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters to which FSDP2 gives gradients; named from the first forward pass on."""
        # The model's own names don't help: in a forward pass it has whole parameters, but these are shards.
        shards = chain.from_iterable(map(self.parameters_of, range(len(self.groups))))
        return ((plain_name(name or "a parameter"), parameter) for name, parameter in shards)

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The group over which PyTorch averages, with `replicate` and native HSDP."""
        group: dist.ProcessGroup = self._infos[0].replicate_process_group
        return group

    def shards(self) -> Transport:
        """Return the transport between the shards of this replica."""
        if self.is_replicated:  # there is one shard, and no group for it
            return InProcessTransport.group(1)[0]
        device = torch.device(self.mesh().device_type)
        return ProcessGroupTransport(self._infos[0].shard_process_group, device)

    def mesh(self) -> DeviceMesh:
        """Return the mesh over which every parameter is sharded, or replicated, or both."""
        meshes: list[DeviceMesh] = [info.mesh for info in self._infos]
        if not meshes:
            raise AttachError(
                "fully_shard was applied to no parameter of this model, so there is nothing to average"
            )
        # Compare their ranks: each call may have been given its own DeviceMesh object.
        others = {str(mesh.mesh.tolist()) for mesh in meshes}
        if len(others) > 1 or meshes[0].ndim != 1 + self.is_native:
            raise AttachError(
                f"fully_shard was given different meshes, {' and '.join(sorted(others))}; pass all calls "
                f"the same one, of the shards, or of replicas and shards, {DIVIDED}"
            )
        return meshes[0]

    def refuse_hsdp(self) -> None:
        """Raise for native HSDP: its models can't be averaged, since PyTorch averages their gradients."""
        mesh = self.mesh()
        if self.is_native:
            names = mesh.mesh_dim_names or ("replicas", "shards")
            raise AttachError(
                f"fully_shard was given a mesh of two dimensions, {names}, so PyTorch averages gradients in "
                f'each step; pass it mesh["{names[-1]}"] alone, and replicas=mesh["{names[0]}"] to Thinwire'
            )

    def stop_averaging(self) -> None:
        """Make `replicate` or native HSDP average over this process alone, which changes nothing."""
        # All are read before any is replaced: groups may share one.
        self._averaging = [(info, info.replicate_process_group) for info in self._infos]
        for info in self._infos:
            info.replicate_process_group = own_group()

    def resume_averaging(self) -> None:
        """Undo `stop_averaging`."""
        for info, group in self._averaging:
            info.replicate_process_group = group
        self._averaging.clear()


def reshard(model: torch.nn.Module) -> None:
    """Reshard parameters: after a forward pass without a backward pass some may be whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def pieces_of(model: torch.nn.Module, sharded: ShardedModel) -> list[Piece]:
    """Reshard a model; return this process's piece of each parameter: frozen ones too, tied ones once."""
    reshard(model)
    groups = range(len(sharded.groups))
    group_of = {id(shard): group for group in groups for _, shard in sharded.parameters_of(group)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if local_tensor(tensor).is_meta:
            words = "is on the meta device and has no values yet; initialise or load the model, then attach"
            raise AttachError(f"{plain_name(name)} {words}")
    return [
        _piece_of(plain_name(name), parameter, group_of.get(id(parameter)), 1 + sharded.is_native)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or id(parameter) in group_of
    ]


def _piece_of(name: str, parameter: torch.nn.Parameter, group: int | None, mesh_dims: int) -> Piece:
    if group is None:
        remedy = "call fully_shard on the whole model after its parts, without ignored_params, or freeze it"
        if isinstance(parameter, DTensor):  # for example experts
            remedy = f"pass it to fully_shard instead of sharding it yourself, {DIVIDED}"
        raise AttachError(f"{name} is trained, but not sharded by fully_shard; {remedy}")
    if not isinstance(parameter, DTensor):
        words = "expected FSDP2's DTensor; attach before the first forward pass, or between steps"
        raise AttachError(f"{name} is a {type(parameter).__name__}, {words}")
    dims = [placement.dim for placement in parameter.placements if isinstance(placement, Shard)]
    if len(parameter.placements) != mesh_dims or len(dims) > 1:
        words = f"expected shards of fully_shard alone; train without tensor or expert parallelism, {DIVIDED}"
        raise AttachError(f"{name} is on a mesh of several dimensions {parameter.placements}, {words}")
    if parameter.is_complex():
        raise AttachError(f"{name} is complex, but a sharded model must have real parameters")
    return Piece(name, parameter, tuple(parameter.shape), dims[0] if dims else None, group)


def replicas_of(sharded: ShardedModel, replicas: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group of processes that hold the same shard of different replicas."""
    mesh, group = sharded.mesh(), replicas
    if isinstance(replicas, DeviceMesh):
        is_own = sharded.is_native and replicas.mesh.tolist() == mesh.mesh.tolist()
        group = sharded.replicate_group if is_own else _group_of(replicas, mesh)
    if group is None and not sharded.is_averaged_by_torch:
        name = (mesh.mesh_dim_names or ("shard",))[0]
        raise AttachError(
            f"can't tell which processes hold the same shards as {mesh.mesh.tolist()}; build a mesh of "
            f'("replicate", "{name}"), pass mesh["{name}"] to fully_shard and mesh["replicate"] to '
            "thinwire.attach or LocalSGD"
        )
    checked = checked_group(sharded.replicate_group if group is None else group, "replicas")
    ranks = dist.get_process_group_ranks(checked)
    if sharded.is_averaged_by_torch:
        known = dist.get_process_group_ranks(sharded.replicate_group)
        if ranks != known:
            words = f"the model is replicated over processes {known}, got replicas={ranks}"
            raise AttachError(
                f"{words}; leave replicas out, or pass the same group as to replicate(mesh=…) or fully_shard"
            )
        return sharded.replicate_group
    # A group across replicas shares only this process with the mesh.
    shared = sorted(set(ranks) & set(mesh.mesh.flatten().tolist()))
    if len(shared) != 1:
        raise AttachError(
            f"replicas is the group of processes {ranks}, of which {shared} hold different shards of one "
            'replica; pass those that hold the same shard, such as mesh["replicate"].get_group()'
        )
    return checked


def _group_of(mesh: DeviceMesh, mesh_of_model: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names or ()
    others = [name for name in names if name not in (mesh_of_model.mesh_dim_names or ())]
    if mesh.ndim != 2 or len(others) != 1:
        expected = 'the dimension of the replicas, such as mesh["replicate"]'
        raise AttachError(f"expected {expected}, got a mesh with dimensions {tuple(names or mesh.shape)}")
    return mesh.get_group(others[0])
