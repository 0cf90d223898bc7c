"""A sharded model whose steps are timed with each algorithm: on the processes that hold one replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.advice.lines import SHARDING
from thinwire.advice.replicated import BASELINE, priced
from thinwire.advice.result import Prediction
from thinwire.algorithms.registry import Variant
from thinwire.channel import InProcessTransport, ProcessGroupTransport, Transport, gather_bytes
from thinwire.errors import ConfigError
from thinwire.fronts.sharded.front import ShardedFront, refuse_attached, specs_of
from thinwire.fronts.sharded.model import ShardedModel, local_of, pieces_of, replicas_of, reshard
from thinwire.probe import Probe
from thinwire.probe import probe as measure_network
from thinwire.sync import Engine, Settings

# It sends what `Cast("bf16")` sends, at the same moments, and needs no Thinwire.
NATIVE = "native HSDP in bf16"


class Sharded:
    """A model of `fully_shard`, whose replicas' messages go to a stopwatch; see `Subject`.

    FSDP2's own messages are sent, between the processes of the replica. A sharded model can't be copied, so
    parameters, buffers and gradients are put back when it is left.

    Args:
        model: Of which `fully_shard` holds all trained parameters.
        transport: Takes all messages between replicas.
        entered: Takes the hooks off again.

    Raises:
        AttachError: It is not sharded as `attach` needs it, or attached already.
        ConfigError: `replicate` holds it.
    """

    baseline = NATIVE

    def __init__(self, model: nn.Module, transport: Transport, entered: ExitStack) -> None:
        sharded = ShardedModel(model)
        shards, pieces = shards_of(model), pieces_of(model, sharded)
        refuse_attached(pieces, "ask for advice before it is attached")
        entered.enter_context(_put_back(model))
        together = shards if shards.size > 1 else None
        self.model = self.module = model
        self.shards: int | None = shards.size
        variants: dict[str, Variant] = {}

        def front_for(code: str) -> ShardedFront:
            algorithm = variants[code].algorithm
            engine = Engine(algorithm, transport, specs_of(pieces), Settings(together=together))
            return ShardedFront(engine, shards, sharded, pieces)

        for code, variant in priced().items():
            named = replace(variant, code=NATIVE) if code == BASELINE else variant
            variants[named.code] = named
        self.variants: Mapping[str, Variant] = variants
        self._front_for = front_for
        self._front: ShardedFront | None = None
        for piece in pieces:
            if piece.parameter.requires_grad:
                parameter = piece.parameter
                hook = parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
                entered.callback(hook.remove)

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._front is not None:
            self._front.arrived(parameter)

    @contextmanager
    def turn_of(self, name: str | None) -> Iterator[Engine | None]:
        """As `Subject.turn_of`."""
        self._front = None if name is None else self._front_for(name)
        try:
            yield None if self._front is None else self._front.engine
        finally:
            self._front = None

    def line(self, prediction: Prediction) -> str:
        """As `Subject.line`."""
        if prediction.name == NATIVE:
            return (
                "from torch.distributed.fsdp import MixedPrecisionPolicy\n"
                "fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
            )
        if prediction.averages_less_often:
            return f'{SHARDING}{prediction.code.removesuffix("):")}, mesh=mesh["replicate"]):'
        return f'{SHARDING}thinwire.attach(model, {prediction.code}, replicas=mesh["replicate"])'


def shards_of(model: nn.Module) -> Transport:
    """Return what joins the processes of a replica.

    Args:
        model: Of `fully_shard`.

    Raises:
        AttachError: PyTorch itself averages over replicas, or parts of the model have other meshes.
        ConfigError: `replicate` holds it.
    """
    sharded = ShardedModel(model)
    mesh = sharded.mesh()
    if sharded.is_replicated:
        raise ConfigError(
            "advise got a model of replicate, which is whole on each process; pass the plain module, as it "
            "is before replicate"
        )
    if mesh.size() == 1:
        return InProcessTransport.group(1)[0]
    return ProcessGroupTransport(mesh.get_group(), torch.device(mesh.device_type))


def probed_between_replicas(model: nn.Module, replicas: dist.ProcessGroup | DeviceMesh | None) -> Probe:
    """Probe the links between replicas, by the first process of each; the same on all of a replica.

    Args:
        model: Of `fully_shard`.
        replicas: As of `attach`.

    Raises:
        ConfigError: It is not known where the other replicas are.
        AttachError: The mesh is not of equal shards.
    """
    if replicas is None:
        raise ConfigError(
            "a sharded model does not tell where its other replicas are: pass a probe of one process per "
            'replica (thinwire probe --save), or replicas=mesh["replicate"] to probe now'
        )
    shards, group = shards_of(model), replicas_of(ShardedModel(model), replicas)
    # One shard alone: all at once they would share the link, each at moments of its own.
    own = measure_network(group).to_json() if shards.rank == 0 else ""
    first, *_ = gather_bytes(own.encode(), shards, "advise: the probe")
    return Probe.from_json(first.decode())


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Leave parameters, buffers and gradients as they are now."""
    tensors = [local_of(each) for each in (*model.parameters(), *model.buffers())]
    held = [each.clone() for each in tensors]
    gradients = [(each, each.grad) for each in model.parameters()]
    for each, _ in gradients:
        each.grad = None
    try:
        yield
    finally:
        reshard(model)
        for tensor, before in zip(tensors, held, strict=True):
            tensor.copy_(before)
        for each, gradient in gradients:
            each.grad = gradient
