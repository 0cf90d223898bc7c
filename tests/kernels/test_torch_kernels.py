"""PyTorch's kernels: batches, and what they do of a step, against plain products."""

from __future__ import annotations

import pytest
import torch

from kernel_calls import check_a_step, factor_of, iteration, wanted
from thinwire.kernels import torch_kernels
from thinwire.kernels.matrices import MatrixGroup, round_into
from thinwire.kernels.torch_kernels import LOW_RANK as KERNELS
from thinwire.tensors import accelerators


def batched_group(shape: tuple[int, int], distance: int) -> MatrixGroup:
    """Three matrices in one flat bucket, errors in one batch."""
    generator = torch.Generator().manual_seed(0)
    numel = shape[0] * shape[1]
    flat = torch.randn(3 * (numel + distance), generator=generator)
    places = range(0, len(flat), numel + distance)
    errors = torch.randn(3, *shape, generator=generator)
    return MatrixGroup(
        ["a", "b", "c"], [flat[place : place + numel].view(shape) for place in places], list(errors), 2
    )


@pytest.fixture
def as_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators, and of no matrix alone."""
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    for name in ("PRODUCT", "SUM"):
        monkeypatch.delitem(getattr(torch_kernels, name), 2)


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("distance", [0, 7])
@pytest.mark.parametrize("projects_first", [False, True])
@pytest.mark.usefixtures("as_batches")
def test_matrices_at_equal_distances_are_one_batch(
    scale: float | None, distance: int, projects_first: bool
) -> None:
    check_a_step(KERNELS, [(18, 33)], 2, scale=scale, projects_first=projects_first, distance=distance)


@pytest.mark.usefixtures("as_batches")
@pytest.mark.parametrize("healthy", [True, False])
def test_of_a_batch_that_is_not_healthy_residuals_stay(healthy: bool) -> None:
    """To the bit, whatever the gradients have become."""
    terms = [iteration(factor_of(3, 2, 18), factor_of(3, 2, 33), factor_of(3, 2, 33, seed=2))]
    before, plain, group = (batched_group((18, 33), distance=7) for _ in range(3))
    if not healthy:
        group.matrices[1][2, 3] = torch.inf
    for matrices, flag in ((plain, None), (group, torch.tensor(healthy))):
        errors = [error for error in matrices.errors if error is not None]
        KERNELS.reconstruct(wanted([matrices], [errors], [terms], None, flag))
    assert [matrix.isnan().all() for matrix in group.matrices] == [not healthy] * 3
    for error, expected in zip(group.errors, (plain if healthy else before).errors, strict=True):
        torch.testing.assert_close(error, expected, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (400, 700)], ids=["one block", "several blocks"])
def test_a_step_is_the_mathematics_of_the_paper(
    shape: tuple[int, int], dtype: torch.dtype, scale: float | None
) -> None:
    """Groups of several shapes in one call; residuals of some matrices only."""
    check_a_step(KERNELS, [shape, shape[::-1]], 3, dtype=dtype, scale=scale, all_owe=False)


@pytest.mark.parametrize("healthy", [None, True, False])
@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_what_a_type_cannot_hold_stays_in_the_residual(
    dtype: torch.dtype, scale: float | None, healthy: bool | None
) -> None:
    """Without one it is cut to the range. Of an unhealthy step nothing stays."""
    mean = torch.tensor([1e6, -1e6, 3e38, 1.0009765, 1e-9, 0.0])
    gradient, forgotten = torch.zeros(2, 6, dtype=dtype)
    error = torch.full((6,), 0.5)
    loss_scale = None if scale is None else torch.tensor(scale)
    round_into(gradient, mean, error, loss_scale)
    round_into(forgotten, mean, None, loss_scale)
    assert torch.equal(gradient, forgotten)
    assert gradient.isfinite().all()
    assert error.isfinite().all()
    assert dtype != torch.float16 or gradient[:3].tolist() == [65504.0, -65504.0, 65504.0]
    torch.testing.assert_close(gradient.double() + (error.double() - 0.5) * (scale or 1.0), mean.double())
    if healthy is not None:
        found = torch.tensor([torch.nan]) if not healthy else mean
        rounded, kept = torch.zeros(6, dtype=dtype), torch.full((6,), 0.5)
        round_into(rounded, found.expand(6), kept, loss_scale, torch.tensor(healthy))
        assert torch.equal(rounded, gradient) if healthy else rounded.isnan().all()
        assert torch.equal(kept, error if healthy else torch.full((6,), 0.5))
