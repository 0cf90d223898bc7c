"""The measured defects of the systems our users have, by number: what stock does, and what ours does.

Stock behaviour is recorded where it does not hang; each record fails when PyTorch mends the defect.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock_default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pool import Pool
from thinwire import PowerSGD, hooks
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation


class OneBucket:
    """What a hook sees of DDP's GradBucket, for hooks that are driven by hand."""

    def __init__(self, gradients: list[Tensor]) -> None:
        self._shapes = [g.shape for g in gradients]
        self._flat = torch.cat([g.reshape(-1) for g in gradients])

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat

    def gradients(self) -> list[Tensor]:
        parts = self._flat.split_with_sizes([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def parameters(self) -> list[Tensor]:
        return self.gradients()

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def drive_stock(
    gradients: list[list[Tensor]],
    hook: Callable[[Any, Any], Future[Tensor]] = stock.powerSGD_hook,
    **settings: Any,
) -> tuple[list[Tensor], stock.PowerSGDState]:
    """Steps of torch's hook, the first two of them uncompressed as it wants; the flat results."""
    state = stock.PowerSGDState(None, start_powerSGD_iter=2, **settings)
    results = []
    for step in [gradients[0], gradients[0], *gradients]:
        results.append(hook(state, OneBucket(step)).wait().clone())
    return results[2:], state


def drive_ours(gradients: list[list[list[Tensor]]], algorithm: PowerSGD) -> tuple[list[Tensor], Simulation]:
    """Steps of ours, by step and worker; the flat results. Asserts that something was compressed."""
    specs = tuple(ParameterSpec.of(str(index), g) for index, g in enumerate(gradients[0][0]))
    simulation = Simulation(algorithm, [specs], num_workers=len(gradients[0]))
    results = []
    for step in gradients:
        flats = [[torch.cat([g.reshape(-1) for g in of_worker])] for of_worker in step]
        simulation.step(flats)
        results.append(flats[0][0])
    assert simulation.syncs[0].stats().compression_ratio > 1.5
    return results, simulation


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
    """Torch's hook hangs or mixes messages up (6 of 6 runs): it issues collectives from callbacks."""
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
    for record, ratio, gradient in (results := pool2.run(_batched)):
        assert record == "AssertionError"
        assert ratio > 5
        assert torch.equal(gradient, results[0][2])


def _batched() -> tuple[str, float, Tensor]:
    torch.manual_seed(dist.get_rank())
    gradient = [torch.randn(64, 64)]
    record = "passes"
    try:
        drive_stock([gradient], stock.batched_powerSGD_hook)
    except (AssertionError, RuntimeError) as error:
        record = "AssertionError" if "AssertionError" in repr(error) or "ndim" in str(error) else repr(error)
    ddp_model = DistributedDataParallel(model_of(64, 64, 64), bucket_cap_mb=0.01)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    ddp_model.register_comm_hook(state, hooks.batched_powerSGD_hook)
    for step in range(5):
        torch.manual_seed(10 * step + dist.get_rank())
        ddp_model(torch.randn(8, 64)).square().mean().backward()
    gradient_of_first = next(iter(ddp_model.parameters())).grad
    assert gradient_of_first is not None
    return record, state.stats().compression_ratio, gradient_of_first


def test_facts_3_one_overflow_under_a_grad_scaler(pool2: Pool) -> None:
    """Torch's hook: NaN stays in the error memory, and no later step is ever taken."""
    for taken_by_stock, taken_by_ours, stats in pool2.run(_overflow):
        assert taken_by_stock == 10
        assert taken_by_ours == 39
        assert stats.skipped_steps == 1
        assert stats.compression_ratio > 2


def _overflow() -> tuple[int, int, thinwire.Stats]:
    state = hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    taken_by_ours = _steps_taken(state, hooks.powerSGD_hook)
    stock_state = stock.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return _steps_taken(stock_state, stock.powerSGD_hook), taken_by_ours, state.stats()


def _steps_taken(state: Any, hook: Any) -> int:
    """Of 40 steps, one process overflowing in the eleventh, those that changed the model."""
    assert dist.get_world_size() == 2
    ddp_model = DistributedDataParallel(model_of(32, 48, 16))  # one bucket: torch's hook hangs with more
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
def test_facts_5_zero_gradients_and_gradients_of_low_rank(pool2: Pool, matrix_rank: int) -> None:
    torch.manual_seed(0)
    zero, low = torch.zeros(64, 48), torch.randn(64, 1) @ torch.randn(1, 48)
    for result in pool2.run(_stock_result, [zero], {"matrix_approximation_rank": matrix_rank}):
        assert result.isnan().any()
    algorithm = PowerSGD(matrix_rank=matrix_rank)
    results, _ = drive_ours([[[zero, low]], [[zero, zero]], [[low, low]]], algorithm)
    expected = [(zero, low), (zero, zero), (low, low)]
    for result, gradients in zip(results, expected, strict=True):
        torch.testing.assert_close(
            result, torch.cat([g.reshape(-1) for g in gradients]), rtol=1e-4, atol=1e-5
        )


def _stock_result(gradients: list[Tensor], settings: dict[str, Any]) -> Tensor:
    return drive_stock([gradients], **settings)[0][-1]


def test_facts_6_rank_one_gradient_at_matrix_rank_two(pool2: Pool) -> None:
    """Torch's hook, without error feedback, gives twice the gradient."""
    torch.manual_seed(0)
    gradient = torch.randn(64, 1) @ torch.randn(1, 48)
    settings = {"matrix_approximation_rank": 2, "use_error_feedback": False}
    for result in pool2.run(_stock_result, [gradient], settings):
        assert (result - gradient.reshape(-1)).norm() > 0.5 * gradient.norm()
    results, _ = drive_ours([[[gradient]]] * 3, PowerSGD(matrix_rank=2, error_feedback=False))
    for result in results:
        torch.testing.assert_close(result.view(64, 48), gradient, rtol=1e-4, atol=1e-5)


def test_facts_8_a_scalar_parameter(pool2: Pool) -> None:
    assert pool2.run(_stock_error, [torch.randn(64, 48), torch.ones(())]) == ["IndexError"] * 2
    scalar = torch.tensor(3.0)
    results, _ = drive_ours([[[torch.randn(64, 48), scalar]]], PowerSGD(matrix_rank=2))
    assert results[0][-1] == 3.0


def _stock_error(gradients: list[Tensor]) -> str:
    try:
        drive_stock([gradients])
    except Exception as error:
        return "IndexError" if "IndexError" in repr(error) or "out of range" in str(error) else repr(error)
    return "passes"


def test_facts_10_memory_under_the_fp16_wrapper(pool2: Pool) -> None:
    for stock_dtype, dtypes, ratio, plain_ratio in pool2.run(_wrapped):
        assert stock_dtype == torch.float16
        assert dtypes == {torch.float32}
        assert ratio == pytest.approx(2 * plain_ratio)


def _wrapped() -> tuple[torch.dtype, set[torch.dtype], float, float]:
    torch.manual_seed(dist.get_rank())
    hook = stock_default.fp16_compress_wrapper(stock.powerSGD_hook)
    _, stock_state = drive_stock([[torch.randn(64, 48)]], hook)
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
    return stock_state.error_dict[0].dtype, dtypes, ratios[0], ratios[1]


def test_facts_11_the_error_memory_stays_bounded(pool2: Pool) -> None:
    """Torch's error grows as √steps, since differences between processes never leave it."""
    stock_norms = pool2.run(_stock_error_norms, 300)[0]
    assert stock_norms[-1] > 1.7 * stock_norms[99]

    specs = (ParameterSpec.of("0", torch.empty(48, 32)),)
    simulation = Simulation(PowerSGD(matrix_rank=2), [specs], num_workers=2)
    norms = []
    for step in range(300):
        simulation.step([[_noise(step, worker)[0].reshape(-1)] for worker in range(2)])
        norms.append(simulation.syncs[0]._memory.error["0"].norm().item())
    assert simulation.syncs[0].stats().compression_ratio > 5
    assert norms[-1] < 1.15 * norms[99]
    assert norms[-1] < 0.7 * stock_norms[-1]


def _noise(step: int, worker: int) -> list[Tensor]:
    """A low-rank gradient that all share, and noise of their own."""
    shared = torch.randn(48, 2, generator=torch.Generator().manual_seed(step))
    own = torch.randn(48, 32, generator=torch.Generator().manual_seed(7_000 + 2 * step + worker))
    return [shared @ torch.ones(2, 32) + own]


def _stock_error_norms(steps: int) -> list[float]:
    state = stock.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    norms = []
    for step in [0, 0, *range(steps)]:
        stock.powerSGD_hook(state, OneBucket(_noise(step, dist.get_rank()))).wait()
        norms.append(state.error_dict[0].norm().item() if state.error_dict else 0.0)
    return norms[2:]


def test_facts_12_bf16_on_gloo_and_unused_parameters(pool2: Pool) -> None:
    for record, close, ratio, gradient in (results := pool2.run(_bf16_and_unused)):
        assert "BF16" in record
        assert close
        assert ratio > 2
        assert torch.equal(gradient, results[0][3])


def _bf16_and_unused() -> tuple[str, bool, float, Tensor]:
    record = "passes"
    try:
        refused = DistributedDataParallel(model_of(32, 48, 16))
        refused.register_comm_hook(None, stock_default.bf16_compress_hook)
    except TypeError as error:
        record = str(error)
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
    return record, close, state.stats().compression_ratio, gradient


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
