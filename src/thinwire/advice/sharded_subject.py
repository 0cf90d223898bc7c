"""A sharded model whose steps are timed with each algorithm, on the processes of one replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.adapters.sharded.fsdp import FSDPAdapter, refuse_attached, specs_of
from thinwire.adapters.sharded.view import ShardedModel, pieces_of, replicas_of, reshard
from thinwire.algorithms import Algorithm
from thinwire.comm import Transport, gather_values
from thinwire.errors import ConfigError
from thinwire.probe import Probe, probe
from thinwire.sync import Engine, Settings
from thinwire.tensors.layout import local_tensor


class ShardedSubject:
    """A `fully_shard` model whose steps are timed. FSDP2's own messages inside the replica are sent.

    It can't be copied, so its parameters, buffers and gradients are restored at the end.
    """

    def __init__(self, model: nn.Module, transport: Transport, entered: ExitStack) -> None:
        self._sharded, self._transport = view_of(model), transport
        self._group = self._sharded.shards()
        self._pieces = pieces_of(model, self._sharded)
        refuse_attached(self._pieces, "call advise before you attach")
        entered.enter_context(_put_back(model))
        self.model, self.shards = model, self._group.size

    @contextmanager
    def averaging_with(self, algorithm: Algorithm | None) -> Iterator[Engine | None]:
        if algorithm is None:
            yield None
            return
        settings = Settings(health_group=self._group)
        engine = Engine(algorithm, self._transport, specs_of(self._pieces), settings)
        adapter = FSDPAdapter(engine, self._group, self._sharded, self._pieces)
        adapter.register(self.model)
        try:
            yield engine
        finally:
            adapter.detach()


def view_of(model: nn.Module) -> ShardedModel:
    """Return the view of a sharded model; raise if it is not one whose replicas Thinwire would average."""
    sharded = ShardedModel(model)
    sharded.refuse_hsdp()
    if sharded.is_replicated:
        raise ConfigError(
            "advise got a model with replicate, which is whole on each process; pass the plain module"
        )
    return sharded


def probed_between_replicas(model: nn.Module, replicas: dist.ProcessGroup | DeviceMesh | None) -> Probe:
    """Probe the links between the first processes of replicas; return the probe on all of a replica."""
    if replicas is None:
        do = 'pass a probe of one process per replica (thinwire probe --save), or replicas=mesh["replicate"]'
        raise ConfigError(f"can't tell where a sharded model's other replicas are; {do}")
    sharded = view_of(model)
    shards, group = sharded.shards(), replicas_of(sharded, replicas)
    # Only one shard: several would share the link, at varying times.
    text = probe(group).to_json() if shards.rank == 0 else ""
    first, *_ = gather_values(text, shards, "advise: the probe")
    return Probe.from_json(first)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers and gradients at the end of this context."""
    tensors = [local_tensor(tensor) for tensor in (*model.parameters(), *model.buffers())]
    held = [tensor.clone() for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        reshard(model)
        for tensor, before in zip(tensors, held, strict=True):
            tensor.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
