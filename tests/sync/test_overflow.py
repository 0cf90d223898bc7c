"""Loss scaling: overflows leave no trace, and no change of scale changes a result."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import thinwire
from processes import in_each_process
from sync.test_nonfinite import loss_of
from thinwire import ConfigError, PowerSGD, hooks
from thinwire import powersgd as epfl
from thinwire.sync.settings import loss_scale_of
from thinwire.sync.stats import Stats
from training import ddp_of, flat, new_model

POWER = PowerSGD(matrix_rank=2)
STEPS = 10
HUGE = 3e38  # overflows in fp32 once it is scaled


def overflows(processes: int, seed: int = 3) -> dict[int, int]:
    """Before which steps one more batch comes, that overflows, and on which process."""
    draw = random.Random(seed)
    return {step: draw.randrange(processes) for step in sorted(draw.sample(range(STEPS), 5))}


# A model, what averages, and what makes a step of a loss.
Averageable = tuple[nn.Module, Any, Callable[[Tensor], None]]


def by_attach(scaler: GradScaler, *, host_check: bool = True) -> Averageable:
    ddp_model = ddp_of()
    sync = thinwire.attach(ddp_model, POWER, grad_scaler=scaler, host_check=host_check)
    return ddp_model, sync, scaled_step(ddp_model, scaler)


def by_hook_told_the_scale(scaler: GradScaler) -> Averageable:
    ddp_model = ddp_of()
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=0, grad_scaler=scaler.get_scale)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    return ddp_model, state, scaled_step(ddp_model, scaler)


def scaled_step(model: nn.Module, scaler: GradScaler) -> Callable[[Tensor], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(loss: Tensor) -> None:
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_optimizer_step(scaler: GradScaler) -> Averageable:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = epfl.Config(rank=2, start_compressing_after_num_steps=0)
    aggregator = epfl.PowerSGD(model.parameters(), config, grad_scaler=scaler)

    def step(loss: Tensor) -> None:
        torch.autograd.backward(scaler.scale(loss))
        epfl.optimizer_step(optimizer, aggregator)
        scaler.update()

    return model, aggregator, step


@pytest.mark.parametrize(
    "adapter", [by_attach, partial(by_attach, host_check=False), by_hook_told_the_scale, by_optimizer_step]
)
@in_each_process(2)
def test_overflows_leave_no_trace(adapter: Callable[[GradScaler], Averageable]) -> None:
    """Five batches more that overflow on one process; else the same run, to the bit."""
    growing = GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    unscaled = GradScaler("cpu", init_scale=1.0, growth_interval=10_000)
    disturbed = trained(adapter, growing, overflows(dist.get_world_size()))
    healthy = trained(adapter, unscaled, {})
    assert_the_same(disturbed, healthy, skipped=5)
    assert min(disturbed.scales) < max(disturbed.scales)
    assert set(healthy.scales) == {1.0}


class Trained(NamedTuple):
    """What a run has come to."""

    parameters: Tensor
    error: dict[str, Tensor]
    stats: Stats
    scales: list[float]


def trained_by(sync: Any, model: nn.Module, scales: list[float]) -> Trained:
    return Trained(flat(model), dict(sync.state_dict()["error"]), sync.stats(), scales)


def assert_the_same(disturbed: Trained, healthy: Trained, *, skipped: int) -> None:
    assert torch.equal(disturbed.parameters, healthy.parameters)
    assert disturbed.error.keys() == healthy.error.keys()
    assert all(
        owed.any() and torch.equal(owed, healthy.error[name]) for name, owed in disturbed.error.items()
    )
    assert (disturbed.stats.nonfinite_steps, healthy.stats.nonfinite_steps) == (skipped, 0)
    assert disturbed.stats.compression_ratio > 3


def trained(adapter: Any, scaler: GradScaler, overflowing: dict[int, int]) -> Trained:
    model, sync, step = adapter(scaler)
    scales = []
    for number in range(STEPS):
        if number in overflowing:
            before = flat(model)
            step(loss_of(model, 77 + number) * (HUGE if overflowing[number] == dist.get_rank() else 1.0))
            assert torch.equal(flat(model), before)
        scales.append(scaler.get_scale())
        step(loss_of(model, number))
    return trained_by(sync, model, scales)


@in_each_process(2)
def test_a_scale_that_jumps_by_any_factor_changes_no_unscaled_result() -> None:
    results = []
    for scale, jump in ((1.0, 1.0), (512.0, 0.3), (512.0, 1000.0)):
        model, scales = ddp_of(), [scale]
        thinwire.attach(model, POWER, grad_scaler=lambda scales=scales: scales[0])  # type: ignore[misc]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            scales[0] = scale * jump ** (step % 3)
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step) * scales[0])
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scales[0]
            optimizer.step()
        results.append(flat(model))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-5, atol=1e-6)


# What may be given.


def test_what_tells_the_scale() -> None:
    given = {
        GradScaler("cpu", init_scale=8.0): 8.0,
        lambda: 8: 8.0,
        lambda: torch.tensor([8.0], dtype=torch.float64): 8.0,
    }
    for scaler, expected in given.items():
        scale = loss_scale_of(scaler)
        assert scale is not None
        assert torch.equal(scale(torch.device("cpu")), torch.tensor(expected))
    with pytest.raises(ConfigError, match=r"must be a torch\.amp\.GradScaler, a function"):
        loss_scale_of(1024.0)
    assert loss_scale_of(None) is None
    assert loss_scale_of(GradScaler("cpu", enabled=False)) is None


@pytest.mark.parametrize(
    "bad",
    [0, -1.0, torch.inf, torch.nan, 1e-60, 1e300, True, None, "8", torch.ones(2), torch.tensor(0.0)],
    ids=str,
)
def test_a_scale_that_is_none_is_refused(bad: Any) -> None:
    scale = loss_scale_of(lambda: bad)
    assert scale is not None
    with pytest.raises(ConfigError, match="must return a number above 0 within fp32"):
        scale(torch.device("cpu"))
