"""Low-rank steps by Triton's kernels, against float64."""

from __future__ import annotations

import pytest
import torch

from kernel_calls import Drawing, asked, assert_near, check_a_step, iteration, wanted
from thinwire.kernels.matrices import MatrixGroup, Rows, Write
from thinwire.kernels.torch_kernels import LOW_RANK as PYTORCH
from thinwire.kernels.triton.triton_kernels import LOW_RANK as TRITON
from thinwire.kernels.triton.triton_kernels import SPLIT_ROWS
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
    [(3, 40), pytest.param(3, 1030, marks=pytest.mark.long), pytest.param(17, 20, marks=pytest.mark.long)],
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
