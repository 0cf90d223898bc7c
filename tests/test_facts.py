"""Where the hooks that people have fail, by number: that ours does the right thing in the same case.

What the others do is measured by `benchmarks/bench_facts.py`, as it depends on version and processor.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pool import Pool
from thinwire import PowerSGD, hooks
from thinwire.algorithms.error_feedback import ERROR
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation


def averaged(gradients: list[list[list[Tensor]]], algorithm: PowerSGD) -> list[Tensor]:
    """The flat results of gradients by step and worker. Asserts that something was compressed."""
    specs = tuple(ParameterSpec.of(str(index), g) for index, g in enumerate(gradients[0][0]))
    simulation = Simulation(algorithm, [specs], num_workers=len(gradients[0]))
    results = []
    for step in gradients:
        flats = [[torch.cat([g.reshape(-1) for g in of_worker])] for of_worker in step]
        simulation.step(flats)
        results.append(flats[0][0])
    assert simulation.syncs[0].stats().compression_ratio > 1.5
    return results


def model_of(*widths: int) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*layers)


class HalfUsed(nn.Module):
    """A model with a layer that its forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.used = model_of(32, 48, 48)
        self.unused = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_facts_1_several_buckets_on_gloo(pool2: Pool, pool4: Pool) -> None:
    """Torch's hook issues collectives from callbacks, in no order."""
    for pool in (pool2, pool4):
        results = pool.run(_several_buckets)
        assert all(num_buckets >= 4 for num_buckets, _, _ in results)
        assert all(ratio > 3 for _, ratio, _ in results)
        for _, _, gradient in results:
            assert torch.equal(gradient, results[0][2])


def _several_buckets() -> tuple[int, float, Tensor]:
    ddp_model = DistributedDataParallel(model_of(64, 64, 64, 64, 64, 64), bucket_cap_mb=0.01)
    state = hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=0)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    for step in range(10):
        before = state.stats().messages
        torch.manual_seed(10 * step + dist.get_rank())
        ddp_model(torch.randn(8, 64)).square().mean().backward()
    num_buckets = state.stats().messages - before - 1  # one message each, and one of all together
    gradient = next(iter(ddp_model.parameters())).grad
    assert gradient is not None
    return num_buckets, state.stats().compression_ratio, gradient


def test_facts_2_batched_hook(pool2: Pool) -> None:
    for ratio, gradient in (results := pool2.run(_batched)):
        assert ratio > 5
        assert torch.equal(gradient, results[0][1])


def _batched() -> tuple[float, Tensor]:
    ddp_model = DistributedDataParallel(model_of(64, 64, 64), bucket_cap_mb=0.01)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    ddp_model.register_comm_hook(state, hooks.batched_powerSGD_hook)
    for step in range(5):
        torch.manual_seed(10 * step + dist.get_rank())
        ddp_model(torch.randn(8, 64)).square().mean().backward()
    gradient_of_first = next(iter(ddp_model.parameters())).grad
    assert gradient_of_first is not None
    return state.stats().compression_ratio, gradient_of_first


def test_facts_3_one_overflow_under_a_grad_scaler(pool2: Pool) -> None:
    """Torch's hook: NaN stays in the error memory, and no later step is ever taken."""
    for taken, stats in pool2.run(_overflow):
        assert taken == 39
        assert stats.nonfinite_steps == 1
        assert stats.compression_ratio > 2


def _overflow() -> tuple[int, thinwire.Stats]:
    state = hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return _steps_taken(state, hooks.powerSGD_hook), state.stats()


def _steps_taken(state: Any, hook: Any) -> int:
    """Of 40 steps, one process overflowing in the eleventh, those that changed the model."""
    assert dist.get_world_size() == 2
    ddp_model = DistributedDataParallel(model_of(32, 48, 16))
    ddp_model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    taken = 0
    for step in range(40):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = ddp_model(torch.randn(8, 32)).square().mean()
        overflow = torch.inf if step == 10 and dist.get_rank() == 1 else 1.0
        scaler.scale(loss * overflow).backward()
        before = next(iter(ddp_model.parameters())).detach().clone()
        scaler.step(optimizer)
        scaler.update()
        taken += not torch.equal(before, next(iter(ddp_model.parameters())))
    return taken


@pytest.mark.parametrize("matrix_rank", [1, 2])
def test_facts_5_zero_gradients_and_gradients_of_low_rank(matrix_rank: int) -> None:
    torch.manual_seed(0)
    zero, low = torch.zeros(64, 48), torch.randn(64, 1) @ torch.randn(1, 48)
    algorithm = PowerSGD(matrix_rank=matrix_rank)
    results = averaged([[[zero, low]], [[zero, zero]], [[low, low]]], algorithm)
    expected = [(zero, low), (zero, zero), (low, low)]
    for result, gradients in zip(results, expected, strict=True):
        torch.testing.assert_close(
            result, torch.cat([g.reshape(-1) for g in gradients]), rtol=1e-4, atol=1e-5
        )


def test_facts_6_rank_one_gradient_at_matrix_rank_two() -> None:
    """Without error feedback, all that comes out is what was put in."""
    torch.manual_seed(0)
    gradient = torch.randn(64, 1) @ torch.randn(1, 48)
    for result in averaged([[[gradient]]] * 3, PowerSGD(matrix_rank=2, error_feedback=False)):
        torch.testing.assert_close(result.view(64, 48), gradient, rtol=1e-4, atol=1e-5)


def test_facts_8_a_scalar_parameter() -> None:
    results = averaged([[[torch.randn(64, 48), torch.tensor(3.0)]]], PowerSGD(matrix_rank=2))
    assert results[0][-1] == 3.0


def test_facts_10_memory_under_the_fp16_wrapper(pool2: Pool) -> None:
    for dtypes, ratio, plain_ratio in pool2.run(_wrapped):
        assert dtypes == {torch.float32}
        assert ratio == pytest.approx(2 * plain_ratio)


def _wrapped() -> tuple[set[torch.dtype], float, float]:
    ratios, dtypes = [], set()
    for ours in (hooks.fp16_compress_wrapper(hooks.powerSGD_hook), hooks.powerSGD_hook):
        ddp_model = DistributedDataParallel(model_of(64, 48, 32))
        state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
        ddp_model.register_comm_hook(state, ours)
        for _ in range(3):
            ddp_model(torch.randn(8, 64)).square().mean().backward()
        saved = state.state_dict()
        dtypes |= {tensor.dtype for key in ("error", "factor") for _, tensor in saved[key]}
        ratios.append(state.stats().compression_ratio)
    return dtypes, ratios[0], ratios[1]


def test_facts_11_the_error_memory_stays_bounded() -> None:
    """Torch's grows as √steps, since differences between processes never leave it."""
    specs = (ParameterSpec.of("0", torch.empty(48, 32)),)
    simulation = Simulation(PowerSGD(matrix_rank=2), [specs], num_workers=2)
    norms = []
    for step in range(150):
        simulation.step([[_noise(step, worker)[0].reshape(-1)] for worker in range(2)])
        norms.append(simulation.engines[0].memory[ERROR]["0"].norm().item())
    assert simulation.syncs[0].stats().compression_ratio > 5
    assert norms[-1] < 1.15 * norms[49]


def _noise(step: int, worker: int) -> list[Tensor]:
    """A low-rank gradient that all share, and noise of their own."""
    shared = torch.randn(48, 2, generator=torch.Generator().manual_seed(step))
    own = torch.randn(48, 32, generator=torch.Generator().manual_seed(7_000 + 2 * step + worker))
    return [shared @ torch.ones(2, 32) + own]


def test_facts_12_bf16_on_gloo_and_unused_parameters(pool2: Pool) -> None:
    for close, ratio, gradient in (results := pool2.run(_bf16_and_unused)):
        assert close
        assert ratio > 2
        assert torch.equal(gradient, results[0][2])


def _bf16_and_unused() -> tuple[bool, float, Tensor]:
    plain, ours = (DistributedDataParallel(model_of(32, 48, 16)) for _ in range(2))
    ours.register_comm_hook(None, hooks.bf16_compress_hook)
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(8, 32)
    for ddp_model in (plain, ours):
        ddp_model(batch).square().mean().backward()
    pairs = [(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True)]
    close = all(
        (a - b).norm() < 0.02 * a.norm() and not torch.equal(a, b)
        for a, b in pairs
        if a is not None and b is not None
    )

    unused = DistributedDataParallel(HalfUsed(), find_unused_parameters=True, bucket_cap_mb=0.005)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0, matrix_approximation_rank=2)
    unused.register_comm_hook(state, hooks.powerSGD_hook)
    for _ in range(5):
        unused(batch).square().mean().backward()
    gradient = unused.module.used[0].weight.grad
    return close, state.stats().compression_ratio, gradient


def test_facts_13_compression_starts_when_it_is_told_to(pool2: Pool) -> None:
    """The well-known test scripts run torch's default of 1 000 warm-up steps and never compress."""
    for ratio_of_default_hook, ratio_from_the_start, ratio_of_attach in pool2.run(_ten_steps):
        assert ratio_of_default_hook == 1.0
        assert ratio_from_the_start > 3
        assert ratio_of_attach > 3


def _ten_steps() -> tuple[float, float, float]:
    ratios = []
    for start in (1_000, 0):
        ddp_model = DistributedDataParallel(model_of(64, 64, 64))
        state = hooks.PowerSGDState(None, start_powerSGD_iter=start)
        ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
        for _ in range(10):
            ddp_model(torch.randn(8, 64)).square().mean().backward()
        ratios.append(state.stats().compression_ratio)
    attached = DistributedDataParallel(model_of(64, 64, 64))
    sync = thinwire.attach(attached, PowerSGD())
    for _ in range(10):
        attached(torch.randn(8, 64)).square().mean().backward()
    return ratios[0], ratios[1], sync.stats().compression_ratio
