"""What accelerators compute, run on the CPU: the means, residuals and states that the CPU computes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

from catalog import buckets, random_gradients, spec
from thinwire import PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD, Memory
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.slots import BASIS
from thinwire.kernels import dispatch, torch_kernels
from thinwire.kernels.matrices import MatrixGroup
from thinwire.kernels.residual_layout import Residuals, Rooms, move_where
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from thinwire.tensors import accelerators
from thinwire.tensors.layout import stacked

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


def layers(dtype: torch.dtype = torch.float32) -> list[tuple[ParameterSpec, ...]]:
    """Equal layers over two buckets, of which residuals are moved by rows."""
    shapes: dict[str, list[tuple[int, ...]]] = {
        "0.out": [(64, 32), (32,)],
        "0.up": [(32, 96), (96,)],
        "1.out": [(64, 32), (32,)],
        "1.up": [(32, 96)],
    }
    bucket = [
        spec(f"{name}.{len(shape)}", *shape, dtype=dtype) for name, some in shapes.items() for shape in some
    ]
    return [tuple(bucket[:3]), tuple(bucket[3:])]


def run(
    algorithm: Algorithm,
    dtype: torch.dtype,
    bad_steps: Collection[int] = (2,),
    layout: list[tuple[ParameterSpec, ...]] | None = None,
    **settings: Any,
) -> tuple[list[torch.Tensor], Simulation]:
    """The means of four steps, of which some are not finite."""
    layout = layout or in_dtype(dtype)
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
    monkeypatch.setattr(accelerators, "pays_per_launch", lambda device: True)
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
    assert bool(after.engines[0].memory[BASIS]) == algorithm.warm_start  # type: ignore[attr-defined]
    assert not before.engines[0].memory[BASIS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad_steps", [{0}, {1, 2}], ids=str)
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
    algorithm: Algorithm,
    bad_steps: set[int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(accelerators, "pays_per_launch", lambda device: True)
    seen, expected = run(algorithm, dtype, bad_steps)

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2

    def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
        # A product's last bits may depend on where in memory a factor lies: one is alone, the other a copy.
        is_close = isinstance(algorithm, BatchedPowerSGD) and (a - b).norm() < tolerance * a.norm()
        return is_close or torch.equal(a, b)

    if isinstance(algorithm, LowRank):
        monkeypatch.setattr(Memory, "copied", None)  # nothing is copied to be put back
    unseen, got = run(algorithm, dtype, bad_steps, host_check=False)
    for step, (a, b) in enumerate(zip(seen, unseen, strict=True)):
        assert a.isnan().all() == b.isnan().all() == (step in bad_steps)
        assert step in bad_steps or is_same(a, b)
    states = [dict(simulation.state_dicts()[0]["error"]) for simulation in (expected, got)]
    assert all(is_same(states[0][name], states[1][name]) for name in states[0] | states[1])
    assert got.syncs[0].stats().nonfinite_steps == len(bad_steps)
    assert got.syncs[0].stats().compression_ratio > 2


SCALE = torch.tensor(3.0)
SCALES: dict[str, dict[str, Any]] = {
    "no loss scale": {},
    "one loss scale": {"loss_scale": lambda device: SCALE},
    "a new tensor whenever it is asked": {"loss_scale": lambda device: SCALE.clone()},
}


@pytest.mark.parametrize("scaled", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad_steps", [{0}, {1, 2}], ids=str)
def test_by_rows_to_the_bit_what_it_is_with_a_host_check(
    bad_steps: set[int], dtype: torch.dtype, scaled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of a step that is not finite residuals stay, in the memory where they are."""
    algorithm, layout, settings = PowerSGD(matrix_rank=2), layers(dtype), SCALES[scaled]
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    on_cpu, _ = run(algorithm, dtype, bad_steps, layout, **settings)
    monkeypatch.setattr(accelerators, "pays_per_launch", lambda device: True)
    seen, expected = run(algorithm, dtype, bad_steps, layout, **settings)
    moved: list[int] = []
    monkeypatch.setattr(torch_kernels, "_choose", None)

    def move(flag: torch.Tensor, matrices: Sequence[torch.Tensor], *given: Any) -> None:
        moved.append(len(matrices))
        move_where(flag, matrices, *given)

    monkeypatch.setattr(torch_kernels, "move_where", move)
    unseen, got = run(algorithm, dtype, bad_steps, layout, host_check=False, **settings)
    # All buckets at once, in each of four steps on both workers.
    assert moved == [4] * 8
    for step, (a, b, c) in enumerate(zip(seen, unseen, on_cpu, strict=True)):
        assert a.isnan().all() == b.isnan().all() == c.isnan().all() == (step in bad_steps)
        assert step in bad_steps or torch.equal(a, b)
        assert step in bad_steps or (a - c).norm() < (1e-4 if dtype == torch.float32 else 3e-2) * c.norm()
    for before, after in zip(expected.engines, got.engines, strict=True):
        slots = [engine.memory.slots for engine in (before, after)]
        assert slots[0].keys() == slots[1].keys()
        for slot, tensors in slots[0].items():
            assert all(torch.equal(tensors[label], slots[1][slot][label]) for label in tensors), slot
        error = after.memory[ERROR]
        assert all(room.isfinite().all() and room.any() for room in error.values())
        assert stacked([error["0.out.2"], error["1.out.2"]]) is not None
        assert stacked([error["0.up.2"], error["1.up.2"]]) is not None
    assert got.syncs[0].stats().compression_ratio > 2


def test_residuals_of_one_shape_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all buckets that a step has; what was kept goes along when the next step has others."""
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(accelerators, "pays_per_launch", lambda device: True)
    shapes = [(8, 64), (4, 64), (4, 64), (8, 64)]

    def laid(
        kept: Sequence[torch.Tensor | None], *some: int, dtype: torch.dtype = torch.float32
    ) -> list[Rooms]:
        groups = {index: MatrixGroup([str(index)], [torch.empty(shapes[index])], [None], 2) for index in some}
        return dispatch.residual_rooms([Residuals(groups[index], [kept[index]], dtype) for index in some])

    rooms = laid([None, None, torch.full((256,), 2.0), None], 0, 1, 2, 3)
    flat = [room.tensors[0] for room in rooms]
    assert [flat[index].storage_offset() for index in (0, 3, 1, 2)] == [0, 512, 1024, 1280]
    assert [float(flat[index].sum()) for index in (0, 3, 1, 2)] == [0, 0, 0, 512]
    spares = [room.spare for room in rooms if room.spare is not None]
    assert [(len(each), each.storage_offset()) for each in spares] == [(256, 1536)] * 4

    again = laid(flat, 0, 1, 2, 3)
    assert [room.tensors[0].data_ptr() for room in again] == [tensor.data_ptr() for tensor in flat]
    # One bucket alone: what is another's must not be in reach, nor its last rows taken for spare ones.
    alone = laid(flat, 2, 3)
    assert {room.tensors[0].untyped_storage().nbytes() for room in alone} == {4 * (768 + 256)}
    assert torch.equal(alone[0].tensors[0], flat[2])
    assert torch.equal(laid(flat, 0, 1, 2, 3, dtype=torch.float64)[2].tensors[0], flat[2].double())


def test_a_saved_state_resumes_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run makes the bases that the other has made ahead; switching the algorithm forgets them."""
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(accelerators, "pays_per_launch", lambda device: True)
    algorithm, layout = PowerSGD(matrix_rank=2), buckets()[:1]
    first, second = (Simulation(algorithm, layout, num_workers=1) for _ in range(2))
    for seed in range(3):
        first.step(random_gradients(layout, num_workers=1, seed=seed))
    second.syncs[0].load_state_dict(first.state_dicts()[0])
    assert first.engines[0].memory[BASIS]
    assert not second.engines[0].memory[BASIS]
    means = []
    for simulation in (first, second):
        simulation.step(gradients := random_gradients(layout, num_workers=1, seed=3))
        means.append(gradients[0][0])
    assert torch.equal(*means)
    first.syncs[0].use(PowerSGD(matrix_rank=2, seed=1))
    assert not first.engines[0].memory[BASIS]
