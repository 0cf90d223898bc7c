"""What accelerators compute, run on the CPU: the means, residuals and states that the CPU computes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from catalog import buckets, random_gradients
from thinwire import PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD, Memory
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.slots import BASIS
from thinwire.kernels import dispatch
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from thinwire.tensors import accelerators

LOW_RANK = [
    PowerSGD(matrix_rank=2),
    PowerSGD(matrix_rank=5),
    PowerSGD(matrix_rank=2, power_iterations=2, min_compression_ratio=1),
    PowerSGD(matrix_rank=2, alternating=True, power_iterations=2),
    PowerSGD(matrix_rank=2, warm_start=False, wire_dtype="bf16"),
    PowerSGD(matrix_rank=2, error_feedback=False),
    BatchedPowerSGD(),
]


def in_dtype(dtype: torch.dtype) -> list[tuple[ParameterSpec, ...]]:
    return [
        tuple(ParameterSpec(spec.name, spec.shape, spec.stride, dtype) for spec in bucket)
        for bucket in buckets()
    ]


def run(
    algorithm: Algorithm,
    dtype: torch.dtype,
    bad_steps: Collection[int] = (2,),
    **settings: Any,
) -> tuple[list[torch.Tensor], Simulation]:
    """The means of four steps, of which some are not finite."""
    layout = in_dtype(dtype)
    simulation = Simulation(algorithm, layout, num_workers=2, **settings)
    means = []
    for step in range(4):
        gradients = random_gradients(layout, num_workers=2, seed=step)
        given = [[flat.to(dtype) for flat in of_worker] for of_worker in gradients]
        if step in bad_steps:
            given[1][0][7] = torch.inf
        simulation.step(given)
        means.append(torch.cat(given[0]).float())
    return means, simulation


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
@pytest.mark.parametrize("algorithm", LOW_RANK, ids=str)
def test_the_same_as_on_the_cpu(
    algorithm: Algorithm, dtype: torch.dtype, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    settings: dict[str, Any] = {"loss_scale": lambda device: torch.tensor(8.0)} if scaled else {}
    expected, before = run(algorithm, dtype, **settings)
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    got, after = run(algorithm, dtype, **settings)
    tolerance = 1e-4 if dtype == torch.float32 and "bf16" not in str(algorithm) else 3e-2
    for a, b in zip(got, expected, strict=True):
        assert a.isnan().all() == b.isnan().all()
        assert a.isnan().all() or (a - b).norm() < tolerance * b.norm()
    errors = [dict(simulation.state_dicts()[0]["error"]) for simulation in (before, after)]
    assert errors[0].keys() == errors[1].keys()
    for name, error in errors[0].items():
        assert (error - errors[1][name]).norm() <= tolerance * error.norm() + 1e-6
    assert after.syncs[0].stats().compression_ratio > 1.5
    assert bool(after.engines[0].state.memory[BASIS]) == algorithm.warm_start  # type: ignore[attr-defined]
    assert not before.engines[0].state.memory[BASIS]


SCALE = torch.tensor(3.0)
# Types, steps that are not finite, and a loss scale, which may be a new tensor whenever it is asked for.
RUNS: dict[str, tuple[torch.dtype, set[int], dict[str, Any]]] = {
    "fp32": (torch.float32, {0}, {}),
    "bf16, one loss scale": (torch.bfloat16, {1, 2}, {"loss_scale": lambda device: SCALE}),
    "fp32, new loss scales": (torch.float32, {1, 2}, {"loss_scale": lambda device: SCALE.clone()}),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    "algorithm",
    [
        PowerSGD(matrix_rank=2),
        PowerSGD(matrix_rank=2, wire_dtype="bf16"),
        BatchedPowerSGD(matrix_rank=2),
        TopK(),
        Quantize(bits=4, error_feedback=True),
    ],
    ids=str,
)
def test_without_a_host_check_to_the_bit_what_it_is_with_one(
    algorithm: Algorithm, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, bad_steps, settings = RUNS[name]
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    seen, expected = run(algorithm, dtype, bad_steps, **settings)

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2

    def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
        # A product's last bits may depend on where in memory a factor lies: one is alone, the other a copy.
        is_close = isinstance(algorithm, BatchedPowerSGD) and (a - b).norm() < tolerance * a.norm()
        return is_close or torch.equal(a, b)

    if isinstance(algorithm, LowRank):
        monkeypatch.setattr(Memory, "copied", None)  # nothing is copied to be put back
    unseen, got = run(algorithm, dtype, bad_steps, host_check=False, **settings)
    for step, (a, b) in enumerate(zip(seen, unseen, strict=True)):
        assert a.isnan().all() == b.isnan().all() == (step in bad_steps)
        assert step in bad_steps or is_same(a, b)
    states = [dict(simulation.state_dicts()[0]["error"]) for simulation in (expected, got)]
    assert all(is_same(states[0][name], states[1][name]) for name in states[0] | states[1])
    assert got.syncs[0].stats().nonfinite_steps == len(bad_steps)
    assert got.syncs[0].stats().compression_ratio > 2


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
