"""`thinwire.check_replicas`: whether all processes still hold the same model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.checks import shown
from thinwire.comm import ProcessGroupTransport, gather_stacked
from thinwire.errors import AgreementError, AttachError, ConfigError
from thinwire.tensors.layout import local_tensor

# Types as wide as the numbers of a tensor, to read their bits as whole numbers.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Widened to 64 bits, and with as many factors, some parameters are as much memory as 128 MiB.
WORDS_AT_ONCE = 1 << 23

# From one element's factor to the next one's, modulo 2⁶⁴: without a pattern, and even, so that factors are
# odd and no bit is lost to them.
STRIDE = -0x61C8864680B583EA


def check_replicas(model: nn.Module, replicas: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Raise on all processes unless all hold the same parameters, to the bit. Collective.

    No step checks this: the same messages make the same means if the arithmetic is the same. On different
    kinds of GPU, or with products that each process tunes for itself, it is not, and parameters drift apart
    in their last bits. There, ask every thousand steps or so.

    Args:
        model: Between two steps. For an FSDP2 model, this process's shards are compared.
        replicas: The processes that hold the same, None for all: for an FSDP2 model `mesh["replicate"]`.

    Cost: one read of the parameters, 16 bytes from each process, and a host synchronisation.

    Raises:
        AgreementError: Some processes hold different ones than process 0.
        AttachError: There is no process group, or the model is sharded and none was given.
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
        # One shard of one is the whole; `replicate` has DTensors too.
        placements = enumerate(getattr(parameter, "placements", ()))
        if any(one.is_shard() and parameter.device_mesh.size(dim) > 1 for dim, one in placements):
            remedy = 'pass replicas=mesh["replicate"]'
            raise AttachError(f"{name} is sharded, so processes hold different shards; {remedy}")
    tensors = [local_tensor(parameter) for parameter in model.parameters()]
    group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    transport = ProcessGroupTransport(group, tensors[0].device if tensors else None)
    first, *others = gather_stacked(fingerprint(tensors), transport).tolist()
    unlike = [rank for rank, other in enumerate(others, start=1) if other != first]
    if unlike:
        ranks = ", ".join(map(str, unlike[:8])) + (", …" if len(unlike) > 8 else "")
        raise AgreementError(
            f"the parameters of {len(unlike)} of {transport.size} processes (ranks {ranks}) are not those of "
            "process 0, expected the same bits; load the last checkpoint on all of them"
        )


def fingerprint(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return two whole numbers that differ, in all likelihood, if a bit or the order of elements does."""
    prints = torch.zeros(2, dtype=torch.int64)
    for tensor in tensors:
        flat = tensor.reshape(-1)
        numbers = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        words = numbers.view(BITS[numbers.element_size()])
        # Sums of whole numbers are the same in any order, and may wrap. Each element's place counts in both;
        # the squares see what cancels in the other.
        for chunk in torch.split(words, WORDS_AT_ONCE):
            wide = chunk.long()
            weighted = torch.arange(len(wide), device=wide.device).mul_(STRIDE).add_(1).mul_(wide)
            first = weighted.sum()
            prints = prints.to(wide.device) * 1_000_003 + torch.stack([first, weighted.mul_(wide).sum()])
    return prints
