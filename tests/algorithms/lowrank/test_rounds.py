"""Pieces of the rounds that whole steps reach only at their extremes."""

from __future__ import annotations

import pytest
import torch

from catalog import spec
from thinwire import PowerSGD
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.algorithms.exact import WireDtype, wire_dtype_of
from thinwire.algorithms.lowrank.slots import SENT
from thinwire.simulation import Simulation


@pytest.mark.parametrize(
    ("algorithm", "dtype", "tolerance"),
    [
        (PowerSGD(matrix_rank=2, power_iterations=2), torch.float64, 1e-15),
        (PowerSGD(matrix_rank=2, alternating=True, power_iterations=2), torch.float64, 1e-15),
        (PowerSGD(matrix_rank=2, wire_dtype="bf16"), torch.float64, 1e-15),
        (PowerSGD(matrix_rank=2, warmup_steps=2), torch.float64, 1e-15),
        (BatchedPowerSGD(), torch.float64, 1e-15),
        (PowerSGD(matrix_rank=2, wire_dtype="fp16"), torch.float32, 1e-6),
        (PowerSGD(matrix_rank=2, wire_dtype="bf16", alternating=True), torch.float32, 1e-6),
    ],
    ids=str,
)
def test_of_one_worker_nothing_is_lost(algorithm: Algorithm, dtype: torch.dtype, tolerance: float) -> None:
    """There is no sum to round: its average and its error are the gradient and what it owed before.

    What travels in 16 bits is what counts as paid, and float64 gradients are float64 all through.
    """
    weight = spec("weight", 48, 40, dtype=dtype)
    simulation = Simulation(algorithm, [(weight,)], num_workers=1)
    generator = torch.Generator().manual_seed(0)
    owed = torch.zeros(48 * 40, dtype=dtype)
    for step in range(6):
        flat = torch.randn(48 * 40, generator=generator, dtype=dtype)
        put_in = flat + owed
        assert simulation.step([[flat]])
        state = simulation.state_dicts()[0]
        owed = dict(state["error"]).get("weight", torch.zeros(48 * 40, dtype=dtype)).view(-1)
        assert (put_in - flat - owed).norm() < tolerance * put_in.norm()
        if step == 2:  # from here on it is another one, with what the first has saved
            simulation = Simulation(algorithm, [(weight,)], num_workers=1)
            simulation.syncs[0].load_state_dict(state)
    assert {tensor.dtype for _, tensor in (*state["error"], *state["factor"])} == {dtype}
    assert simulation.syncs[0].plan.compression_ratio > 5


@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize("wire_dtype", ["fp16", "bf16", None])
def test_the_rounding_of_the_sum_is_all_that_is_lost(wire_dtype: WireDtype | None, alternating: bool) -> None:
    """A mean of N parts is rounded N times; what a worker rounds of its own part it goes on owing."""
    num_workers, weight = 3, spec("weight", 48, 40)
    dtype = torch.float32 if wire_dtype is None else wire_dtype_of(wire_dtype)
    algorithm = PowerSGD(matrix_rank=2, wire_dtype=wire_dtype, alternating=alternating)
    simulation = Simulation(algorithm, [(weight,)], num_workers=num_workers)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(weight.numel, generator=generator) for _ in range(num_workers)]
    applied, most_lost = torch.zeros(weight.numel, dtype=torch.float64), 0.0
    steps = 25
    for _ in range(steps):
        flats = [[gradient.clone()] for gradient in gradients]
        assert simulation.step(flats)
        applied += flats[0][0].double()
        sent = [engine.state.memory[SENT]["weight"] for engine in simulation.engines]
        assert all(torch.equal(factor, factor.to(dtype).float()) for factor in sent)
        norms = sum(float(factor.norm()) for factor in sent) / num_workers
        most_lost += num_workers * torch.finfo(dtype).eps / 2 * norms
    owed = dict(simulation.state_dicts()[0]["error"])["weight"].view(-1).double()
    true = steps * torch.stack(gradients).double().mean(0)
    in_fp32 = steps * torch.finfo(torch.float32).eps * float(true.norm())
    assert (applied + owed - true).norm() < most_lost + in_fp32
    assert simulation.syncs[0].stats().compression_ratio > 10


def test_without_a_warm_start_each_step_begins_with_other_bases() -> None:
    """The same ones would never see what lies across them."""
    algorithm = PowerSGD(matrix_rank=1, warm_start=False, error_feedback=False)
    simulation = Simulation(algorithm, [(spec("weight", 32, 24),)], num_workers=2)
    gradient, results = torch.randn(32 * 24, generator=torch.Generator().manual_seed(0)), []
    for _ in range(2):
        flats = [[gradient.clone()] for _ in range(2)]
        assert simulation.step(flats)
        results.append(flats[0][0])
    assert simulation.syncs[0].stats().compression_ratio > 10
    assert (results[0] - results[1]).norm() > 0.05 * gradient.norm()
