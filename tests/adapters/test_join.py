"""Uneven inputs: nothing hangs, nothing owed is lost, all processes end with the same model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import in_each_process
from thinwire import AllReduce, ConfigError, PowerSGD, hooks
from thinwire.comm import ProcessGroupTransport
from thinwire.sync.engine import Engine
from training import are_alike, ddp_of, gradient_of, new_model, pairs, refused, residual_of

POWER = PowerSGD(matrix_rank=2)

STATELESS = {"allreduce_hook": 1e-6, "fp16_compress_hook": 2e-3, "bf16_compress_hook": 2e-2}


def true_sum(num_batches: tuple[int, ...], divide_by_initial: bool) -> Tensor:
    """Sum over the run of the sums over processes, divided as asked; computed in one process."""
    module, total = new_model(dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for step in range(max(num_batches)):
        contributors = [rank for rank, batches in enumerate(num_batches) if step < batches]
        divisor = len(num_batches) if divide_by_initial else len(contributors)
        for process_rank in contributors:
            total = total + gradient_of(module, step, process_rank) / divisor
    return total


def total_in(
    context: AbstractContextManager[Any], gradient: Callable[[int], Tensor], batches: tuple[int, ...]
) -> Tensor:
    """Sum of the gradients of this process's batches."""
    total = torch.zeros((), dtype=torch.float64)
    with context:
        for step in range(batches[dist.get_rank()]):
            total = total + gradient(step)
    return total


def gap_of(total: Tensor, true: Tensor) -> float:
    return float((total - true).norm() / true.norm().clamp_min(1e-30))


@pytest.mark.parametrize("divide_by_initial", [True, False], ids=["by initial size", "by contributors"])
@pytest.mark.parametrize("num_batches", [(0, 5), (4, 2), (0, 0)], ids=str)
@in_each_process(2)
def test_results_plus_what_is_still_owed_are_the_true_sum(
    divide_by_initial: bool, num_batches: tuple[int, int]
) -> None:
    """The telescoping identity over the whole uneven run: a finished process pays on."""
    model, steps = ddp_of(), max(num_batches)
    sync = thinwire.attach(model, POWER)
    total = total_in(thinwire.join(sync, divide_by_initial), partial(gradient_of, model), num_batches)
    residual = residual_of(sync.state_dict(), model.module)
    assert sync.stats().steps == steps
    if num_batches[dist.get_rank()] == steps:  # it has seen all results
        assert gap_of(total + residual, true_sum(num_batches, divide_by_initial)) <= 1e-5
    if steps:
        assert sync.stats().compression_ratio > 1.4
        assert residual.any()


@pytest.mark.parametrize("is_torchs", [False, True], ids=["by contributors", "model.join by initial size"])
@in_each_process(2)
def test_facts_9_every_hook_divides_as_asked(is_torchs: bool) -> None:
    """FACTS 9: with any hook, torch's join ignores divide_by_initial_world_size=False."""
    num_batches, divide_by_initial = (1, 3), is_torchs
    true = true_sum(num_batches, divide_by_initial)
    for name in (*STATELESS, "powerSGD_hook", "batched_powerSGD_hook", "post_localSGD_hook"):
        model = ddp_of()
        state: Any = None if name in STATELESS else hooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
        if name == "post_localSGD_hook":
            state = hooks.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=100)
        model.register_comm_hook(state, getattr(hooks, name))
        context = model.join() if is_torchs else thinwire.join(model, divide_by_initial)
        total = total_in(context, partial(gradient_of, model), num_batches)
        if isinstance(state, hooks.PowerSGDState):
            assert state.stats().compression_ratio > 1.5
            total = total + residual_of(state.state_dict(), model.module)
        assert dist.get_rank() == 0 or gap_of(total, true) < STATELESS.get(name, 1e-5), name


@in_each_process(4)
def test_four_processes_end_with_the_same_model() -> None:
    for is_torchs in (True, False):
        model = ddp_of(find_unused_parameters=True, gradient_as_bucket_view=is_torchs)
        before = [p.detach().clone() for p in model.parameters()]
        sync = thinwire.attach(model, POWER)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with model.join() if is_torchs else thinwire.join(model, False):
            for step in range((0, 5, 2, 3)[dist.get_rank()]):
                gradient_of(model, step)
                optimizer.step()
        after = [p.detach() for p in model.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert sync.stats().compression_ratio > 1.5
        assert are_alike(after)


def average_of_50(model: DistributedDataParallel) -> float:
    """The averaged gradient of a pass in which this process's own is 50."""
    model.zero_grad()
    model(torch.full((1, 5), 50.0)).sum().backward()
    return float(model.module.weight.grad.mean())


@pytest.mark.parametrize("by_contributors", [True, False], ids=["by contributors", "by initial size"])
@in_each_process(2)
def test_without_a_hook_ddp_divides_as_asked(by_contributors: bool) -> None:
    """One batch on one process, three on the other; torch's own join goes on to divide by one."""
    model = DistributedDataParallel(nn.Linear(5, 5, bias=False))
    with thinwire.join(model, divide_by_initial_world_size=not by_contributors):
        averages = [average_of_50(model) for _ in range(3 if dist.get_rank() else 1)]
    averages.append(average_of_50(model))
    alone = 50.0 if by_contributors else 25.0
    assert averages == [50.0] + [alone] * (2 if dist.get_rank() else 0) + [50.0]


@pytest.mark.parametrize("name", ["allreduce_hook", "built in"])
@in_each_process(2)
def test_another_hook_that_cannot_divide_as_asked_is_refused(name: str) -> None:
    model = DistributedDataParallel(nn.Linear(5, 5, bias=False))
    if name == "built in":
        model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)  # type: ignore[no-untyped-call]
    else:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with (
        pytest.raises(thinwire.ConfigError) as raised,
        thinwire.join(model, divide_by_initial_world_size=False),
    ):
        raise AssertionError("the loop must not be entered")
    assert "register one of thinwire.hooks" in str(raised.value)
    with thinwire.join(model):
        averages = [average_of_50(model) for _ in range(3 if dist.get_rank() else 1)]
    assert averages[-1] == (25.0 if dist.get_rank() else 50.0)
    with thinwire.join(model, divide_by_initial_world_size=False, enable=False):
        pass


@in_each_process(2)
def test_afterwards_the_model_trains_on_as_before() -> None:
    """Torch leaves its join switched on after the context; ours ends."""
    model = ddp_of()
    thinwire.attach(model, AllReduce())
    before = list(model._forward_pre_hooks)
    with thinwire.join(model, divide_by_initial_world_size=False):
        assert list(model._forward_pre_hooks) != before
        for step in range(1 + dist.get_rank()):
            gradient_of(model, step)
    assert list(model._forward_pre_hooks) == before
    assert not model._join_config.enable
    both = [gradient_of(new_model(), 5, process_rank) for process_rank in range(2)]
    assert gap_of(gradient_of(model, 5), (both[0] + both[1]) / 2) < 1e-6


@in_each_process(2)
def test_what_cannot_be_joined_is_refused_at_once() -> None:
    model = ddp_of()
    model.module.add_module("norm", nn.SyncBatchNorm(24))  # DDP takes it at construction on GPUs only
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = thinwire.LocalSGD(model.module, optimizer, every_steps=2)
    loose = thinwire.GradientSync(Engine(AllReduce(), ProcessGroupTransport(), ()))
    norm = r"throw_on_early_termination=True"
    cases = (("got Linear", nn.Linear(2, 2)), ("not attached", loose), (norm, model), (norm, local))
    joined: Any
    for words, joined in cases:
        with pytest.raises(thinwire.ThinwireError, match=words), thinwire.join(joined):
            raise AssertionError("the loop must not be entered")
    with thinwire.join(model, throw_on_early_termination=True):
        pass


@in_each_process(4)
def test_of_a_subgroup_no_one_knows_the_contributors() -> None:
    """So the local steps of post-local SGD are means over the subgroup, as with torch's hook."""
    totals = []
    for divide_by_initial in (True, False):
        model = ddp_of()
        state = hooks.PostLocalSGDState(None, pairs(), start_localSGD_iter=0)
        model.register_comm_hook(state, hooks.post_localSGD_hook)
        joined = thinwire.join(model, divide_by_initial)
        totals.append(total_in(joined, partial(gradient_of, model), (1, 2, 3, 3)))
    assert totals[0].any()
    assert torch.equal(totals[0], totals[1])


@in_each_process(2)
def test_an_optimizer_that_sends_is_refused_and_torchs_join_takes_both() -> None:
    model = ddp_of()
    sync = thinwire.attach(model, POWER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import warns
        zero: Any = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    optimizer = zero(model.parameters(), torch.optim.SGD, lr=0.1)
    start = [p.detach().clone() for p in model.parameters()]
    with refused(ConfigError, "ZeroRedundancyOptimizer.step()", "Join([ddp_model"), thinwire.join(model):
        gradient_of(model, 0)
        optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), start, strict=True))
    with Join([model, optimizer]):
        for step in range(1 + 2 * dist.get_rank()):
            gradient_of(model, step)
            optimizer.step()
    assert are_alike(model.parameters())
    assert sync.stats().steps == 4
    assert sync.stats().compression_ratio > 1.5
