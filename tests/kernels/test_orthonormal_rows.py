"""Orthonormalisation against projectors from a float64 SVD."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernel_calls import orthonormal_rows
from thinwire.kernels import dispatch
from thinwire.kernels.dispatch import NUMBA, TORCH

NO_NUMBA = "NO NUMBA HERE: nothing compiled was tested"


@pytest.fixture(scope="module", params=[TORCH, NUMBA], ids=lambda backend: backend.name, autouse=True)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Either serves all numbers of rows here."""
    if request.param is NUMBA:
        pytest.importorskip("numba", reason=NO_NUMBA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "backends", (replace(request.param, serves=lambda *_: True),))
        yield


def condition_of(rows: torch.Tensor) -> float:
    """Largest over smallest singular value of the rows, each brought to length one; 1 for no rows."""
    if not len(rows):
        return 1.0
    singular = torch.linalg.svdvals(torch.nn.functional.normalize(rows.double(), dim=1))
    return float(singular[0] / singular[-1])


def low_rank(rows: int, columns: int, matrix_rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, matrix_rank, generator=generator, dtype=torch.float64)
    right = torch.randn(matrix_rank, columns, generator=generator, dtype=torch.float64)
    return (left @ right).float()


@given(
    rows=st.integers(1, 8),
    extra=st.integers(0, 60),
    missing=st.integers(0, 8),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_spans_what_the_svd_spans(rows: int, extra: int, missing: int, exponent: int, seed: int) -> None:
    matrix_rank = max(0, rows - missing)
    matrix = low_rank(rows, rows + extra, matrix_rank, seed) * 10.0**exponent
    condition = condition_of(matrix[:matrix_rank])
    assume(condition < 50)  # fp32 noise in the dependent rows grows with it
    basis = orthonormal_rows([matrix.unsqueeze(0)])[0][0].double()
    alive = basis.norm(dim=1) > 0.5
    assert alive.sum() == matrix_rank
    assert (basis[~alive] == 0).all()
    kept = basis[alive]
    torch.testing.assert_close(kept @ kept.T, torch.eye(matrix_rank, dtype=torch.float64), rtol=0, atol=1e-5)
    right = torch.linalg.svd(matrix.double(), full_matrices=False)[2][:matrix_rank]
    gap = (basis.T @ basis - right.T @ right).norm()
    assert gap < 3e-6 * condition


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1.0, 1e30, 3e38], ids=str)
def test_no_nan_from_any_finite_input(scale: float) -> None:
    matrix = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, -1.0]]) * scale
    basis = orthonormal_rows([matrix.unsqueeze(0)])[0][0]
    assert basis.isfinite().all()
    torch.testing.assert_close(basis.norm(dim=1), torch.tensor([1.0, 0.0, 0.0, 1.0]))


def test_many_matrices_of_different_shapes_are_each_treated_on_their_own() -> None:
    batches = [torch.randn(5, 3, 40), torch.randn(1, 1, 7), torch.zeros(2, 4, 9), torch.randn(3, 2, 2)]
    together = orthonormal_rows(batches)
    for batch, result in zip(batches, together, strict=True):
        assert result.shape == batch.shape
        assert result.dtype == torch.float32
        for matrix, basis in zip(batch, result, strict=True):
            assert torch.equal(basis, orthonormal_rows([matrix.unsqueeze(0)])[0][0])


HARD = {
    "32 monomials": torch.linspace(0, 1, 200).unsqueeze(0) ** torch.arange(32).unsqueeze(1),
    "64 monomials": torch.linspace(-1, 1, 500).unsqueeze(0) ** torch.arange(64).unsqueeze(1),
    "equal but for noise": 1.0 + 1e-4 * torch.randn(32, 400, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("name", HARD)
def test_ill_conditioned_rows_become_orthonormal_or_zero(name: str) -> None:
    basis = orthonormal_rows([HARD[name].unsqueeze(0)])[0][0].double()
    alive = basis.norm(dim=1) > 0.5
    assert alive.sum() >= 2
    assert (basis[~alive] == 0).all()
    kept = basis[alive]
    torch.testing.assert_close(kept @ kept.T, torch.eye(len(kept), dtype=torch.float64), rtol=0, atol=1e-6)
