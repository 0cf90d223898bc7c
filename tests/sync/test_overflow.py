"""Loss scaling: overflows leave no trace, and no change of scale changes a result."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pool import Pool, Pools
from thinwire import ConfigError, PowerSGD, hooks
from thinwire import powersgd as epfl
from thinwire.sync.settings import loss_scale_of

POWER = PowerSGD(matrix_rank=2)
STEPS = 10
Result = tuple[list[Tensor], dict[str, Tensor], int, list[float], float]


def overflows(processes: int, seed: int = 3) -> dict[int, int]:
    """Before which steps one more batch comes, that overflows, and on which process."""
    draw = random.Random(seed)
    return {step: draw.randrange(processes) for step in sorted(draw.sample(range(STEPS), 5))}


def new_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64))


def loss_of(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(1000 * step + dist.get_rank())
    loss: Tensor = model(torch.randn(8, 64)).square().mean()
    return loss


def huge(loss: Tensor) -> Tensor:
    """What overflows in fp32 once it is scaled."""
    return loss * 3e38


Step = Callable[[Callable[[], Tensor]], None]


def by_attach(scaler: GradScaler) -> tuple[nn.Module, Callable[[], Any], Step]:
    ddp_model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005)
    sync = thinwire.attach(ddp_model, POWER, grad_scaler=scaler)
    return ddp_model, lambda: sync, scaled_step(ddp_model, scaler)


def by_hook(scaler: GradScaler, told: Any = None) -> tuple[nn.Module, Callable[[], Any], Step]:
    ddp_model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005)
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=0, grad_scaler=told or scaler)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    return ddp_model, lambda: state, scaled_step(ddp_model, scaler)


def by_hook_told_the_scale(scaler: GradScaler) -> tuple[nn.Module, Callable[[], Any], Step]:
    return by_hook(scaler, scaler.get_scale)


def scaled_step(model: nn.Module, scaler: GradScaler) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(loss: Callable[[], Tensor]) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(loss()))
        scaler.step(optimizer)
        scaler.update()

    return step


def by_optimizer_step(scaler: GradScaler) -> tuple[nn.Module, Callable[[], Any], Step]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = epfl.Config(rank=2, start_compressing_after_num_steps=0)
    aggregator = epfl.PowerSGD(model.parameters(), config, grad_scaler=scaler)

    def step(loss: Callable[[], Tensor]) -> None:
        torch.autograd.backward(scaler.scale(loss()))
        epfl.optimizer_step(optimizer, aggregator)
        scaler.update()

    return model, lambda: aggregator, step


FRONTS = [by_attach, by_hook, by_hook_told_the_scale, by_optimizer_step]


@pytest.mark.parametrize(
    ("front", "processes"),
    [*[(front, 2) for front in FRONTS], (by_attach, 4)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_overflows_leave_no_trace(pools: Pools, front: Any, processes: int) -> None:
    """Five batches more that overflow on one process; else the same run, to the bit."""
    for disturbed, healthy in pools.of(processes).run(_with_and_without_overflows, front):
        assert_the_same(disturbed, healthy)
        assert (disturbed[2], healthy[2]) == (5, 0)
        assert min(disturbed[3]) < max(disturbed[3])
        assert set(healthy[3]) == {1.0}
        assert disturbed[4] > 3


def assert_the_same(disturbed: Result, healthy: Result) -> None:
    for mine, theirs in zip(disturbed[0], healthy[0], strict=True):
        assert torch.equal(mine, theirs)
    assert disturbed[1].keys() == healthy[1].keys()
    for name, owed in disturbed[1].items():
        assert owed.any()
        assert torch.equal(owed, healthy[1][name]), name


def _with_and_without_overflows(front: Any) -> tuple[Result, Result]:
    growing = GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    unscaled = GradScaler("cpu", init_scale=1.0, growth_interval=10_000)
    return _run(front, growing, overflows(dist.get_world_size())), _run(front, unscaled, {})


def _run(front: Any, scaler: GradScaler, overflowing: dict[int, int]) -> Result:
    model, handle, step = front(scaler)
    scales = []
    for number in range(STEPS):
        if number in overflowing:
            here = overflowing[number] == dist.get_rank()
            before = [p.detach().clone() for p in model.parameters()]
            step(lambda n=number, h=here: huge(loss_of(model, 77 + n)) if h else loss_of(model, 77 + n))
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        scales.append(scaler.get_scale())
        step(lambda n=number: loss_of(model, n))
    stats = handle().stats()
    parameters = [p.detach().clone() for p in model.parameters()]
    error = dict(handle().state_dict()["error"])
    return parameters, error, stats.nonfinite_steps, scales, stats.compression_ratio


@pytest.mark.parametrize("factor", [3.0, 0.3, 1000.0, 1e-3])
def test_a_scale_that_jumps_by_any_factor_changes_no_unscaled_result(pool2: Pool, factor: float) -> None:
    for jumping, plain in pool2.run(_jumping, factor):
        for mine, theirs in zip(jumping, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-6)


def _jumping(factor: float) -> tuple[list[Tensor], list[Tensor]]:
    results = []
    for scale, jump in ((1.0, 1.0), (512.0, factor)):
        model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005)
        told = [scale]
        thinwire.attach(model, POWER, grad_scaler=lambda told=told: told[0])  # type: ignore[misc]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            told[0] = scale * jump ** (step % 3)
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step) * told[0])
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= told[0]
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    return results[1], results[0]


# What may be given.


def test_what_tells_the_scale() -> None:
    cpu = torch.device("cpu")
    told = [
        loss_scale_of(GradScaler("cpu", init_scale=8.0)),
        loss_scale_of(lambda: 8),
        loss_scale_of(lambda: torch.tensor([8.0], dtype=torch.float64)),
    ]
    for scale in told:
        assert scale is not None
        assert torch.equal(scale(cpu), torch.tensor(8.0))
    assert loss_scale_of(None) is None


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


def test_something_else_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"must be a torch\.amp\.GradScaler, a function"):
        hooks.PowerSGDState(None, grad_scaler=1024.0)  # type: ignore[arg-type]


def test_a_copied_state_is_told_the_same_scale(pool2: Pool) -> None:
    assert pool2.run(_copied) == [True, True]


def _copied() -> bool:
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0, grad_scaler=lambda: 4.0)
    errors = []
    for given, scale in (
        (copy.deepcopy(state), 4.0),
        (hooks.PowerSGDState(None, start_powerSGD_iter=0), 1.0),
    ):
        model = DistributedDataParallel(new_model())
        model.register_comm_hook(given, hooks.powerSGD_hook)
        torch.autograd.backward(scale * loss_of(model, 0))
        errors.append(dict(given.state_dict()["error"]))
    return all(owed.any() and torch.equal(owed, errors[1][name]) for name, owed in errors[0].items())
