"""DiLoCo and local SGD of FSDP2 models: equal shards meet. Four processes, two replicas of two shards."""

from __future__ import annotations

import copy
import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from adapters.test_sharded import (
    flat,
    language,
    mesh_of,
    needs_replicate,
    replicated,
    runs_on_cpus,
    sharded,
    step_of,
    tokens_of,
)
from processes import in_each_process
from thinwire import DiLoCo, LocalSGD, PowerSGD, Quantize, Streaming, attach
from thinwire.comm import InProcessTransport
from training import error_of

pytestmark = runs_on_cpus


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)


def shards(seed: int = 5) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(language(seed), mesh_of()["shard"])
    return model, adamw(model)


def distance(one: Any, other: Any) -> float:
    """The largest difference of what two states hold of tensors, which must be of the same shapes."""
    if isinstance(one, Tensor):
        assert one.shape == other.shape
        return (one - other).abs().max().item() if one.numel() else 0.0
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((distance(value, other[key]) for key, value in one.items()), default=0.0)
    if isinstance(one, list | tuple):
        return max((distance(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return 0.0


@in_each_process(4)
def test_a_state_is_of_the_whole_model(tmp_path: Path) -> None:
    """It goes on to the bit on as many shards; it is the same on others, and without any."""
    mesh, few_bits = mesh_of(), Quantize(bits=4, error_feedback=True)
    settings: dict[str, Any] = {
        "every_steps": 3,
        "streaming": Streaming(fragments=2, delay_steps=1),
        "algorithm": few_bits,
    }
    model, optimizer = shards()
    with DiLoCo(model, optimizer, replicas=mesh, **settings) as local:
        for step in range(5):  # the first fragment's change, sent after step 5, is in flight
            step_of(model, optimizer, step, 1)
        file = io.BytesIO()
        torch.save(local.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        dcp_save({"local": local.distributed_state()}, checkpoint_id=tmp_path)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        momenta = copy.deepcopy(optimizer.state_dict())  # else both would step the same tensors
        again, its = shards(seed=6)
        again.load_state_dict(weights)
        its.load_state_dict(momenta)
        other = DiLoCo(again, its, replicas=mesh, **settings)
        dcp_load({"local": other.distributed_state()}, checkpoint_id=tmp_path)
        with other:
            loaded = other.state_dict()
            for step in range(5, 8):
                step_of(model, optimizer, step, 1)
                step_of(again, its, step, 1)
            difference = distance(flat(again), flat(model))
            states = distance(local.state_dict(), other.state_dict())
    moved, wide_mesh = distance(saved, loaded), mesh_of(1, 4)
    elsewhere: Any = sharded(language(), wide_mesh["shard"])
    on_four = DiLoCo(elsewhere, adamw(elsewhere), replicas=wide_mesh, **settings)
    on_four.load_state_dict(saved)
    with on_four:
        for key, there in on_four.state_dict().items():
            if key in ("last_average", "in_flight", "outer"):
                moved = max(moved, distance(saved[key], there))
        error = dict(on_four.sync.state_dict()["error"])
        moved = max(moved, distance(dict(saved["sync"]["error"]), error))
    plain = language()
    alone = DiLoCo(plain, adamw(plain), replicas=InProcessTransport.group(1)[0], **settings)
    alone.load_state_dict(saved)
    fewer = DiLoCo(again, its, replicas=mesh, every_steps=3)
    owed = max(residual.norm().item() for residual in error.values())
    assert difference == states == 0.0
    assert moved == 0.0
    assert owed > 0
    assert "fragments=2" in error_of(lambda: fewer.load_state_dict(saved))


@in_each_process(4)
def test_an_evaluation_between_averagings() -> None:
    """Of the average, and of the model itself: no gathered parameters stay behind that are used again."""
    model, optimizer = shards()
    tokens = tokens_of(0, 0)
    with LocalSGD(model, optimizer, every_steps=4, replicas=mesh_of()) as local, torch.no_grad():
        start = model(tokens)
        with torch.enable_grad():
            for step in range(3):
                step_of(model, optimizer, step, 1)
        own = model(tokens)
        with local.averaged():
            assert torch.equal(model(tokens), start)
            assert "averaged()" in error_of(optimizer.step)
        assert torch.equal(model(tokens), own)
        assert not torch.equal(own, start)


@in_each_process(4)
def test_a_shard_that_diverges_stops_all() -> None:
    """The parameters of one shard of one replica are infinite: nobody averages, and all say so."""
    model, optimizer = shards()
    with suppress(KeyboardInterrupt), LocalSGD(model, optimizer, every_steps=2, replicas=mesh_of()) as local:
        before = dict(local.state_dict()["last_average"])
        step_of(model, optimizer, 0, 1)
        if dist.get_rank() == 2:
            model.embed.weight.detach().to_local().fill_(torch.inf)
        for p in model.parameters():
            p.grad = None
        assert "are not finite" in error_of(optimizer.step)
        assert distance(before, local.state_dict()["last_average"]) == 0.0
        raise KeyboardInterrupt


@in_each_process(4)
def test_what_cant_be_averaged_is_told_what_to_do() -> None:
    mesh = mesh_of()
    model, optimizer = shards()

    def error(of: nn.Module, **settings: Any) -> str:
        return error_of(lambda: LocalSGD(of, adamw(of), every_steps=2, **settings))

    with LocalSGD(model, optimizer, every_steps=2, replicas=mesh) as local:
        joined = error_of(local.join_hook)
        inside = error_of(lambda: attach(model, PowerSGD(matrix_rank=2), replicas=mesh["replicate"]))
    old = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    in_columns = parallelize_module(nn.Linear(8, 8), mesh["shard"], ColwiseParallel())
    attached = sharded(language(), mesh["shard"])
    attach(attached, PowerSGD(matrix_rank=2), replicas=mesh)
    between, fast = mesh["replicate"], mesh["shard"].get_group()
    for words, said in (
        ("averaged twice over the same processes", inside),
        ("the model is already attached: its gradients are averaged", error(attached, replicas=between)),
        ('mesh["replicate"]', error(model)),
        ("a mesh of two dimensions", error(sharded(language(), mesh), replicas=mesh)),
        ("whose replicas are its fast groups", error(model, replicas=mesh, subgroup=fast)),
        ("(a DTensor), and LocalSGD has no replicas; pass replicas", error(in_columns)),
        ("shard it with torch.distributed.fsdp.fully_shard", error(old)),
        ("a sharded model can't be joined", joined),
    ):
        assert words in said


@needs_replicate
@in_each_process(4)
def test_a_replicated_model_is_refused() -> None:
    model = replicated(language())
    assert "pass the plain module, without" in error_of(lambda: LocalSGD(model, adamw(model), every_steps=2))
