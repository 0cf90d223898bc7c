"""Replicas in parts of any layout: what each process holds is averaged as of whole replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire
from experts import Mixture, divide
from processes import Spawn, in_each_process
from thinwire import Nesterov, PowerSGD, Streaming
from thinwire.errors import AttachError, StateError, StepError
from thinwire.local_sgd import DiLoCo, LocalSGD
from thinwire.tensors.layout import local_tensor
from training import are_alike, gathered

BATCH = 16
HOW = ("local", "stacked", "beside")  # experts are divided
IN_TENSORS = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def whole_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3), nn.Tanh()).double()


def new_mixture() -> Mixture:
    torch.manual_seed(5)
    return Mixture().double()


def batch(replica: int, step: int) -> Tensor:
    """What a replica learns from in a step, all its processes together."""
    draws = torch.Generator().manual_seed(100 * replica + step)
    return torch.randn(BATCH, 8, dtype=torch.float64, generator=draws)


def in_tensors(model: nn.Module, mesh: DeviceMesh) -> int:
    parallelize_module(model, mesh["tensor"], IN_TENSORS)
    return 0


def in_shards_of_replicas(model: nn.Module, mesh: DeviceMesh) -> int:
    fully_shard(model, mesh=mesh["inner", "shard"])
    return 2 * mesh.get_local_rank("inner") + mesh.get_local_rank("shard")


def in_shards_of_tensors(model: nn.Module, mesh: DeviceMesh) -> int:
    parallelize_module(model, mesh["tensor"], IN_TENSORS)
    fully_shard(model, mesh=mesh["shard"])
    return mesh.get_local_rank("shard")


def in_experts(model: nn.Module, mesh: DeviceMesh, how: str) -> int:
    assert isinstance(model, Mixture)
    inner = mesh["shard", "expert"] if how == "within" else mesh["expert"]
    divide(model, inner, how=how)
    return int(inner.mesh.flatten().tolist().index(dist.get_rank()))


LAYOUTS: dict[str, tuple[tuple[str, ...], int, Callable[[nn.Module, DeviceMesh], int]]] = {
    "tensor parallel": (("tensor",), 1, in_tensors),
    "HSDP": (("inner", "shard"), 4, in_shards_of_replicas),
    "FSDP2 and tensor parallel": (("shard", "tensor"), 2, in_shards_of_tensors),
    **{f"{how} experts": (("expert",), 2, partial(in_experts, how=how)) for how in HOW},
    "experts within shards": (("shard", "expert"), 4, partial(in_experts, how="within")),
}


def mesh_of(dims: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", (2,) * (1 + len(dims)), mesh_dim_names=("replicate", *dims))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, part: slice) -> None:
    for step in range(4):
        inputs = batch(replica, step)[part]
        loss = (model(inputs) - inputs[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_in_parts_are_averaged_as_whole_ones(spawn: Spawn, layout: str) -> None:
    streaming = Streaming(fragments=2 if layout == "tensor parallel" else 1)
    spawn(2 * 2 ** len(LAYOUTS[layout][0]), check_as_whole, layout, streaming)


def check_as_whole(layout: str, streaming: Streaming) -> None:
    dims, num_parts, lay_out = LAYOUTS[layout]
    mesh = mesh_of(dims)
    replica = mesh.get_local_rank("replicate")
    settings = {"every_steps": 2, "outer": Nesterov(lr=0.7, momentum=0.9), "streaming": streaming}
    new = new_mixture if "experts" in layout else whole_model
    reference, model = new(), new()
    start = [each.detach().clone() for each in reference.parameters()]
    optimizer = optimizer_of(reference)
    with LocalSGD(reference, optimizer, replicas=mesh["replicate"].get_group(), **settings):  # type: ignore[arg-type]
        train(reference, optimizer, replica, slice(None))
    part, optimizer = lay_out(model, mesh), optimizer_of(model)
    # A group says less than a mesh: who holds a replica is then seen from the model.
    replicas = mesh["replicate"].get_group() if "within" in layout else mesh["replicate"]
    local = LocalSGD(model, optimizer, replicas=replicas, **settings)  # type: ignore[arg-type]
    with local:
        train(model, optimizer, replica, slice(part * BATCH // num_parts, (part + 1) * BATCH // num_parts))
    for ours, its, before in zip(model.parameters(), reference.parameters(), start, strict=True):
        held = whole(ours)
        # Of local experts it is a part.
        assert (held - its[part * len(held) % len(its) :][: len(held)]).abs().max() < 1e-9
        assert (its - before).abs().max() > 1e-3
    assert local.stats().messages > 0
    if streaming == Streaming():  # each process has sent what it holds, and that alone
        assert local.stats().message_bytes == 2 * sum(local_tensor(it).nbytes for it in model.parameters())


@in_each_process(4)
def test_experts_of_one_place_become_equal_in_few_bits_and_the_router_everywhere() -> None:
    mesh, model = mesh_of(("expert",)), new_mixture()
    part, optimizer = in_experts(model, mesh, "beside"), optimizer_of(model)
    with DiLoCo(model, optimizer, every_steps=2, replicas=mesh["replicate"]) as local:
        train(model, optimizer, mesh.get_local_rank("replicate"), slice(8 * part, 8 * part + 8))
    assert local.stats().compression_ratio > 8
    experts = gathered(local_tensor(model.experts.weight))
    assert all(map(torch.equal, experts[:2], experts[2:]))
    assert not any(map(torch.equal, experts[0], experts[1]))
    assert are_alike([whole(model.router.weight)])


@in_each_process(4)
def test_stages_of_a_pipeline_are_averaged_and_stop_together() -> None:
    mesh = mesh_of(("stage",))
    for_logs = dist.new_group([0])  # by it torch would name a later group otherwise on rank 0 than on rank 1
    replica, stage = mesh.get_local_rank("replicate"), mesh.get_local_rank("stage")
    model = [nn.Linear(3, 2), nn.Linear(4, 4, bias=False)][stage]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with LocalSGD(model, optimizer, every_steps=1, replicas=mesh["replicate"]):
        start = model.weight.detach().clone()
        model.weight.grad = torch.full_like(model.weight, 1.0 + replica)
        optimizer.step()
        assert torch.allclose(model.weight, start - 1.5)
        before = model.weight.detach().clone()
        if dist.get_rank() == 3:
            model.weight.data.fill_(torch.nan)
        with pytest.raises(StepError, match="not finite"):
            optimizer.step()
        model.weight.data.copy_(before)
    if dist.get_rank() == 0:
        dist.destroy_process_group(for_logs)


@in_each_process(4)
def test_each_process_saves_its_part_and_goes_on_from_it() -> None:
    mesh, model = mesh_of(("tensor",)), whole_model()
    replica = mesh.get_local_rank("replicate")
    in_tensors(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def new_local() -> LocalSGD:
        outer = Nesterov(lr=0.7, momentum=0.9)
        return LocalSGD(model, optimizer, every_steps=3, outer=outer, replicas=mesh["replicate"])

    with new_local() as local:
        train(model, optimizer, replica, slice(None))
        state, held = local.state_dict(), copy.deepcopy(model.state_dict())
        train(model, optimizer, replica, slice(None))
    straight = [whole(parameter) for parameter in model.parameters()]
    model.load_state_dict(held)
    resumed = new_local()
    others = f"part {1 - mesh.get_local_rank('tensor')} of 2"  # of the same shapes
    with pytest.raises(StateError, match=others):
        resumed.load_state_dict({**state, "place": others})
    resumed.load_state_dict(state)
    with resumed:
        train(model, optimizer, replica, slice(None))
    assert all(map(torch.equal, straight, map(whole, model.parameters())))


@in_each_process(4)
def test_gradients_of_divided_experts_are_refused_and_models_recommended() -> None:
    mesh = mesh_of(("expert",))
    for how, named in ("stacked", "with DTensors (tensor or expert"), ("beside", "experts.weight is trained"):
        model = new_mixture()
        in_experts(model, mesh, how)
        with pytest.raises(AttachError) as refused:
            thinwire.attach(model, PowerSGD(matrix_rank=2), replicas=mesh["replicate"])
        assert named in str(refused.value)
        assert "by DiLoCo or LocalSGD, with replicas=" in str(refused.value)


@in_each_process(4)
def test_replicas_that_hold_other_parts_are_refused() -> None:
    mesh, model = mesh_of(("tensor",)), whole_model()
    in_tensors(model, mesh)
    with pytest.raises(AttachError, match="hold different parts of it"):
        LocalSGD(model, optimizer_of(model), every_steps=2, replicas=dist.group.WORLD)
