"""`torch.compile` of a whole training step, or of the optimizer's: what it calls of ours is not traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import in_each_process
from thinwire import Quantize, hooks
from thinwire.powersgd import AlgorithmAggregator, optimizer_step
from training import batch_of

Way: TypeAlias = tuple[nn.Module, Callable[[], object]]
"""What the loop calls: the model, and a function that makes the optimizer's step."""


@contextmanager
def attached(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Way]:
    model = DistributedDataParallel(module)
    sync = thinwire.attach(model, Quantize(bits=8))
    yield model, optimizer.step
    assert sync.stats().compression_ratio > 2


@contextmanager
def hooked(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Way]:
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, hooks.fp16_compress_hook)
    yield model, optimizer.step


@contextmanager
def with_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Way]:
    model = DistributedDataParallel(module)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=1)
    model.register_comm_hook(state, hooks.powerSGD_hook)
    yield model, optimizer.step
    assert state.stats().compression_ratio > 1


@contextmanager
def joined(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Way]:
    model = DistributedDataParallel(module)
    sync = thinwire.attach(model, Quantize(bits=8))
    with thinwire.join(model, divide_by_initial_world_size=False):
        yield model, optimizer.step
    assert sync.stats().compression_ratio > 2


@contextmanager
def overlapped(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Way]:
    model = DistributedDataParallel(module)
    sync = thinwire.overlap_forward(model, Quantize(bits=8), optimizer)
    yield torch.compiler.disable(model), optimizer.step  # type: ignore[no-untyped-call] # it refuses compiled models
    sync.flush()
    assert sync.stats().compression_ratio > 2


@contextmanager
def listed(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Way]:
    aggregator = AlgorithmAggregator(module.parameters(), Quantize(bits=8))
    yield module, lambda: optimizer_step(optimizer, aggregator)
    assert aggregator.sync.stats().compression_ratio > 2


@contextmanager
def sharded(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Way]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh["shard"])
    optimizer.param_groups[0]["params"] = list(module.parameters())
    sync = thinwire.attach(module, Quantize(bits=8), replicas=mesh["replicate"])
    yield module, optimizer.step
    assert sync.stats().compression_ratio > 2


@contextmanager
def averaged(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Way]:
    with thinwire.LocalSGD(module, optimizer, every_steps=2):
        yield module, optimizer.step


def trained(open_way: Any, compile_: Callable[[Any], Any] = lambda function: function) -> list[Tensor]:
    """Train for three steps, with all that the loop calls compiled by a function; return the parameters."""
    torch.manual_seed(7)
    module = nn.Linear(24, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with open_way(module, optimizer) as (model, step), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, where it imports its compiler
        forward = compile_(lambda batch: model(batch).square().mean())
        backward = compile_(lambda loss: loss.backward())
        make_step = compile_(step)
        for number in range(3):
            backward(forward(batch_of(number)))
            make_step()
            module.zero_grad()
    return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("way", [attached, hooked, with_state, joined, overlapped, listed, sharded, averaged])
@in_each_process(2)
def test_a_compiled_training_step_changes_nothing(way: Any) -> None:
    assert dist.get_world_size() == 2
    expected = trained(way)
    assert all(map(torch.equal, trained(way, partial(torch.compile, backend="eager")), expected))
