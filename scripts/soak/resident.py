"""Resident memory of long runs, of all algorithms and adapters, at night: `scripts/soak/resident.py [steps]`.

A model of real size, in real processes. What a step leaves behind, be it a few bytes between large tensors,
lets the heap grow without end, which no count of live tensors shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import Pool
from thinwire import AllReduce, Cast, LocalSGD, PowerSGD, Quantize, TopK
from thinwire.adapters.gradient_list import GradientListAdapter
from thinwire.algorithms import Algorithm

WARM_STEPS = 50
MOST_MB = 32

Run = tuple[Callable[[], object], Any]
"""What makes a step, and what has its `stats()`."""


def layers(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [(64, width), (width, width), (width, 10)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    torch.autograd.backward(model(torch.randn(8, 64)).square().mean())
    optimizer.step()


def ddp(algorithm: Algorithm, width: int, *, machines: Any = False) -> Run:
    model = DistributedDataParallel(layers(width), bucket_cap_mb=width**2 / 1e6)
    sync = thinwire.attach(model, algorithm, machines=machines)
    return partial(trained, model, new_optimizer(model)), sync


def sharded(algorithm: Algorithm, width: int) -> Run:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(layers(width), mesh=mesh["shard"])
    sync = thinwire.attach(model, algorithm, replicas=mesh["replicate"])
    return partial(trained, model, new_optimizer(model)), sync


def tensors(algorithm: Algorithm, width: int) -> Run:
    adapter = GradientListAdapter(layers(width).parameters(), algorithm)
    return lambda: adapter.average([torch.randn_like(tensor) for tensor in adapter.parameters]), adapter.sync


def local(algorithm: Algorithm, width: int) -> Run:
    model = layers(width)
    # Never left: the averaging goes on as long as the steps do.
    averager = LocalSGD(model, optimizer := new_optimizer(model), every_steps=2, algorithm=algorithm)
    return partial(trained, model, optimizer), averager.__enter__()


CASES: dict[str, tuple[int, Callable[[int], Run]]] = {
    "4 bits": (2, partial(ddp, Quantize(bits=4))),
    "2 bits and a residual": (2, partial(ddp, Quantize(bits=2, error_feedback=True))),
    "few entries": (2, partial(ddp, TopK())),
    "low rank": (2, partial(ddp, PowerSGD(matrix_rank=4))),
    "bf16": (2, partial(ddp, Cast("bf16"))),
    "exact": (2, partial(ddp, AllReduce())),
    "a list of tensors": (2, partial(tensors, Quantize(bits=4))),
    "local SGD": (2, partial(local, Quantize(bits=4))),
    "machines": (4, partial(ddp, Quantize(bits=4), machines=[[0, 1], [2, 3]])),
    "FSDP2": (4, partial(sharded, Quantize(bits=4))),
}


def resident_mb() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


def grown_mb(case: str, steps: int, width: int) -> int:
    """Make steps; by how much resident memory has grown since the first 50. Run on each process of a pool."""
    world_size, new_run = CASES[case]
    assert dist.get_world_size() == world_size
    threads, (step, counted) = torch.get_num_threads(), new_run(width)
    torch.set_num_threads(1)  # with which compiled passes serve, as under torchrun
    try:
        for _ in range(WARM_STEPS):
            step()
        before = resident_mb()
        for _ in range(steps - WARM_STEPS):
            step()
        assert case == "exact" or counted.stats().compression_ratio > 1.5
        return resident_mb() - before
    finally:
        torch.set_num_threads(threads)


def main(steps: int = 5000) -> int:
    """Run all cases, each in processes of its own; 1 if one has grown too far."""
    failed = 0
    for case, (processes, _) in CASES.items():
        pool = Pool(processes)
        grown = max(pool.run(grown_mb, case, steps, 2000, timeout_seconds=10.0 * steps))
        pool.close()
        print(f"{case}: {grown} MB in {steps} steps", flush=True)
        failed |= grown > MOST_MB
    return failed


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
