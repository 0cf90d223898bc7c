"""Training on a GPU ends where it ends on the CPU, by whatever way gradients or models are averaged.

Two or four Gloo processes share the GPU, so that something is averaged: NCCL refuses two processes on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from gpu.test_gpu import exact_products, gap, loss_of, needs_gpu, new_module
from processes import Spawn
from thinwire import AllReduce, Cast, DiLoCo, LocalSGD, PowerSGD, Quantize, Streaming, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.powersgd import Config, optimizer_step
from thinwire.powersgd import PowerSGD as Aggregator

STEPS = 8
RANK_2 = PowerSGD(matrix_rank=2)

Trained = tuple[Any, Iterable[Tensor]]
"""What has stats, and the parameters."""


def train(model: nn.Module, place: str, **optimizer_settings: float) -> None:
    settings = {"lr": 0.05, "momentum": 0.9, **optimizer_settings}
    train_with(torch.optim.SGD(model.parameters(), **settings), model, place)  # type: ignore[arg-type]


def train_with(optimizer: torch.optim.Optimizer, model: nn.Module, place: str) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, step, place, next(model.parameters()).dtype))
        optimizer.step()


def attached(model: nn.Module, algorithm: Algorithm, place: str, **settings: Any) -> Trained:
    model = DistributedDataParallel(model, bucket_cap_mb=0.02)
    sync = thinwire.attach(model, algorithm, **settings)
    train(model, place)
    return sync, model.parameters()


def of_two_shards(model: Any, algorithm: Algorithm, place: str) -> Trained:
    if place == "cuda":
        torch.cuda.set_device(0)
    mesh = init_device_mesh(place, (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (model[2], model[4], model):
        fully_shard(module, mesh=mesh["shard"])
    sync = thinwire.attach(model, algorithm, replicas=mesh["replicate"])
    train(model, place)
    return sync, [parameter.to_local() for parameter in model.parameters()]


def by_optimizer_step(model: nn.Module, algorithm: Algorithm, place: str) -> Trained:
    powersgd = Aggregator(model.parameters(), Config(rank=2, start_compressing_after_num_steps=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        torch.autograd.backward(loss_of(model, step, place))
        optimizer_step(optimizer, powersgd)
    return powersgd, model.parameters()


def averaged(
    model: nn.Module, algorithm: Algorithm, place: str, kind: type[LocalSGD] = LocalSGD, **settings: Any
) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with kind(model, optimizer, algorithm=algorithm, **settings) as local:
        train_with(optimizer, model, place)
    return local, model.parameters()


class Way(NamedTuple):
    """How processes train together, by which algorithms, and what these save at least."""

    run: Callable[..., Trained]
    processes: int
    least_ratio: float
    algorithms: Sequence[Algorithm]


IN_16_BITS = [
    *(AllReduce(), Cast("fp16"), Cast("bf16"), PowerSGD(matrix_rank=2, wire_dtype="bf16")),
    *(BatchedPowerSGD(), Quantize(bits=4), RANK_2),
]
ON_MACHINES = [AllReduce(), Quantize(bits=4), Quantize(bits=2, error_feedback=True), TopK(chunk=512), RANK_2]
WAYS = {
    "attached": Way(
        attached, 2, 1.2, [*IN_16_BITS, PowerSGD(matrix_rank=2, alternating=True, power_iterations=2)]
    ),
    "attached, in bf16": Way(attached, 2, 0, IN_16_BITS),
    "machines": Way(partial(attached, machines=[[0, 1], [2, 3]]), 4, 1.5, ON_MACHINES),
    "two shards": Way(of_two_shards, 4, 1.5, [AllReduce(), Quantize(bits=4), RANK_2]),
    "optimizer_step": Way(by_optimizer_step, 2, 2, [RANK_2]),
    "LocalSGD": Way(partial(averaged, every_steps=2), 2, 2, [RANK_2]),
    "LocalSGD of four": Way(partial(averaged, every_steps=2), 4, 8, [TopK(chunk=512)]),
    "DiLoCo in fragments": Way(
        partial(averaged, kind=DiLoCo, every_steps=4, streaming=Streaming(fragments=2, delay_steps=1)),
        processes=4,
        least_ratio=8,
        algorithms=[Quantize(bits=4)],
    ),
}
# All on a GPU; two on the CPU, so that the test itself is tried everywhere.
CASES = [
    *(
        pytest.param(name, algorithm, "cuda", marks=needs_gpu)
        for name, way in WAYS.items()
        for algorithm in way.algorithms
    ),
    *((name, WAYS[name].algorithms[-1], "cpu") for name in ("attached", "two shards")),
]


@pytest.mark.parametrize(("name", "algorithm", "device"), CASES, ids=str)
def test_it_ends_as_on_the_cpu(spawn: Spawn, name: str, algorithm: Algorithm, device: str) -> None:
    way = WAYS[name]
    results = spawn(way.processes, _trained, name, algorithm, device)
    assert len(results) == way.processes
    if "refused" in results:
        pytest.skip("GLOO HERE DOES NOT SCATTER TENSORS OF A GPU: FSDP2's shards were not tested on one")
    for difference, ratio, parameters in results:
        assert difference < (5e-2 if "bf16" in f"{name} {algorithm}" else 1e-3)
        assert isinstance(algorithm, AllReduce) or ratio > way.least_ratio
        assert name == "two shards" or all(map(torch.equal, parameters, results[0][2]))


def _trained(name: str, algorithm: Algorithm, device: str) -> tuple[float, float, list[Tensor]] | str:
    exact_products()
    if name == "two shards" and device == "cuda":
        try:
            dist.reduce_scatter_tensor(torch.empty(1, device=device), torch.ones(4, device=device))
        except RuntimeError:
            return "refused"
    dtype = torch.bfloat16 if name.endswith("in bf16") else torch.float32
    trained, ratios = {}, {}
    for place in sorted({"cpu", device}):  # one, where there is no other
        handle, parameters = WAYS[name].run(new_module(dtype).to(place), algorithm, place)
        ratios[place] = handle.stats().compression_ratio
        trained[place] = [parameter.detach().cpu() for parameter in parameters]
    return gap(trained[device], trained["cpu"]), ratios[device], trained[device]
