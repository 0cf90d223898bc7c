"""What accelerators compute, run on the CPU: the means, residuals and states that the CPU computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from catalog import buckets, random_gradients
from thinwire import PowerSGD
from thinwire.algorithms import Algorithm, BatchedPowerSGD, Memory
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.slots import BASIS
from thinwire.kernels import dispatch
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from thinwire.tensors import accelerators

SCALE = torch.tensor(8.0)
LOW_RANK: list[LowRank] = [
    PowerSGD(matrix_rank=2),
    PowerSGD(matrix_rank=5),
    PowerSGD(matrix_rank=2, power_iterations=2, min_compression_ratio=1),
    PowerSGD(matrix_rank=2, alternating=True, power_iterations=2),
    PowerSGD(matrix_rank=2, warm_start=False, wire_dtype="bf16"),
    PowerSGD(matrix_rank=2, error_feedback=False),
    BatchedPowerSGD(),
]


Layout = list[tuple[ParameterSpec, ...]]


def run(algorithm: Algorithm, layout: Layout, **settings: Any) -> tuple[list[torch.Tensor], Simulation]:
    """The means of four steps, of which the third is not finite."""
    simulation, means = Simulation(algorithm, layout, num_workers=2, **settings), []
    for step in range(4):
        gradients = random_gradients(layout, num_workers=2, seed=step)
        if step == 2:
            gradients[1][0][7] = torch.inf
        simulation.step(gradients)
        means.append(torch.cat(gradients[0]).float())
    return means, simulation


def assert_near(
    one: tuple[list[torch.Tensor], Simulation], other: tuple[list[torch.Tensor], Simulation], tolerance: float
) -> None:
    """Check that two runs have the same means and residuals, but for rounding."""
    for mean, true in zip(one[0], other[0], strict=True):
        assert mean.isnan().all() == true.isnan().all()
        assert mean.isnan().all() or (mean - true).norm() < tolerance * true.norm()
    residuals, expected = (dict(simulation.state_dicts()[0]["error"]) for _, simulation in (one, other))
    assert residuals.keys() == expected.keys()
    for name, residual in residuals.items():
        assert (residual - expected[name]).norm() <= tolerance * residual.norm() + 1e-6
    stats = one[1].syncs[0].stats()
    assert stats.nonfinite_steps == 1
    assert stats.compression_ratio > 1.5


# A loss scale may be a new tensor whenever it is asked for.
SETTINGS: dict[str, dict[str, Any]] = {
    "unscaled": {},
    "scaled": {"loss_scale": lambda device: SCALE},
    "unscaled, no host check": {"host_check": False},
    "scaled, no host check": {"loss_scale": lambda device: SCALE.clone(), "host_check": False},
}


@pytest.mark.parametrize(
    ("algorithm", "dtype", "name"),
    [
        *((algorithm, torch.bfloat16, "scaled") for algorithm in LOW_RANK),
        *((algorithm, torch.float32, "unscaled") for algorithm in LOW_RANK[::3]),
        (LOW_RANK[0], torch.bfloat16, "scaled, no host check"),
        (BatchedPowerSGD(), torch.float32, "unscaled, no host check"),
    ],
    ids=str,
)
def test_the_same_as_on_the_cpu(
    algorithm: LowRank, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS[name]
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    on_cpu = run(algorithm, buckets(dtype), **settings | {"host_check": True})
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    if settings.get("host_check") is False:
        monkeypatch.setattr(Memory, "copied", None)  # nothing is copied to be put back
    on_accelerator = run(algorithm, buckets(dtype), **settings)
    tolerance = 1e-4 if dtype == torch.float32 and "bf16" not in str(algorithm) else 3e-2
    assert_near(on_accelerator, on_cpu, tolerance)
    (_, after), (_, before) = on_accelerator, on_cpu
    assert bool(after.engines[0].state.memory[BASIS]) == algorithm.warm_start
    assert not before.engines[0].state.memory[BASIS]


def test_a_saved_state_resumes_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run makes the bases that the other has made ahead; switching the algorithm forgets them."""
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    algorithm, layout = PowerSGD(matrix_rank=2), buckets()[:1]
    first, second = (Simulation(algorithm, layout, num_workers=1) for _ in range(2))
    for seed in range(3):
        first.step(random_gradients(layout, num_workers=1, seed=seed))
    second.syncs[0].load_state_dict(first.state_dicts()[0])
    assert first.engines[0].state.memory[BASIS]
    assert not second.engines[0].state.memory[BASIS]
    means = []
    for simulation in (first, second):
        simulation.step(gradients := random_gradients(layout, num_workers=1, seed=3))
        means.append(gradients[0][0])
    assert torch.equal(*means)
    first.syncs[0].use(PowerSGD(matrix_rank=2, seed=1))
    assert not first.engines[0].state.memory[BASIS]
