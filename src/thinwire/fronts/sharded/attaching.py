"""Attaching an FSDP2 model: what is refused, which processes meet, and how replicas become equal."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.algorithms import Algorithm
from thinwire.channel import InProcessTransport, ProcessGroupTransport, Transport, agree, copy_from
from thinwire.channel.agreement import alike_on_all_shards
from thinwire.errors import AttachError
from thinwire.fronts.averaged_twice import refuse_averaged_twice
from thinwire.fronts.ddp_model import plain_name
from thinwire.fronts.sharded.front import ShardedFront, refuse_attached, specs_of
from thinwire.fronts.sharded.model import Piece, ShardedModel, local_of, pieces_of, replicas_of
from thinwire.fronts.sharded.state import ShardedSync
from thinwire.sync import Engine, GradientSync, Settings


def attach_sharded(
    model: torch.nn.Module,
    algorithm: Algorithm,
    replicas: dist.ProcessGroup | DeviceMesh | None,
    settings: Settings,
) -> GradientSync:
    """Do what `thinwire.attach` does, with an FSDP2 model."""
    sharded = ShardedModel(model)
    group = replicas_of(sharded, replicas)
    pieces = pieces_of(model, sharded)
    refuse_attached(pieces, "switch its algorithm with sync.use(…), where sync is what attach returned")
    trained = [piece for piece in pieces if piece.parameter.requires_grad]
    if not trained:
        raise AttachError("no parameter of the model is trained, so there is nothing to average")
    device = local_of(trained[0].parameter).device
    transport = ProcessGroupTransport(group, device)
    refuse_averaged_twice((piece.parameter for piece in trained), transport, AttachError)
    if device.type == "cpu" and ProcessGroupTransport(group).control_device.type != "cpu":
        raise AttachError(
            "gradients are on the CPU (CPUOffloadPolicy), which the replicas' group can't send from; "
            'call init_process_group("cpu:gloo,cuda:nccl")'
        )
    # Where a replica is one shard there is nobody to ask, and no group of such a kind.
    shards: Transport = InProcessTransport.group(1)[0]
    if not sharded.is_replicated:
        shards = ProcessGroupTransport(sharded.shard_group, torch.device(sharded.mesh().device_type))
    # A step is committed on all shards or on none, so they ask each other.
    together = shards if shards.size > 1 else None
    settings = replace(settings, together=together)
    engine = Engine(algorithm, transport, specs_of(pieces), settings)
    # Buffers as well: replicas that are copied start equal in all that the model holds.
    tensors = {plain_name(name): each for name, each in [*model.named_parameters(), *model.named_buffers()]}
    described = {**_described(shards, tensors, pieces), "algorithm": repr(algorithm)}
    alike_on_all_shards(
        shards,
        "attach()",
        lambda: {"replica": f"{transport.rank} of {transport.size}", "algorithm": repr(algorithm)},
        lambda: agree(transport, described, "attach()"),
    )
    # Only when nothing is refused any more: from here on PyTorch averages nothing itself.
    if sharded.is_averaged_by_torch:
        sharded.stop_averaging()
    # Behind all that is compared: replicas of unlike shapes would wait for each other in here.
    copy_from(transport.rank == 0, map(local_of, tensors.values()), transport)
    front = ShardedFront(engine, shards, sharded, pieces)
    # Last: hooks of an attach that was refused would stay on the model.
    front.register(model)
    own = {piece.name: piece for piece in pieces if piece.parameter.requires_grad}
    return ShardedSync(engine, shards, own, front.forget_pass, front.detach)


def _described(shards: Transport, tensors: dict[str, torch.Tensor], pieces: list[Piece]) -> dict[str, str]:
    """Return what must be the same on all replicas, by subject."""
    described = {"shard": f"{shards.rank} of {shards.size}"}
    cut = {piece.name: piece.dim for piece in pieces}
    trained = {piece.name for piece in pieces if piece.parameter.requires_grad}
    # What one fully_shard holds is a bucket: replicas with unlike ones would send unlike messages. Backwards,
    # so that the first name of each stays.
    first_of = {piece.bucket: piece.name for piece in reversed(pieces)}
    held_with = {piece.name: f", held with {first_of[piece.bucket]}" for piece in pieces}
    for name, tensor in tensors.items():
        local = local_of(tensor)
        described[name] = (
            f"of shape {tuple(tensor.shape)} ({tuple(local.shape)} here, cut along {cut.get(name)}), "
            f"{local.dtype}{', trained' if name in trained else ''}{held_with.get(name, '')}"
        )
    return described
