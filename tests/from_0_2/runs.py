"""Runs whose states Thinwire 0.2 has saved: the files beside this, and what 0.2 made of the next step.

`python tests/from_0_2/runs.py`, with the sources of 0.2.0 and these tests on PYTHONPATH, writes the files.
Each run either saves into its folder and goes on, or loads from there and goes on: both return the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import Nesterov, PowerSGD, Quantize, Streaming, TopK, checkpoint, elastic
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.hooks import PowerSGDState, powerSGD_hook
from thinwire.plan import ParameterSpec
from thinwire.powersgd import Config
from thinwire.powersgd import PowerSGD as EpfmlPowerSGD
from thinwire.simulation import Simulation

FILES = Path(__file__).parent / "files"
STEPS = 3  # before each state was saved

POWER = PowerSGD(matrix_rank=1, min_compression_ratio=1)
ALGORITHMS: dict[str, Algorithm] = {
    "powersgd": POWER,
    "alternating": PowerSGD(matrix_rank=1, min_compression_ratio=1, alternating=True),
    "batched": BatchedPowerSGD(matrix_rank=1),
    "quantize": Quantize(bits=2, block=16, error_feedback=True),
    "topk": TopK(density=1 / 16, chunk=64),
}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def new_model(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = numbers(*parameter.shape, seed=100 * seed + number)
    return model


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    torch.autograd.backward(model(numbers(4, 8, seed=10 * step + dist.get_rank())).square().mean())


def gradients(model: nn.Module) -> list[Tensor]:
    return [_whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


# Workers in this process: every algorithm that remembers, one process a machine or two, whole and local.


def simulated(algorithm: Algorithm, per_machine: int, is_local: bool, folder: Path, saves: bool) -> Any:
    specs = tuple(ParameterSpec.of(name, tensor) for name, tensor in new_model().named_parameters())
    simulation = Simulation(algorithm, [specs], num_workers=2 * per_machine, workers_per_machine=per_machine)
    for step in range(STEPS if saves else 0):
        simulation.step(_drawn(simulation, step))
    for sync in simulation.syncs if is_local else ():
        (checkpoint.save_local if saves else checkpoint.load_local)(sync, folder)
    if saves and not is_local:
        checkpoint.save(simulation.state_dicts()[0], folder / "state.pt")
    for sync in simulation.syncs if not saves and not is_local else ():
        sync.load_state_dict(checkpoint.load(folder / "state.pt"))
    after = _drawn(simulation, STEPS)
    assert simulation.step(after)
    return after[0]


def _drawn(simulation: Simulation, step: int) -> list[list[Tensor]]:
    numel = sum(spec.numel for bucket in simulation.buckets for spec in bucket)
    return [[numbers(numel, seed=10 * step + worker)] for worker in range(len(simulation.syncs))]


# Real processes.


def averaged(
    model: nn.Module, sync: Any, folder: Path, saves: bool, *, how: str, steps: range = range(STEPS)
) -> list[Tensor]:
    """Make some steps and save, or load; return the means of the next step."""
    for step in steps if saves else ():
        backward(model, step)
    file = folder / f"state.{how}"
    state = {"sync": sync.distributed_state() if how == "shards" else sync}
    if how == "local":
        (checkpoint.save_local if saves else checkpoint.load_local)(sync, folder)
    elif how in ("dcp", "shards"):
        (dcp_save if saves else dcp_load)(state, checkpoint_id=folder)
    elif saves:
        saved = sync.state_dict()
        if dist.get_rank() == 0:
            checkpoint.save(saved, file)
    else:
        sync.load_state_dict(checkpoint.load(file))
    dist.barrier()
    backward(model, STEPS)
    return gradients(model)


def with_ddp(how: str, folder: Path, saves: bool) -> list[Tensor]:
    model = DistributedDataParallel(new_model())
    return averaged(model, thinwire.attach(model, POWER), folder, saves, how=how)


def with_hook(folder: Path, saves: bool) -> list[Tensor]:
    model = DistributedDataParallel(new_model())
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)
    return averaged(model, state, folder, saves, how="pt")


def with_shards(how: str, folder: Path, saves: bool) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = new_model()
    fully_shard(model, mesh=mesh["shard"])
    return averaged(model, thinwire.attach(model, POWER, replicas=mesh), folder, saves, how=how)


def with_list_of_gradients(folder: Path, saves: bool) -> list[Tensor]:
    aggregator = EpfmlPowerSGD(
        new_model().parameters(), Config(rank=1, min_compression_rate=1, start_compressing_after_num_steps=0)
    )
    for step in range(STEPS if saves else 0):
        aggregator.aggregate(_drawn_list(step))
    if not saves:
        aggregator.load_state_dict(checkpoint.load(folder / "state.safetensors"))
    saved = aggregator.state_dict()
    if saves and dist.get_rank() == 0:
        checkpoint.save(saved, folder / "state.safetensors")
    dist.barrier()
    return aggregator.aggregate(_drawn_list(STEPS))


def _drawn_list(step: int) -> list[Tensor]:
    shapes = [p.shape for p in new_model().parameters()]
    seed = 100 * step + 10 * dist.get_rank()
    return [numbers(*shape, seed=seed + number) for number, shape in enumerate(shapes)]


# Averaged models, each process with its own weights beside the state.


def locally(settings: dict[str, Any], folder: Path, saves: bool) -> list[Tensor]:
    model = new_model()
    return _trained(model, partial(thinwire.LocalSGD, **settings), folder, saves, dist.get_rank(), "pt")


def with_diloco(settings: dict[str, Any], folder: Path, saves: bool) -> list[Tensor]:
    return _trained(
        new_model(), partial(thinwire.DiLoCo, **settings), folder, saves, dist.get_rank(), "safetensors"
    )


def as_elastic_member(kind: Any, settings: dict[str, Any], folder: Path, saves: bool) -> list[Tensor]:
    group = elastic.InProcessGroup(elastic.InProcessLighthouse())
    return _trained(new_model(), partial(kind, group=group, **settings), folder, saves, 0, "pt")


def _trained(
    model: nn.Module, kind: Callable[..., Any], folder: Path, saves: bool, rank: int, suffix: str
) -> list[Tensor]:
    file, weights = folder / f"state.{suffix}", folder / f"weights_{rank}.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not saves:
        model.load_state_dict(torch.load(weights, weights_only=True))
    averager = kind(model, optimizer)
    if not saves:
        averager.load_state_dict(checkpoint.load(file))
    with averager:
        for step in range(STEPS) if saves else ():
            _train_step(model, optimizer, averager, step, rank)
        if saves:
            saved = averager.state_dict()
            torch.save(model.state_dict(), weights)
            if rank == 0:
                checkpoint.save(saved, file)
        for step in range(STEPS, STEPS + 4):
            _train_step(model, optimizer, averager, step, rank)
        return [p.detach().clone() for p in model.parameters()]


def _train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, averager: Any, step: int, rank: int
) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(model(numbers(4, 8, seed=10 * step + rank)).square().mean())
    averager.step() if isinstance(averager, elastic.Steps) else optimizer.step()


Run = Callable[[Path, bool], Any]

FEW_BITS = ALGORITHMS["quantize"]
IN_FLIGHT = Streaming(fragments=1, delay_steps=1)

# By name: how many processes, and the run.
RUNS: dict[str, tuple[int, Run]] = {
    **{
        f"{name}-{kind}": (1, partial(simulated, algorithm, per_machine, is_local))
        for name, algorithm in ALGORITHMS.items()
        for kind, per_machine, is_local in (("whole", 1, False), ("local", 1, True))
    },
    "machines-whole": (1, partial(simulated, POWER, 2, False)),
    "machines-local": (1, partial(simulated, POWER, 2, True)),
    "machines-topk-local": (1, partial(simulated, ALGORITHMS["topk"], 2, True)),
    "ddp": (2, partial(with_ddp, "pt")),
    "ddp-local": (2, partial(with_ddp, "local")),
    "ddp-dcp": (2, partial(with_ddp, "dcp")),
    "hook": (2, with_hook),
    "list": (2, with_list_of_gradients),
    "fsdp": (4, partial(with_shards, "pt")),
    "fsdp-local": (4, partial(with_shards, "local")),
    "fsdp-dcp": (4, partial(with_shards, "dcp")),
    "fsdp-shards": (4, partial(with_shards, "shards")),
    "local-sgd": (2, partial(locally, {"every_steps": 2, "algorithm": POWER})),
    "diloco": (2, partial(with_diloco, {"every_steps": 2, "algorithm": FEW_BITS})),
    # Saved when the average of step 3 is on its way; it is applied after step 4.
    "diloco-in-flight": (
        2,
        partial(with_diloco, {"every_steps": 3, "algorithm": FEW_BITS, "streaming": IN_FLIGHT}),
    ),
    "elastic": (1, partial(as_elastic_member, elastic.LocalSGD, {"every_steps": 2, "algorithm": FEW_BITS})),
    "elastic-diloco": (
        1,
        partial(
            as_elastic_member,
            elastic.DiLoCo,
            {"every_steps": 2, "algorithm": FEW_BITS, "outer": Nesterov(lr=0.7, momentum=0.9)},
        ),
    ),
    "elastic-steps": (1, partial(as_elastic_member, elastic.Steps, {"algorithm": POWER})),
}


def go_on(name: str, folder: Path, saves: bool = False) -> Any:
    """Make a run on this process."""
    return RUNS[name][1](folder, saves)


def write_all(pools: Any) -> None:
    for name, (processes, _) in RUNS.items():
        (FILES / name).mkdir(parents=True, exist_ok=True)
        first, *_ = pools.of(processes).run(go_on, name, FILES / name, True)
        torch.save(first, FILES / name / "then.pt")


if __name__ == "__main__":
    from from_0_2 import runs  # noqa: PLW0406 - the processes of a pool import it by this name
    from pool import Pools

    made = Pools()
    runs.write_all(made)
    made.close()
