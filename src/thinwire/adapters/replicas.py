"""`thinwire.check_replicas`: check that all processes still hold the same model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp_model import names_in
from thinwire.checks import listed, shown
from thinwire.comm import ProcessGroupTransport, gather_numbers
from thinwire.errors import AgreementError, AttachError, ConfigError
from thinwire.sync.state import digest_of
from thinwire.tensors.layout import local_tensor


def check_replicas(model: nn.Module, replicas: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Raise on all processes unless all hold the same parameters, to the bit. Collective.

    No step checks this: the same messages give the same means if the arithmetic is the same. On different
    kinds of GPU, or if each process autotunes its own matrix products, it is not, and parameters drift apart
    in their last bits. Then call this every thousand steps or so.

    Args:
        model: The model, between two steps. For an FSDP2 model, this process's shards are compared; for a DDP
            model, what it does not ignore.
        replicas: The processes that hold the same parameters; None for all. For FSDP2: `mesh["replicate"]`.

    Cost: a checksum of the parameters on the CPU (0.3 s a GB), to which a GPU copies them one by one; 8 bytes
    from each process; and a host synchronisation.

    Raises:
        AgreementError: Some processes hold different parameters than process 0.
        AttachError: There is no process group, or the model is sharded and `replicas` was not given.
        CommunicationError: The collective failed.
        ConfigError: `model` is no module.

    Examples:
        >>> for step, batch in enumerate(loader):  # doctest: +SKIP
        ...     train(batch)
        ...     if step % 1000 == 0:
        ...         thinwire.check_replicas(model)
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected the model, a torch.nn.Module, got {shown(model)}")
    parameters: Iterable[tuple[str, Any]] = model.named_parameters()
    for name, parameter in parameters if replicas is None else ():
        # A shard over one process is the whole parameter; `replicate` has DTensors too.
        placements = enumerate(getattr(parameter, "placements", ()))
        if any(one.is_shard() and parameter.device_mesh.size(dim) > 1 for dim, one in placements):
            remedy = 'pass replicas=mesh["replicate"]'
            raise AttachError(f"{name} is sharded, so processes hold different shards; {remedy}")
    compared = names_in(model) if isinstance(model, DistributedDataParallel) else model.parameters()
    # A parameter of a subclass, such as a quantized weight, as a plain tensor.
    tensors = [local_tensor(parameter).as_subclass(torch.Tensor) for parameter in compared]
    group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    transport = ProcessGroupTransport(group, tensors[0].device if tensors else None)
    first, *others = gather_numbers([digest_of(tensors)], transport, "check_replicas()")
    unlike = [rank for rank, other in enumerate(others, start=1) if other != first]
    if unlike:
        raise AgreementError(
            f"parameters of {len(unlike)} of {transport.size} processes (ranks {listed(unlike)}) differ from "
            "process 0's, expected equal bits; load the last checkpoint on all of them"
        )
