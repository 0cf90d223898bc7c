"""What is owed is paid: by whatever algorithm comes next, within the range of whatever type is on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from catalog import Sums, averaged, random_gradients, spec
from thinwire import AllReduce, Cast, PowerSGD, Quantize
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.slots import SENT
from thinwire.simulation import Simulation

POWER = PowerSGD(matrix_rank=1)


def layout(dtype: torch.dtype = torch.float32) -> list[tuple]:  # type: ignore[type-arg]
    return [(spec("weight", 40, 30, dtype=dtype), spec("bias", 40, dtype=dtype))]


def owing(dtype: torch.dtype, error: float, scale: float | None = None) -> Simulation:
    """Two workers after a step of PowerSGD, with `error` added to all that each owes on the weight."""
    scaled: Callable[[torch.device], torch.Tensor] | None = None
    if scale is not None:
        scaled = lambda device: torch.tensor(scale)  # noqa: E731
    simulation = Simulation(POWER, layout(dtype), num_workers=2, loss_scale=scaled)
    assert simulation.step(random_gradients(layout(dtype), num_workers=2, seed=0))
    for engine in simulation.engines:
        engine.state.memory[ERROR]["weight"] += error
    return simulation


def owed(simulation: Simulation) -> torch.Tensor:
    zeros = torch.zeros(1200)
    errors = [engine.state.memory[ERROR].get("weight", zeros).double() for engine in simulation.engines]
    return torch.stack(errors).mean(0)


def pay(simulation: Simulation, dtype: torch.dtype, steps: int) -> torch.Tensor:
    """Steps of zero gradients; the sum of what was applied to the weight."""
    total = torch.zeros(1200, dtype=torch.float64)
    for _ in range(steps):
        gradients = [[torch.zeros(1240, dtype=dtype)] for _ in range(2)]
        assert simulation.step(gradients)
        assert gradients[0][0].isfinite().all()
        total += gradients[0][0][:1200]
    return total


def switch(simulation: Simulation, algorithm: Algorithm) -> None:
    for sync in simulation.syncs:
        sync.use(algorithm)


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        (AllReduce(), torch.bfloat16),
        (PowerSGD(error_feedback=False), torch.float32),
        (BatchedPowerSGD(error_feedback=False), torch.bfloat16),
        (PowerSGD(matrix_rank=2, warmup_steps=1_000), torch.float32),
        (Quantize(bits=2), torch.float32),
    ],
    ids=str,
)
def test_an_algorithm_without_error_pays_all_in_the_first(algorithm: Algorithm, dtype: torch.dtype) -> None:
    simulation = owing(dtype, error=3.0)
    before = owed(simulation)
    assert before.norm() > 0
    switch(simulation, algorithm)
    once = 1.01 * torch.finfo(dtype).eps / 2  # the mean is rounded, and nothing before it
    torch.testing.assert_close(pay(simulation, dtype, steps=1), before, rtol=once, atol=0)
    assert owed(simulation).norm() == 0


@pytest.mark.parametrize("scale", [None, 8.0], ids=["unscaled", "scaled"])
@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [(AllReduce(), torch.float16), (Cast("fp16"), torch.float32), (Cast("fp16"), torch.bfloat16)],
    ids=str,
)
def test_what_fp16_cannot_hold_is_paid_in_parts(
    algorithm: Algorithm, dtype: torch.dtype, scale: float | None
) -> None:
    simulation = owing(dtype, error=2e5, scale=scale)
    before = owed(simulation)
    switch(simulation, algorithm)
    parts = int(2e5 * (scale or 1.0) / 65504) + 2
    total = pay(simulation, dtype, parts) / (scale or 1.0)
    torch.testing.assert_close(total, before, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=0)
    assert owed(simulation).norm() == 0


def test_an_infinite_gradient_is_still_skipped_where_fp16_pays() -> None:
    simulation = owing(torch.float16, error=1e6)
    before = owed(simulation)
    switch(simulation, AllReduce())
    gradients = [[torch.zeros(1240, dtype=torch.float16)] for _ in range(2)]
    gradients[1][0][7] = torch.inf
    assert not simulation.step(gradients)
    assert torch.equal(owed(simulation), before)


@pytest.mark.parametrize("alternating", [False, True])
def test_factors_beyond_fp16_are_cut_off_and_stay_owed(alternating: bool) -> None:
    simulation = Simulation(
        PowerSGD(matrix_rank=2, wire_dtype="fp16", alternating=alternating), [layout()[0][:1]], num_workers=2
    )
    total, true = (torch.zeros(1200, dtype=torch.float64) for _ in range(2))
    for seed in range(6):
        gradients = random_gradients([layout()[0][:1]], num_workers=2, seed=seed)
        for (flat,) in gradients:
            flat.mul_(1e5)
        true += torch.stack([flat.double() for (flat,) in gradients]).mean(0)
        assert simulation.step(gradients)
        assert gradients[0][0].isfinite().all()
        total += gradients[0][0]
    assert total.norm() > 0
    assert (total + owed(simulation) - true).norm() / true.norm() < 2e-3
    gradients[0][0][3] = torch.inf
    assert not simulation.step(gradients)


@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_rounding_of_the_sum_is_all_that_is_lost(wire_dtype: torch.dtype, alternating: bool) -> None:
    """A mean of N parts is rounded N times; what a worker rounds of its own part it goes on owing."""
    algorithm = PowerSGD(matrix_rank=2, wire_dtype=wire_dtype, alternating=alternating)
    simulation, sums, num_workers = Simulation(algorithm, [layout()[0][:1]], num_workers=3), Sums(), 3
    most_lost = 0.0
    for step in range(25):
        averaged(simulation, step, sums)
        sent = [float(engine.state.memory[SENT]["weight"].norm()) for engine in simulation.engines]
        most_lost += num_workers * torch.finfo(wire_dtype).eps / 2 * sum(sent) / num_workers
    assert sums.lost(simulation).norm() * sums.true_means.norm() < most_lost
    assert simulation.syncs[0].stats().compression_ratio > 10


@pytest.mark.parametrize(
    ("dtype", "ratio"), [(torch.float16, 1), (torch.bfloat16, 2), (torch.float64, 1)], ids=str
)
def test_no_bucket_is_ever_inflated(dtype: torch.dtype, ratio: float) -> None:
    """16-bit gradients have factors of 32 bits: what counts is bytes, with all that rides along."""
    mostly_vectors = (spec("weight", 64, 10, dtype=dtype), spec("vector", 1_000, dtype=dtype))
    only_vectors = (spec("bias", 100, dtype=dtype),)
    algorithm = PowerSGD(matrix_rank=4, min_compression_ratio=ratio)
    for bucket in (mostly_vectors, only_vectors):
        plan = algorithm.plan(bucket)
        assert plan.message_bytes <= plan.gradient_bytes


@pytest.mark.parametrize("owes", [90_000.0, 180_000.0], ids=["the mean fits fp16", "it does not"])
@pytest.mark.parametrize(("name", "algorithm"), [("weight", AllReduce()), ("bias", POWER)], ids=str)
def test_what_one_worker_owes_stays_with_all_or_none(name: str, algorithm: Algorithm, owes: float) -> None:
    """What is owed decides the type of messages: all must owe the same parameters."""
    simulation = owing(torch.float16, 0.0)
    memories = [engine.state.memory[ERROR] for engine in simulation.engines]
    for memory in memories:
        memory.setdefault(name, torch.zeros(40))
    memories[0][name] += owes
    switch(simulation, algorithm)
    left = owes / 2
    while left:
        gradients = [[torch.zeros(1240, dtype=torch.float16)] for _ in range(2)]
        assert simulation.step(gradients)
        of_name = gradients[0][0][:1200] if name == "weight" else gradients[0][0][1200:]
        paid = min(left, 65504.0)
        left -= paid
        torch.testing.assert_close(of_name, torch.full_like(of_name, paid), rtol=1e-3, atol=1.0)
        assert [name in memory for memory in memories] == [left > 0] * 2
        assert not left or torch.equal(memories[0][name], memories[1][name])
