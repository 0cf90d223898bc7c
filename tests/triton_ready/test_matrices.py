"""Low-rank steps by Triton's kernels, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_calls import Drawing, asked, assert_near, check_a_step, iteration, wanted
from thinwire import PowerSGD, Quantize
from thinwire.algorithms import Algorithm
from thinwire.kernels import dispatch
from thinwire.kernels.matrices import MatrixGroup, Rows, Write
from thinwire.kernels.torch_kernels import LOW_RANK as PYTORCH
from thinwire.kernels.triton.triton_kernels import LOW_RANK as TRITON
from thinwire.kernels.triton.triton_kernels import SPLIT_ROWS, TABLES
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from thinwire.tensors import accelerators
from triton_ready.interpreting import quiet

pytestmark = quiet


# Matrix rank, type of gradients, loss scale, and whether the step is healthy.
CASES = {
    "rank 1": (1, torch.float32, None, True),
    "rank 3, scaled": (3, torch.bfloat16, 8.0, None),
    "rank 6": (6, torch.float32, None, None),
    "rank 8, unhealthy": (8, torch.float16, None, False),
    "rank 18": (18, torch.float32, 8.0, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_float64(case: str) -> None:
    """Of all groups at once, of several shapes; some matrices have no residual."""
    matrix_rank, dtype, scale, healthy = CASES[case]
    shapes = [(20, 24), (17, 32)]
    check_a_step(TRITON, shapes, matrix_rank, dtype=dtype, scale=scale, healthy=healthy, all_owe=False)


def test_a_matrix_longer_than_a_program_adds_up_is_added_up_in_parts() -> None:
    draw = Drawing()
    group = MatrixGroup(["long"], [draw(SPLIT_ROWS + 3, 16)], [None], 2)
    left = draw(1, 2, SPLIT_ROWS + 3)
    (own,) = TRITON.projections(asked([group], [left], None, add_error=True))
    assert_near(own[0], left[0].double() @ group.matrices[0].double(), 1e-6)


def test_a_matrix_is_computed_alike_whatever_else_is_in_its_bucket() -> None:
    """Beside one of a matrix rank so large that it takes different tiles, and one that is not aligned."""
    draw = Drawing()
    shapes = ((20, 32, 2), (17, 32, 17), (10, 7, 2))
    groups = [MatrixGroup([str(rank)], [draw(rows, columns)], [None], rank) for rows, columns, rank in shapes]
    rights, lefts = ([draw(1, shape[2], shape[side]) for shape in shapes] for side in (1, 0))
    for compute, factors in ((TRITON.products, rights), (TRITON.projections, lefts)):
        (alone,) = compute(asked(groups[:1], factors[:1], None, add_error=False))
        beside, *_ = compute(asked(groups, factors, None, add_error=False))
        assert alone.any()
        assert torch.equal(alone, beside)


def test_forgotten_residuals_and_several_terms() -> None:
    draw = Drawing()
    group = MatrixGroup(["matrix"], [draw(18, 20)], [None], 2)
    terms = [
        iteration(draw(1, 2, 18), draw(1, 2, 20), draw(1, 2, 20)),
        iteration(draw(1, 2, 20), draw(1, 2, 18), draw(1, 2, 18), basis_is_left=False),
    ]
    TRITON.reconstruct(wanted([group], [None], [terms], None))
    (left, right), (other_left, other_right) = (term.mean for term in terms)
    exact = left[0].double().T @ right[0].double() + other_left[0].double().T @ other_right[0].double()
    assert_near(group.matrices[0], exact, 1e-6)


@pytest.mark.parametrize(
    ("matrix_rank", "length"),
    [
        (3, 40),
        pytest.param(3, 1030, marks=pytest.mark.long),
        pytest.param(17, 20, marks=pytest.mark.long),
    ],
)
def test_bases_are_those_of_pytorch(matrix_rank: int, length: int) -> None:
    """Of several lengths, with a dependent row, a dead one that is replaced, and one that is not."""
    draw = Drawing()
    batches = [draw(2, matrix_rank, 40), draw(1, 2, length)]
    batches[0][0, 2] = 2 * batches[0][0, 0] - batches[0][0, 1]
    batches[0][1, 1] = 0
    drawn = [draw(*batch.shape[1:]) for batch in batches]
    for instead in ([None, None], drawn):
        given = [[batch.clone() for batch in batches] for _ in range(2)]
        found, expected = (
            kernels.orthonormal_rows([Rows(*pair) for pair in zip(copies, instead, strict=True)])
            for kernels, copies in zip((TRITON, PYTORCH), given, strict=True)
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert not found[0][0, 2].any()
        assert found[0][1, 1].any() == (instead is drawn)


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_whether_all_is_finite(value: float) -> None:
    tensors = [torch.ones(5000), torch.ones(3)]
    tensors[0][4999] = value
    assert TRITON.all_finite(tensors) == (value == 1.0)


@pytest.mark.parametrize("healthy", [None, True, False])
def test_what_a_step_leaves_is_written_as_by_pytorch(healthy: bool | None) -> None:
    """Means of two types in a healthy step, else NaN; what is remembered stays, or is what was before."""
    flag = None if healthy is None else torch.tensor(healthy)
    found = []
    for kernels in (TRITON, PYTORCH):
        draw = Drawing()
        items = [
            Write(torch.zeros(5000), draw(5000), False, flag),
            Write(torch.zeros(3, dtype=torch.float16), draw(3), False, flag),
            Write(torch.zeros(0), draw(0), False, flag),
            *(Write(draw(2, 7), draw(2, 7), True, flag) for _ in range(2)),
        ]
        old = items[-1].target.clone()
        kernels.write(items)
        assert torch.equal(items[-1].target, old if healthy is False else items[-1].healthy)
        assert items[0].target.isnan().all() == (healthy is False)
        found.append([item.target.nan_to_num(7.0) for item in items])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = replace(
        dispatch.TRITON,
        serves=lambda device, dtype, matrix_rank: dtype in TRITON.gradient_types,
        load=lambda: TABLES,
    )
    monkeypatch.setattr(dispatch, "backends", (triton, dispatch.TORCH))
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)


def simulated(
    algorithm: Algorithm, dtype: torch.dtype, **settings: Any
) -> tuple[list[torch.Tensor], Simulation]:
    """The means of four steps, of which the second is not finite."""
    shapes = {"first": (20, 24), "bias": (7,), "second": (17, 32)}
    specs = [ParameterSpec.of(name, torch.empty(shape, dtype=dtype)) for name, shape in shapes.items()]
    simulation = Simulation(algorithm, [tuple(specs)], num_workers=2, **settings)
    draw, means = Drawing(), []
    for step in range(4):
        given = [[draw(sum(spec.numel for spec in specs)).to(dtype)] for _ in range(2)]
        if step == 1:
            given[1][0][3] = torch.inf
        simulation.step(given)
        means.append(given[0][0].float())
    return means, simulation


SCALED: dict[str, Any] = {"loss_scale": lambda device: torch.tensor(8.0)}
FEEDBACK = Quantize(bits=4, rounding="stochastic", error_feedback=True)
RUNS: dict[str, tuple[Algorithm, torch.dtype, dict[str, Any]]] = {
    "fp32": (PowerSGD(matrix_rank=2), torch.float32, {"host_check": False}),
    "fp16, scaled": (PowerSGD(matrix_rank=2), torch.float16, SCALED),
    "few bits, fp16, scaled": (FEEDBACK, torch.float16, SCALED),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("by_triton")
def test_runs_are_those_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, dtype, settings = RUNS[name]
    got, after = simulated(algorithm, dtype, **settings)
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    expected, before = simulated(algorithm, dtype, **settings)
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.isnan().all() == other.isnan().all() == (step == 1)
        assert step == 1 or (one - other).norm() < (2e-3 if dtype == torch.float16 else 1e-4) * other.norm()
    errors = [dict(simulation.state_dicts()[0]["error"]) for simulation in (before, after)]
    assert errors[0].keys() == errors[1].keys() >= {"first", "second"}
    for label, error in errors[0].items():
        assert (error - errors[1][label]).norm() <= 2e-3 * error.norm() + 1e-6
    assert after.syncs[0].stats().compression_ratio > 1.5
