"""A sharded model whose steps are timed with each algorithm, on the processes of one replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.adapters.sharded.fsdp import FSDPAdapter, refuse_attached, specs_of
from thinwire.adapters.sharded.view import ShardedModel, local_of, pieces_of, replicas_of, reshard
from thinwire.algorithms import Algorithm
from thinwire.comm import Transport, gather_values
from thinwire.errors import ConfigError
from thinwire.probe import Probe, probe
from thinwire.sync import Engine, Settings


class ShardedSubject:
    """A `fully_shard` model whose steps are timed. FSDP2's own messages inside the replica are sent.

    It can't be copied, so its parameters, buffers and gradients are restored at the end.
    """

    def __init__(self, model: nn.Module, transport: Transport, entered: ExitStack) -> None:
        self._sharded, self._transport, self._group = ShardedModel(model), transport, shards_of(model)
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


def shards_of(model: nn.Module) -> Transport:
    """Return the transport between the processes of a replica."""
    sharded = ShardedModel(model)
    sharded.refuse_hsdp()
    if sharded.is_replicated:
        raise ConfigError(
            "advise got a model with replicate, which is whole on each process; pass the plain module"
        )
    return sharded.shards()


def probed_between_replicas(model: nn.Module, replicas: dist.ProcessGroup | DeviceMesh | None) -> Probe:
    """Probe the links between the first processes of replicas; return the probe on all of a replica."""
    if replicas is None:
        do = 'pass a probe of one process per replica (thinwire probe --save), or replicas=mesh["replicate"]'
        raise ConfigError(f"can't tell where a sharded model's other replicas are; {do}")
    shards, group = shards_of(model), replicas_of(ShardedModel(model), replicas)
    # Only one shard: several would share the link, at varying times.
    text = probe(group).to_json() if shards.rank == 0 else ""
    first, *_ = gather_values(text, shards, "advise: the probe")
    return Probe.from_json(first)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers and gradients at the end of this context."""
    tensors = [local_of(tensor) for tensor in (*model.parameters(), *model.buffers())]
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
