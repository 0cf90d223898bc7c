"""Where the hooks that people have fail, by number: that ours does the right thing in the same case.

What the others do is in benchmarks/results/2026-11-22-facts.md: it depends on version and processor.
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
from processes import Spawn, in_each_process
from thinwire import PowerSGD, hooks
from thinwire.algorithms.error_feedback import ERROR
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from training import gathered


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


def loss_of(ddp_model: nn.Module, step: int = 0) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    width = next(iter(ddp_model.parameters())).shape[1]
    loss: Tensor = ddp_model(torch.randn(8, width)).square().mean()
    return loss


def backward(ddp_model: nn.Module, step: int = 0) -> None:
    torch.autograd.backward(loss_of(ddp_model, step))


def hooked(
    module: nn.Module, state: object, hook: hooks.Hook = hooks.powerSGD_hook, **options: Any
) -> DistributedDataParallel:
    ddp_model = DistributedDataParallel(module, **options)
    ddp_model.register_comm_hook(state, hook)
    return ddp_model


def new_state(matrix_rank: int = 1, start: int = 0) -> hooks.PowerSGDState:
    return hooks.PowerSGDState(None, matrix_rank, start_powerSGD_iter=start)


def assert_agreed(ddp_model: nn.Module) -> None:
    gradient = next(iter(ddp_model.parameters())).grad
    assert gradient is not None
    everyone = gathered(gradient)
    assert (everyone == everyone[0]).all()


@pytest.mark.parametrize("processes", [2, 4])
def test_facts_1_several_buckets_on_gloo(spawn: Spawn, processes: int) -> None:
    """Torch's hook issues collectives from callbacks, in no order."""
    spawn(processes, _several_buckets)


def _several_buckets() -> None:
    state = new_state(2)
    ddp_model = hooked(model_of(64, 64, 64, 64, 64, 64), state, bucket_cap_mb=0.01)
    for step in range(10):
        before = state.stats().messages
        backward(ddp_model, step)
    assert state.stats().messages - before - 1 >= 4  # a message for each bucket, and one of all together
    assert state.stats().compression_ratio > 3
    assert_agreed(ddp_model)


@in_each_process(2)
def test_facts_3_one_overflow_under_a_grad_scaler() -> None:
    """Torch's hook: NaN stays in the error memory, and no later step is ever taken."""
    state = new_state(2, start=2)
    ddp_model = hooked(model_of(32, 48, 16), state)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
    scaler, taken = GradScaler("cpu", init_scale=2.0**10), 0
    for step in range(40):
        optimizer.zero_grad()
        overflow = torch.inf if step == 10 and dist.get_rank() == 1 else 1.0
        torch.autograd.backward(scaler.scale(loss_of(ddp_model, step) * overflow))
        before = next(iter(ddp_model.parameters())).detach().clone()
        scaler.step(optimizer)
        scaler.update()
        taken += not torch.equal(before, next(iter(ddp_model.parameters())))
    assert taken == 39
    assert state.stats().nonfinite_steps == 1
    assert state.stats().compression_ratio > 2


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


@in_each_process(2)
def test_facts_10_memory_under_the_fp16_wrapper() -> None:
    ratios = []
    for hook in (hooks.fp16_compress_wrapper(hooks.powerSGD_hook), hooks.powerSGD_hook):
        state = new_state()
        ddp_model = hooked(model_of(64, 48, 32), state, hook)
        for _ in range(3):
            backward(ddp_model)
        saved = state.state_dict()
        assert all(tensor.dtype == torch.float32 for key in ("error", "factor") for _, tensor in saved[key])
        ratios.append(state.stats().compression_ratio)
    assert ratios[0] == pytest.approx(2 * ratios[1])


def test_facts_11_the_error_memory_stays_bounded() -> None:
    """Torch's grows as √steps, since differences between processes never leave it."""
    specs = (ParameterSpec.of("0", torch.empty(48, 32)),)
    simulation = Simulation(PowerSGD(matrix_rank=2), [specs], num_workers=2)
    norms = []
    for step in range(150):
        simulation.step([[_noise(step, worker)[0].reshape(-1)] for worker in range(2)])
        norms.append(simulation.engines[0].state.memory[ERROR]["0"].norm().item())
    assert simulation.syncs[0].stats().compression_ratio > 5
    assert norms[-1] < 1.15 * norms[49]


def _noise(step: int, worker: int) -> list[Tensor]:
    """A low-rank gradient that all share, and noise of their own."""
    shared = torch.randn(48, 2, generator=torch.Generator().manual_seed(step))
    own = torch.randn(48, 32, generator=torch.Generator().manual_seed(7_000 + 2 * step + worker))
    return [shared @ torch.ones(2, 32) + own]


@in_each_process(2)
def test_facts_12_bf16_on_gloo_and_unused_parameters() -> None:
    plain = DistributedDataParallel(model_of(32, 48, 16))
    ours = hooked(model_of(32, 48, 16), None, hooks.bf16_compress_hook)
    backward(plain)
    backward(ours)
    for exact, rounded in zip(plain.parameters(), ours.parameters(), strict=True):
        assert exact.grad is not None
        assert rounded.grad is not None
        assert 0 < (exact.grad - rounded.grad).norm() < 0.02 * exact.grad.norm()

    state = new_state(2)
    unused = hooked(HalfUsed(), state, find_unused_parameters=True, bucket_cap_mb=0.005)
    for _ in range(5):
        backward(unused)
    assert state.stats().compression_ratio > 2
    assert_agreed(unused.module.used)


@in_each_process(2)
def test_facts_13_compression_starts_when_it_is_told_to() -> None:
    """The well-known test scripts run torch's default of 1 000 warm-up steps and never compress."""
    states = [hooks.PowerSGDState(None), new_state()]
    models = [hooked(model_of(64, 64, 64), state) for state in states]
    models.append(DistributedDataParallel(model_of(64, 64, 64)))
    sync = thinwire.attach(models[2], PowerSGD())
    for ddp_model in models:
        for step in range(10):
            backward(ddp_model, step)
    assert states[0].stats().compression_ratio == 1.0
    assert states[1].stats().compression_ratio > 3
    assert sync.stats().compression_ratio > 3
