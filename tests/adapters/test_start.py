"""What is said at the start, by whichever adapter: what is on, and what does not fit it."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import in_each_process
from thinwire import GradientSync, PowerSGD, Quantize, hooks
from thinwire.algorithms import Algorithm
from thinwire.epfml import AlgorithmAggregator

POWER, BITS = PowerSGD(matrix_rank=2), Quantize(bits=4)
NUMEL = 64 * 96 + 96


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """Collect what is logged on this process, from a level on."""
    gc.collect()  # a scaler or an optimizer that an earlier model has left would be named
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thinwire")
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def ddp_model(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(64, 96), **options)


def make_pass(model: nn.Module) -> None:
    model(torch.ones(2, 64)).square().mean().backward()


@in_each_process(2)
def test_the_first_process_says_in_one_line_what_is_on() -> None:
    attached, hooked, listed, sharded = ddp_model(), ddp_model(), nn.Linear(64, 96), nn.Linear(64, 96)
    hooked.register_comm_hook(hooks.PowerSGDState(None, 2, start_powerSGD_iter=2), hooks.powerSGD_hook)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    starts: list[tuple[nn.Module, Callable[[], object]]] = [
        (attached, lambda: thinwire.attach(attached, POWER)),
        (hooked, lambda: None),
        (listed, lambda: AlgorithmAggregator(listed.parameters(), POWER)),
        (sharded, lambda: thinwire.attach(sharded, POWER)),
    ]
    if not hasattr(torch.cpu.Stream(), "record_event"):
        starts.pop()  # FSDP2 of this torch does not run on CPUs
    for model, start in starts:
        with logged() as lines:
            start()
            make_pass(model)
        assert len(lines) == (dist.get_rank() == 0), lines
        for line in lines:
            assert line.startswith("PowerSGD(matrix_rank=2")
            # Two factors of rank 2 and the bias, in fp32; gradients would be two bytes each.
            assert f"over 2 processes: a process sends {4 * (2 * (64 + 96) + 96) / 1e6:.3g} MB a step" in line
            assert f"bf16 sends {2 * NUMEL / 1e6:.3g}" in line


@in_each_process(2)
def test_one_process_is_told_that_nothing_is_averaged_and_how_to_start() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    own, model = groups[dist.get_rank()], nn.Linear(64, 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    starts: list[Callable[[], Any]] = [
        lambda: thinwire.attach(ddp_model(process_group=own), BITS),
        lambda: AlgorithmAggregator(model.parameters(), BITS, process_group=own),
        lambda: thinwire.LocalSGD(model, optimizer, every_steps=2, replicas=own).__enter__(),
    ]
    for start in starts:
        with logged(logging.WARNING) as lines:
            start()
        (line,) = lines
        assert line.startswith("nothing is averaged")
        assert "torchrun --nnodes 2" in line


@in_each_process(4)
def test_processes_of_one_host_name_are_told_to_say_machines() -> None:
    for hosts, shown in (
        ("aabb", "machines=[[0, 1], [2, 3]]"),
        ("abab", "machines=[[0, 2], [1, 3]]"),
        ("aaaa", ""),
        ("abcd", ""),
        ("aaab", ""),
    ):
        host = patch("socket.gethostname", lambda hosts=hosts: hosts[dist.get_rank()])
        with logged(logging.WARNING) as lines, host, patch.dict("os.environ"):
            thinwire.attach(ddp_model(), BITS)
        assert len(lines) == (dist.get_rank() == 0 and shown != "")
        assert all(shown in line for line in lines)


def attached(algorithm: Algorithm, **settings: Any) -> tuple[DistributedDataParallel, GradientSync]:
    model = ddp_model()
    return model, thinwire.attach(model, algorithm, **settings)


@in_each_process(2)
def test_a_live_scaler_that_was_not_given_is_named_once() -> None:
    for case in ("not given", "given", "disabled", "never used", "nothing is remembered"):
        scaler = GradScaler("cpu", init_scale=256.0, enabled=case != "disabled")
        algorithm = BITS if case == "nothing is remembered" else POWER
        model, _ = attached(algorithm, grad_scaler=scaler if case == "given" else None)
        with logged(logging.WARNING) as lines:
            for _ in range(2):
                loss = model(torch.ones(2, 64)).square().mean()
                (loss if case == "never used" else scaler.scale(loss)).backward()
        is_named = case == "not given" and dist.get_rank() == 0
        assert ["a GradScaler" in line for line in lines] == [True] * is_named, case


@in_each_process(2)
def test_unscaled_gradients_need_no_scaler() -> None:
    model, scaler = nn.Linear(64, 96), GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    aggregator = AlgorithmAggregator(model.parameters(), POWER)
    scaler.scale(model(torch.ones(2, 64)).square().mean()).backward()
    scaler.unscale_(optimizer)
    with logged(logging.WARNING) as lines:
        aggregator.aggregate([parameter.grad for parameter in model.parameters()])
    assert not lines


@in_each_process(2)
def test_low_rank_with_adam_is_told_once() -> None:
    for case in ("adamw", "another model's", "sgd", "few bits"):
        model, _ = attached(BITS if case == "few bits" else POWER)
        kind = torch.optim.SGD if case == "sgd" else torch.optim.AdamW
        trained = nn.Linear(2, 2) if case == "another model's" else model
        optimizer = kind(trained.parameters(), lr=1e-3)
        with logged(logging.WARNING) as lines:
            for _ in range(2):
                make_pass(model)
                optimizer.step()
        expected = case == "adamw" and dist.get_rank() == 0
        assert ["PowerSGD with AdamW" in line for line in lines] == [True] * expected, case


@in_each_process(2)
def test_ddp_around_a_model_that_is_averaged_is_told_of() -> None:
    model = ddp_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged(logging.WARNING) as lines, thinwire.LocalSGD(model.module, optimizer, every_steps=2):
        with model.no_sync():
            make_pass(model)
        assert not lines
        make_pass(copy.deepcopy(model))  # with a copy of the hook that looks
        make_pass(model)
        make_pass(model)
    assert [line[:21] for line in lines] == ["DDP averages the grad"] * (dist.get_rank() == 0)
    assert not model._forward_pre_hooks
