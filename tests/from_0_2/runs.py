"""Runs that go on from states that Thinwire 0.2 has saved after three steps: the files beside this."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import Nesterov, PowerSGD, Quantize, Streaming, TopK, checkpoint, elastic
from thinwire.algorithms import Algorithm, BatchedPowerSGD, quantize
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


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


# Workers in this process: every algorithm that remembers, one process a machine or two, whole and local.


def simulated(algorithm: Algorithm, per_machine: int, is_local: bool, folder: Path) -> Any:
    specs = tuple(ParameterSpec.of(name, tensor) for name, tensor in new_model().named_parameters())
    simulation = Simulation(algorithm, [specs], num_workers=2 * per_machine, workers_per_machine=per_machine)
    for sync in simulation.syncs:
        if is_local:
            checkpoint.load_local(sync, folder)
        else:
            sync.load_state_dict(checkpoint.load(folder / "state.pt"))
    after = [
        [numbers(sum(spec.numel for spec in specs), seed=30 + worker)] for worker in range(2 * per_machine)
    ]
    assert simulation.step(after)
    return after[0]


# Real processes.


def averaged(model: nn.Module, sync: Any, folder: Path, *, how: str) -> list[Tensor]:
    """Load, and return the means of the next step."""
    if how == "local":
        checkpoint.load_local(sync, folder)
    elif how in ("dcp", "shards"):
        dcp_load({"sync": sync.distributed_state() if how == "shards" else sync}, checkpoint_id=folder)
    else:
        sync.load_state_dict(checkpoint.load(folder / f"state.{how}"))
    model.zero_grad()
    torch.autograd.backward(model(numbers(4, 8, seed=30 + dist.get_rank())).square().mean())
    return [_whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


def with_ddp(how: str, folder: Path) -> list[Tensor]:
    model = DistributedDataParallel(new_model())
    return averaged(model, thinwire.attach(model, POWER), folder, how=how)


def with_hook(folder: Path) -> list[Tensor]:
    model = DistributedDataParallel(new_model())
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    state.load_state_dict(checkpoint.load(FILES / "ddp-local" / f"thinwire_{dist.get_rank()}.pt"))
    assert state.iter == 3
    model.register_comm_hook(state, powerSGD_hook)
    return averaged(model, state, folder, how="pt")


def with_shards(how: str, folder: Path) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = new_model()
    fully_shard(model, mesh=mesh["shard"])
    return averaged(model, thinwire.attach(model, POWER, replicas=mesh), folder, how=how)


def with_list_of_gradients(folder: Path) -> list[Tensor]:
    aggregator = EpfmlPowerSGD(
        new_model().parameters(), Config(rank=1, min_compression_rate=1, start_compressing_after_num_steps=0)
    )
    aggregator.load_state_dict(checkpoint.load(folder / "state.safetensors"))
    seeds = enumerate(new_model().parameters(), 100 * STEPS + 10 * dist.get_rank())
    return aggregator.aggregate([numbers(*parameter.shape, seed=seed) for seed, parameter in seeds])


# Averaged models, each process with its own weights beside the state.


def locally(settings: dict[str, Any], folder: Path) -> list[Tensor]:
    model = new_model()
    return _trained(model, partial(thinwire.LocalSGD, **settings), folder, dist.get_rank(), "pt")


def with_diloco(settings: dict[str, Any], folder: Path) -> list[Tensor]:
    return _trained(new_model(), partial(thinwire.DiLoCo, **settings), folder, dist.get_rank(), "safetensors")


def as_elastic_member(kind: Any, settings: dict[str, Any], folder: Path) -> list[Tensor]:
    group = elastic.InProcessGroup(elastic.InProcessLighthouse())
    return _trained(new_model(), partial(kind, group=group, **settings), folder, 0, "pt")


def _trained(
    model: nn.Module, kind: Callable[..., Any], folder: Path, rank: int, suffix: str
) -> list[Tensor]:
    model.load_state_dict(torch.load(folder / f"weights_{rank}.pt", weights_only=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = kind(model, optimizer)
    averager.load_state_dict(checkpoint.load(folder / f"state.{suffix}"))
    with averager:
        for step in range(STEPS, STEPS + 4):
            optimizer.zero_grad()
            torch.autograd.backward(model(numbers(4, 8, seed=10 * step + rank)).square().mean())
            averager.step() if isinstance(averager, elastic.Steps) else optimizer.step()
        return [p.detach().clone() for p in model.parameters()]


Run = Callable[[Path], Any]

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


def go_on(name: str, folder: Path) -> Any:
    """Make a run on this process."""
    quantize.PAIR = 0  # 0.2 sent a coded mean between two members, too
    return RUNS[name][1](folder)
