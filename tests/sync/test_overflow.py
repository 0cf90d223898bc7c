"""Loss scaling: overflows leave no trace, and no change of scale changes a result."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from processes import in_each_process
from sync.test_nonfinite import Averaged, aggregated, attached, hooked, loss_of
from thinwire import ConfigError, PowerSGD
from thinwire import powersgd as epfl
from thinwire.sync.settings import loss_scale_of
from training import flat

POWER = PowerSGD(matrix_rank=2)
STEPS = 10
HUGE = 3e38  # overflows in fp32 once it is scaled


def overflows(processes: int, seed: int = 3) -> dict[int, int]:
    """Before which steps one more batch comes, that overflows, and on which process."""
    draw = random.Random(seed)
    return {step: draw.randrange(processes) for step in sorted(draw.sample(range(STEPS), 5))}


@pytest.mark.parametrize(
    ("adapter", "options"),
    [(attached, {}), (attached, {"host_check": False}), (hooked, {}), (aggregated, {})],
)
@in_each_process(2)
def test_overflows_leave_no_trace(adapter: Callable[..., Averaged], options: dict[str, Any]) -> None:
    """Five batches more that overflow on one process; else the same run, to the bit."""
    runs: tuple[tuple[GradScaler, dict[int, int]], ...] = (
        (GradScaler("cpu", init_scale=2.0**14, growth_interval=3), overflows(dist.get_world_size())),
        (GradScaler("cpu", init_scale=1.0, growth_interval=10_000), {}),
    )
    found = []
    for scaler, overflowing in runs:
        # A hook is given a function, the others the scaler.
        given: Any = scaler.get_scale if adapter is hooked else scaler
        model, optimizer, sync = adapter(grad_scaler=given, **options)
        step: Callable[[], object] = partial(scaler.step, optimizer)
        if isinstance(sync, epfl.Aggregator):
            step = partial(epfl.optimizer_step, optimizer, sync)
        scales = set()
        for number in range(STEPS):
            for is_one_more in (True, False) if number in overflowing else (False,):
                is_bad = is_one_more and overflowing[number] == dist.get_rank()
                before = flat(model)
                loss = loss_of(model, number + 77 * is_one_more) * (HUGE if is_bad else 1.0)
                torch.autograd.backward(scaler.scale(loss))
                step()
                scaler.update()
                optimizer.zero_grad()
                scales.add(scaler.get_scale())
                assert torch.equal(flat(model), before) == is_one_more
        assert (len(scales) > 1) == bool(overflowing)
        assert sync.stats().nonfinite_steps == len(overflowing)
        found.append((flat(model), dict(sync.state_dict()["error"])))
    assert sync.stats().compression_ratio > 3
    (parameters, residuals), (expected, expected_residuals) = found
    assert torch.equal(parameters, expected)
    assert all(residual.any() for residual in residuals.values())
    torch.testing.assert_close(residuals, expected_residuals, rtol=0, atol=0)


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
