"""torchft's DiLoCo on Gloo, with a lighthouse and a manager, as it wants them: one process a replica."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.optim import SGD, Optimizer

from in_lab import own_address
from thinwire.demo.gpt import GPT

# Of SGD with Nesterov momentum: ours is compared with the same.
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
TIMEOUT = timedelta(minutes=10)
_numbers = count()


def fragments(model: GPT, number: int) -> list[nn.Module]:
    """Return modules that have a model's parameters between them; blocks in turn."""
    if number == 1:
        return [model]
    parts = [nn.ModuleList(list(model.blocks)[index::number]) for index in range(number)]
    parts[0].extend([model.bytes, model.positions])
    parts[-1].extend([model.norm, model.head])
    return list(parts)


@contextmanager
def torchft_diloco(
    model: nn.Module,
    optimizer: Optimizer,
    fragments: Sequence[nn.Module],
    *,
    every_steps: int,
    delay_steps: int = 0,
    mix: float = 0.0,
) -> Iterator[Any]:
    """Train with torchft's DiLoCo inside the context, a fragment every so many steps. Collective.

    Each has its own lighthouse, on the first host: a quorum is of all who talk to one. A fragment is used
    some steps after it was sent, mixed with a share of the process's own parameters then.
    """
    os.environ.setdefault("RUST_LOG", "error")  # it logs every quorum
    torchft, local_sgd = import_module("torchft"), import_module("torchft.local_sgd")
    address = [""]
    lighthouse = None
    if dist.get_rank() == 0:
        lighthouse = import_module("torchft._torchft").LighthouseServer(
            bind="0.0.0.0:0", min_replicas=dist.get_world_size(), join_timeout_ms=60_000
        )
        port = lighthouse.address().rpartition(":")[2]
        address = [f"http://{os.environ['MASTER_ADDR']}:{port}"]
    dist.broadcast_object_list(address)
    store = TCPStore(own_address(), 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own_address(),
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"contender{next(_numbers)}_host{dist.get_rank()}",
        hostname=own_address(),
        init_sync=False,  # the models are equal
    )
    outers = [
        SGD(fragment.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        for fragment in fragments
    ]
    try:
        with local_sgd.DiLoCo(
            manager,
            list(fragments),
            optimizer,
            outers,
            sync_every=every_steps,
            use_bucketization=True,
            fragment_sync_delay=delay_steps,
            fragment_update_alpha=mix,
        ) as diloco:
            yield diloco
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()
